"""How much of a transfer hides behind the prefill it belongs to: SmolLM2, 1,024 tokens, 1 Gbit/s.

`make bench-overlap`, as root: a router and a prefill worker on one host of a lab, a decode worker
on another. A client that asks for a stream sees what was not hidden: the pause between the first
token, which leaves prefill as soon as the prompt is computed, and the second, beyond the usual
pause of decode alone. In turn with each request, plain sockets carry as many bytes over the same
link while it is idle:

    hidden share = 1 - (pause - usual pause) / time of the same bytes alone
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console

from decode_worker.settings import DecodeSettings
from engine.clock import MonotonicClock
from kvferry.bench_report import Row, publish, row
from kvferry.lab.lab import Lab, running_lab
from kvferry.lab.namespaces import why_no_namespaces
from kvferry.lab.redis_in_node import redis_in
from kvferry.lab.topology import parse_topology
from kvferry.launcher import Part, Role
from kvferry.local_launcher import LocalLauncher, role_command
from kvferry.transfer_bench.case import Case
from kvferry.transfer_bench.pair import processes
from prefill_worker.settings import PrefillSettings
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from router.settings import RouterSettings
from transport.grpc_options import channel_options

OUT = Path("bench/out/overlap.json")
LINK = "1gbit,0.2ms"
NUM_TOKENS = 1024
NUM_OUTPUT = 24
VOCABULARY = 49_000
RUNS = 7
CLIENT = "--client"
NODE_OF = {Role.ROUTER: "prefill", Role.PREFILL: "prefill", Role.DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class Seen:
    """By a client, of one request."""

    ttft_s: float
    pause_s: float  # between the first token and the second
    usual_pause_s: float  # the median of those after
    transfer_s: float  # from the first chunk offered to the commit
    num_bytes: int


async def ask(stub: Any, seed: int) -> Seen:
    """One stream. Prompts differ from their first token on, so that nothing is cached."""
    source = random.Random(seed)
    ids = [source.randrange(17, VOCABULARY) for _ in range(NUM_TOKENS)]
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        sampling=pb.SamplingParams(max_tokens=NUM_OUTPUT, temperature=0, ignore_eos=True),
        pins=pb.Pins(prefill="prefill", decode="decode"),
    )
    began, times, journey = time.perf_counter(), list[float](), pb.Journey()
    async for response in stub.Generate(request, timeout=120):
        if response.delta.token_ids:
            times += [time.perf_counter()] * len(response.delta.token_ids)
        if response.HasField("usage"):
            journey = response.usage.journey
    pauses = [after - before for before, after in pairwise(times)]
    return Seen(
        ttft_s=times[0] - began,
        pause_s=pauses[0],
        usual_pause_s=statistics.median(pauses[1:]),
        transfer_s=journey.transfer_ms / 1000,
        num_bytes=journey.shipped_bytes,
    )


async def client(address: str) -> None:
    """A line on standard input is a seed; a line of JSON on standard output what was seen."""
    loop = asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(asdict(await ask(stub, int(line)))), flush=True)


class Cluster:
    """Router, prefill and decode on their hosts, and a client beside the router."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab = lab
        self._folder = folder
        self._stack = AsyncExitStack()
        self._client: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        for inside in ("logs", "parts"):
            (self._folder / inside).mkdir(parents=True)
        log = self._folder / "logs" / "redis.log"
        redis_url = await self._stack.enter_async_context(redis_in(self._lab, "prefill", log))
        launcher = LocalLauncher(
            self._folder, lambda event: None, MonotonicClock(), command_of=self._command
        )
        self._stack.push_async_callback(launcher.stop)
        shared = {"model": "smollm2", "redis_url": redis_url}
        near, far = self._lab.host("prefill"), self._lab.host("decode")
        router = RouterSettings.model_validate(
            shared | {"host": near, "grpc_port": 0, "http_port": 0}
        )
        workers = {"num_blocks": 256}
        prefill = PrefillSettings.model_validate(
            shared | workers | {"name": "prefill", "host": near}
        )
        decode = DecodeSettings.model_validate(shared | workers | {"name": "decode", "host": far})
        handles = await asyncio.gather(
            launcher.start(Part("router", Role.ROUTER, router)),
            launcher.start(Part("prefill", Role.PREFILL, prefill)),
            launcher.start(Part("decode", Role.DECODE, decode)),
        )
        await self._start_client(handles[0].info["grpc_address"])

    async def ask(self, seed: int) -> Seen:
        process = self._client
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{seed}\n".encode())
        line = await process.stdout.readline()
        if not line:
            raise SystemExit("the client of the benchmark ended: see above")
        return Seen(**json.loads(line))

    async def stop(self) -> None:
        if self._client is not None:
            assert self._client.stdin is not None
            self._client.stdin.close()
            await self._client.wait()
        await self._stack.aclose()

    async def _start_client(self, address: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), CLIENT, address]
        self._client = await asyncio.create_subprocess_exec(
            *self._lab.command("prefill", command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    def _command(self, part: Part, settings_file: Path, ready_fd: int) -> list[str]:
        return self._lab.command(NODE_OF[part.role], role_command(part, settings_file, ready_fd))


async def measure(lab: Lab, folder: Path) -> tuple[list[Seen], list[float]]:
    """What clients saw, and in turn the seconds that the same bytes took alone."""
    cluster, seen, alone = Cluster(lab, folder), list[Seen](), list[float]()
    try:
        await cluster.start()
        async with processes(lab.command) as pair:
            await asyncio.sleep(2)  # until the router has heard of both
            num_bytes = (await cluster.ask(0)).num_bytes
            plain = Case("tcp", num_bytes >> 19, host=lab.host("decode"))  # half a MiB a block
            moved = plain.total_bytes // plain.message_bytes * plain.message_bytes
            for seed in range(1, RUNS + 1):
                seen.append(await cluster.ask(seed))
                alone.append(await pair.limit_seconds(plain) * num_bytes / moved)
    finally:
        await cluster.stop()
    return seen, alone


def report(seen: list[Seen], alone: list[float]) -> list[Row]:
    took = statistics.median(alone)
    late = [each.pause_s - each.usual_pause_s for each in seen]
    shares = [1 - each / took for each in late]
    what = f"SmolLM2, {NUM_TOKENS} tokens, {seen[0].num_bytes / 2**20:.0f} MiB over {LINK}"
    return [
        row(f"{what}: hidden", shares, [1.0], unit="share"),
        row("not hidden", [each * 1000 for each in late], unit="ms"),
        row("the same bytes alone", [each * 1000 for each in alone], unit="ms"),
        row("usual pause between tokens", [each.usual_pause_s * 1000 for each in seen], unit="ms"),
        row("first chunk offered to commit", [each.transfer_s * 1000 for each in seen], unit="ms"),
        row("request to first token", [each.ttft_s * 1000 for each in seen], unit="ms"),
    ]


async def main() -> None:
    console = Console()
    if reason := why_no_namespaces():
        console.print(f"not measured: {reason}")
        return
    load = os.getloadavg()[0]
    topology = parse_topology("prefill,decode", [LINK])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with running_lab(topology, folder / "lab", "namespaces") as lab:
            rows = report(*await measure(lab, folder / "cluster"))
    about = {"link": LINK, "limit": "1: all of the time of the same bytes alone on the same link"}
    publish(OUT, rows, console, load, about)


if __name__ == "__main__":
    asyncio.run(client(sys.argv[2]) if sys.argv[1:2] == [CLIENT] else main())
