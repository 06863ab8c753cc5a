"""The same trace, policy, capacities and order, live and in a replay: do they agree?

live      a cluster on this machine serves the trace, its caches emptied before
measured  its workers say how fast they are
replayed  simulated workers of that speed and size serve it
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, pstdev

import grpc.aio
from rich import box
from rich.console import Console
from rich.table import Table

from engine.clock import Clock
from kvferry.cluster import Cluster
from kvferry.ps import registered
from kvferry.replay.figures import Figures
from kvferry.replay.options import Options
from kvferry.replay.outcome import Outcome
from kvferry.replay.rivals import Policy
from kvferry.replay.simulation import replay
from kvferry.replay.trace import Trace
from kvferry.serve_bench.command import Plan, serve
from kvferry.serve_bench.doors import GrpcDoor, Keys
from kvferry.serve_bench.measured import measured_speeds
from kvferry.serve_bench.results import Results
from kvferry.serve_bench.workload import Workload
from kvferry.settings import Settings
from prefix_index.index import WorkerRecord
from protos.worker_pb2 import FlushCacheRequest
from protos.worker_pb2_grpc import WorkerAdminStub
from transport.grpc_options import channel_options

ADMIN_TIMEOUT_S = 10.0
NEWS_S = 0.5  # until the router has heard that the caches are empty
VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Pair:
    """One seed's run and its replay."""

    seed: int
    live: Results
    replayed: Outcome

    @property
    def rates(self) -> tuple[float, float]:
        """What was delivered, live and in the replay."""
        return self.live.figures("live").delivered, self.replayed.figures.delivered


async def compared(
    cluster: Cluster, settings: Settings, trace: Trace, seed: int, clock: Clock, console: Console
) -> Pair:
    """Raises CommandError."""
    record = cluster.record
    index = (record.redis_url, record.key_prefix)
    await _empty_caches(await registered(*index))
    await clock.sleep(NEWS_S)
    plan = Plan(Workload(trace, VOCABULARY, seed), warm_up=0, timeout_s=60.0)
    door = partial(GrpcDoor, record.grpc_address, Keys({"": record.api_key}))
    live = await serve(plan, door, record.http_url, clock, console)
    speeds = measured_speeds(await registered(*index), live)
    prefill, decode = settings.prefill, settings.decode
    options = Options(
        policy=Policy.OURS,
        num_replicas=settings.num_prefill,
        cache_tokens=prefill.num_blocks * prefill.block_size,
        load=None,
        fetches=settings.router.fetch_blocks,
        num_decodes=settings.num_decode,
        decode_tokens=decode.num_blocks * decode.block_size,
        seed=seed,
        speeds=speeds,
    )
    return Pair(seed, live, await asyncio.to_thread(replay, trace, options))


async def _empty_caches(workers: Sequence[WorkerRecord]) -> None:
    for worker in workers:
        async with grpc.aio.insecure_channel(worker.address, options=channel_options()) as channel:
            stub = WorkerAdminStub(channel)
            await stub.FlushCache(FlushCacheRequest(), timeout=ADMIN_TIMEOUT_S)


def difference(pairs: Sequence[Pair]) -> float:
    """Of the mean hit rates, as a share of the replay's; above 0 where live reused more."""
    live, replayed = (fmean(rates) for rates in zip(*(pair.rates for pair in pairs), strict=True))
    return live / replayed - 1


def figures(pairs: Sequence[Pair]) -> list[Figures]:
    """Of the first seed, for a plot."""
    return [pairs[0].live.figures("live"), _renamed(pairs[0].replayed.figures)]


def _renamed(found: Figures) -> Figures:
    return Figures(
        "replay", found.hit_rate, found.ttft_ms, found.tpot_ms, found.work, found.work_unit
    )


def table(pairs: Sequence[Pair]) -> Table:
    """A line for each seed, and one for all with the spread over them."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("seed", "live", "replay", "live / replay", "failed", "imbalance live"):
        made.add_column(heading, justify="right")
    made.add_column("replay", justify="right")
    for pair in pairs:
        live, replayed = pair.rates
        computed = {
            name: tokens
            for name, tokens in pair.live.computed_tokens().items()
            if name in pair.replayed.work_ms
        }
        made.add_row(
            str(pair.seed),
            f"{live:.2%}",
            f"{replayed:.2%}",
            f"{live / replayed:.3f}",
            str(sum(pair.live.failed.values())),
            f"{max(computed.values()) / fmean(computed.values()):.2f}" if computed else "-",
            f"{pair.replayed.imbalance:.2f}",
        )
    made.add_section()
    columns = list(zip(*(pair.rates for pair in pairs), strict=True))
    spreads = [f"{fmean(rates):.2%} ± {pstdev(rates):.2%}" for rates in columns]
    made.add_row("all", *spreads, f"{1 + difference(pairs):.3f}", "", "", "")
    return made
