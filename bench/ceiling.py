"""How many requests a second one router carries, and what it adds to each: workers answer at once.

`make bench-ceiling`. Prompts of 1,024 and 8,000 tokens over gRPC, 1 and 16 at a time, through a
real router process to eight puppets; a call to a puppet itself stands beside it.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console

from engine.clock import MonotonicClock
from kvferry.die_with_parent import wrap
from kvferry.redis_server import free_port, redis_server
from kvferry.transfer_bench.report import Row, row, table, write
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc
from protos import worker_pb2 as wpb
from protos import worker_pb2_grpc as wrpc
from transport.grpc_options import channel_options

OUT = Path("bench/out/ceiling.json")
PUPPETS = 8
RUNS = 5
RUN_S = 1.5
START_S = 30.0

Ask = Callable[[int], Awaitable[None]]


async def drained(call: Any) -> None:
    async for _ in call:
        pass


async def load(ask: Ask, at_once: int) -> tuple[float, float]:
    """Requests a second, and the median milliseconds of one."""
    took: list[float] = []
    until = time.perf_counter() + RUN_S

    async def client(number: int) -> None:
        while (began := time.perf_counter()) < until:
            await ask(number)
            took.append((time.perf_counter() - began) * 1e3)
            number += at_once

    began = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(at_once)))
    return len(took) / (time.perf_counter() - began), statistics.median(took)


async def measure(router: str, puppet: str) -> list[Row]:
    rows: list[Row] = []
    async with (
        grpc.aio.insecure_channel(router, options=channel_options()) as outer,
        grpc.aio.insecure_channel(puppet, options=channel_options()) as inner,
    ):
        through, direct = rpc.InferenceStub(outer), wrpc.DecodeWorkerStub(inner)
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

            async def ask_puppet(number: int, prompts: list[list[int]] = prompts) -> None:
                work = wpb.WorkRequest(request_id="r", prompt=prompts[number % 64])
                await drained(direct.Decode(wpb.DecodeRequest(work=work)))

            await load(ask_router, 4)
            rates, ours, theirs = [], [], []
            for _ in range(RUNS):
                rates.append((await load(ask_router, 16))[0])
                ours.append((await load(ask_router, 1))[1])
                theirs.append((await load(ask_puppet, 1))[1])
            added = [mine - bare for mine, bare in zip(ours, theirs, strict=True)]
            what = f"{num_tokens:,} tokens"
            rows += [
                row(f"{what}, 16 at a time", rates, unit="requests/s"),
                row(
                    f"{what}, one at a time", ours, peer="the worker", peer_values=theirs, unit="ms"
                ),
                row(f"{what}, added by the router", added, [0.5], unit="ms"),
            ]
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


async def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        async with redis_server("", Path(folder) / "redis.log", MonotonicClock()) as redis:
            port = free_port(50_051)
            doors = ("--grpc-port", str(port), "--http-port", "0")
            router = ("-m", "kvferry", "router", "--model", "checksum", "--redis-url", redis.url)
            commands = (
                (sys.executable, "-m", "kvferry.index_bench.puppets", redis.url, str(PUPPETS)),
                (sys.executable, *router, *doors),
            )
            processes = [
                await asyncio.create_subprocess_exec(
                    *wrap(command, os.getpid()),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                )
                for command in commands
            ]
            try:
                assert processes[0].stdout is not None
                puppet = json.loads(await processes[0].stdout.readline())["address"]
                await until_serving(f"127.0.0.1:{port}")
                return await measure(f"127.0.0.1:{port}", puppet)
            finally:
                for process in processes:
                    process.kill()
                    await process.wait()


def main() -> int:
    load_before = os.getloadavg()[0]
    rows = asyncio.run(run())
    console = Console(width=120)
    console.print(table(rows))
    write(OUT, rows, {"machine": {"cpus": os.cpu_count(), "load": round(load_before, 2)}})
    console.print(f"load before: {load_before:.2f}; rows: {OUT}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
