"""How many requests a second one router carries, and what it adds to each: workers answer at once.

`make bench-ceiling`, about a minute. Prompts of 1,024 and 8,000 tokens over gRPC, 1 and 16 at a
time, through a real router process to eight puppets; a call to a puppet itself stands beside it,
and one through a relay, which passes the same bytes on and does nothing else: what gRPC in Python
costs by itself.
"""

import argparse
import asyncio
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console

from engine.clock import MonotonicClock
from kvferry.bench_report import Row, line, publish, row
from kvferry.index_bench.processes import first_line, process
from kvferry.redis_server import free_port, redis_server
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc
from protos import worker_pb2 as wpb
from protos import worker_pb2_grpc as wrpc
from transport.grpc_options import channel_options

OUT = Path("bench/out/ceiling.json")
PUPPETS = 8
RUNS = 5
RUN_S = 1.0
MAY_ADD_MS = 0.5  # beyond what gRPC in Python takes by itself
START_S = 30.0

Ask = Callable[[int], Awaitable[None]]


async def drained(call: Any) -> None:
    async for _ in call:
        pass


async def load(ask: Ask, at_once: int, seconds: float) -> tuple[float, float]:
    """Requests a second, and the median milliseconds of one."""
    took: list[float] = []
    until = time.perf_counter() + seconds

    async def client(number: int) -> None:
        while (began := time.perf_counter()) < until:
            await ask(number)
            took.append((time.perf_counter() - began) * 1e3)
            number += at_once

    began = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(at_once)))
    return len(took) / (time.perf_counter() - began), statistics.median(took)


async def measure(
    router: str, puppet: str, relay: str, runs: int = RUNS, seconds: float = RUN_S
) -> list[Row]:
    rows: list[Row] = []
    async with (
        grpc.aio.insecure_channel(router, options=channel_options()) as outer,
        grpc.aio.insecure_channel(puppet, options=channel_options()) as inner,
        grpc.aio.insecure_channel(relay, options=channel_options()) as between,
    ):
        through, direct = rpc.InferenceStub(outer), wrpc.DecodeWorkerStub(inner)
        relayed = wrpc.DecodeWorkerStub(between)
        for num_tokens in (1024, 8000):
            prompts = [
                [(number * 7 + at) % 256 for at in range(num_tokens)] for number in range(64)
            ]

            async def ask_router(number: int, prompts: list[list[int]] = prompts) -> None:
                tokens = pb.TokenIds(ids=prompts[number % 64])
                sampling = pb.SamplingParams(max_tokens=1, temperature=0)
                await drained(
                    through.Generate(pb.GenerateRequest(token_ids=tokens, sampling=sampling))
                )

            async def ask_puppet(
                number: int, prompts: list[list[int]] = prompts, stub: Any = direct
            ) -> None:
                work = wpb.WorkRequest(request_id="r", prompt=prompts[number % 64])
                await drained(stub.Decode(wpb.DecodeRequest(work=work)))

            ask_relay = functools.partial(ask_puppet, stub=relayed)
            for ask in (ask_router, ask_relay):
                await load(ask, 4, seconds)
            rates, ours, theirs, relays, relay_rates = [], [], [], [], []
            for _ in range(runs):
                rates.append((await load(ask_router, 16, seconds))[0])
                relay_rates.append((await load(ask_relay, 16, seconds))[0])
                ours.append((await load(ask_router, 1, seconds))[1])
                theirs.append((await load(ask_puppet, 1, seconds))[1])
                relays.append((await load(ask_relay, 1, seconds))[1])
            added = [mine - bare for mine, bare in zip(ours, theirs, strict=True)]
            least = [mine - bare for mine, bare in zip(relays, theirs, strict=True)]
            beyond = [mine - bare for mine, bare in zip(ours, relays, strict=True)]
            what, peer = f"{num_tokens:,} tokens", "a relay"
            made = [
                row(f"{what}, 16 at a time", rates, (), peer, relay_rates, "requests/s"),
                row(f"{what}, one at a time", ours, (), "the worker", theirs, "ms"),
                row(f"{what}, added by the router", added, (), peer, least, "ms"),
                row(f"{what}, added beyond a relay", beyond, [MAY_ADD_MS], unit="ms"),
            ]
            for each in made:
                print(line(each), flush=True)
            rows += made
    return rows


async def until_serving(address: str) -> None:
    async with asyncio.timeout(START_S), grpc.aio.insecure_channel(address) as channel:
        stub = rpc.InferenceStub(channel)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
        while True:
            try:
                if len((await stub.Explain(request)).explanation.candidates) >= PUPPETS:
                    return
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(0.1)


async def run(runs: int, seconds: float) -> list[Row]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        log_file = Path(folder) / "redis.log"
        redis = await stack.enter_async_context(redis_server("", log_file, MonotonicClock()))
        start, python = stack.enter_async_context, (sys.executable, "-m")
        puppets = ("kvferry.index_bench.puppets", redis.url, str(PUPPETS))
        puppet = str((await first_line(await start(process(*python, *puppets))))["address"])
        relay = ("kvferry.index_bench.relay", puppet)
        relayed = str((await first_line(await start(process(*python, *relay))))["address"])
        port = free_port(50_051)
        ours = ("kvferry", "router", "--model", "checksum", "--redis-url", redis.url)
        doors = ("--grpc-port", str(port), "--http-port", "0")
        await start(process(*python, *ours, *doors))
        await until_serving(f"127.0.0.1:{port}")
        return await measure(f"127.0.0.1:{port}", puppet, relayed, runs, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seconds", type=float, default=RUN_S)
    asked = parser.parse_args()
    load_before = os.getloadavg()[0]
    rows = asyncio.run(run(asked.runs, asked.seconds))
    return publish(OUT, rows, Console(width=120), load_before, bars=True)


if __name__ == "__main__":
    sys.exit(main())
