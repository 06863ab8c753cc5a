"""`kvferry ps`: who is in the cluster, how busy each one is, and which pairs cannot work together.

The index says who holds a lease; each worker is then asked itself what it holds.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

import grpc
import grpc.aio
from rich import box
from rich.console import Console
from rich.table import Table

from engine.clock import MonotonicClock
from kvferry.errors import NoCluster
from kvferry.redis_server import ask_version
from prefix_index.index import IndexUnavailable, Role, WorkerRecord
from prefix_index.quarantine import CALL, wires_left
from prefix_index.redis_index import RedisIndex
from prefix_index.worker_record import shared_wires
from protos.worker_pb2 import InspectRequest, InspectResponse
from protos.worker_pb2_grpc import WorkerAdminStub
from transport.grpc_options import channel_options

ASK_TIMEOUT_S = 3.0


async def ps(redis_url: str, key_prefix: str, console: Console) -> None:
    """Raises CommandError when the index cannot be read."""
    await ask_version(redis_url)
    workers = await registered(redis_url, key_prefix)
    answers = await asyncio.gather(*(inspect(worker.address) for worker in workers))
    console.print(worker_table(workers, answers))
    problems = unusable_pairs(workers)
    for problem in [*problems, *quarantines(workers, datetime.now())]:
        console.print(problem, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if workers and not problems:
        console.print("every prefill worker can serve every decode worker", highlight=False)


async def registered(redis_url: str, key_prefix: str) -> list[WorkerRecord]:
    index = RedisIndex(redis_url, MonotonicClock(), prefix=key_prefix)
    try:
        return await index.workers()
    except IndexUnavailable as error:
        raise NoCluster(f"the index cannot be read: {error}") from None
    finally:
        await index.close()


async def inspect(address: str) -> InspectResponse | str:
    """The worker's own books, or why there are none."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        try:
            stub = WorkerAdminStub(channel)
            books: InspectResponse = await stub.Inspect(InspectRequest(), timeout=ASK_TIMEOUT_S)
            return books
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"


def worker_table(
    workers: Sequence[WorkerRecord], answers: Sequence[InspectResponse | str]
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("worker\nepoch", "role\nstate", "address\nKV heads of ranks"):
        table.add_column(heading)
    for heading in ("requests\nrun + wait", "blocks used\n+ cached / all"):
        table.add_column(heading, justify="right")
    for worker, answer in zip(workers, answers, strict=True):
        heads = " ".join(f"\\[{start}..{stop})" for start, stop in worker.kv_intervals)
        requests, blocks, state = _load_cells(worker, answer)
        manifest = worker.manifest
        table.add_row(
            f"[bold]{worker.name}[/]\n[dim]{worker.epoch}[/]",
            f"{worker.role.value}\n{state}",
            f"{worker.address}\n[dim]{heads}[/]",
            requests,
            f"{blocks}\n[dim]of {manifest.block_size} tokens, {manifest.kv_layout}[/]",
        )
    return table


def _load_cells(worker: WorkerRecord, answer: InspectResponse | str) -> tuple[str, str, str]:
    if isinstance(answer, str):
        load = worker.load
        used = f"{load.total_blocks - load.free_blocks} / {load.total_blocks}"
        return f"{load.running} + {load.waiting}", used, f"[red]no answer[/] ({answer})"
    books = answer.pool
    return (
        f"{answer.running_requests} + {answer.waiting_requests}",
        f"{books.used_blocks} + {books.cached_blocks} / {books.total_blocks}",
        "[yellow]draining[/]" if answer.draining else "[green]serving[/]",
    )


def unusable_pairs(workers: Sequence[WorkerRecord]) -> list[str]:
    """One sentence for each pair that will never be routed, or for the half that is missing."""
    prefill = [worker for worker in workers if worker.role is Role.PREFILL]
    decode = [worker for worker in workers if worker.role is Role.DECODE]
    if not decode:
        return ["no decode worker: nothing can be served"]
    if not prefill:
        return ["no prefill worker: decode computes every prompt itself"]
    reasons = ((p, d, _against(p, d)) for p in prefill for d in decode)
    return [f"{p.name} cannot serve {d.name}: {reason}" for p, d, reason in reasons if reason]


def _against(prefill: WorkerRecord, decode: WorkerRecord) -> str:
    mismatch = prefill.manifest.mismatch(decode.manifest)
    if mismatch:
        return mismatch
    wires = shared_wires(prefill.manifest, decode.manifest)
    left, _ = wires_left(decode.load.quarantines, prefill.name, prefill.epoch, wires)
    return "" if left else "too much of what it sends comes damaged"


def quarantines(workers: Sequence[WorkerRecord], now: datetime) -> list[str]:
    """One sentence for each wire, and each worker, that another one leaves alone, and why."""
    alive = {(worker.name, worker.epoch) for worker in workers}
    return [
        f"{each.prefill} (epoch {each.epoch}) to {receiver.name}: "
        f"{_left_alone(each.wire)} in quarantine since "
        f"{now - timedelta(seconds=each.for_s):%H:%M:%S}, for {each.left_s:.0f} s more: "
        f"{each.reason}"
        for receiver in workers
        for each in receiver.load.quarantines
        if (each.prefill, each.epoch) in alive
    ]


def _left_alone(wire: str) -> str:
    if wire == CALL:
        return "what calls bring is"
    return f"the wire {wire} is" if wire else "every wire is"
