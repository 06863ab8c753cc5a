"""What the way through router, prefill, transfer and decode adds to a request's time.

`make bench-path`, two minutes: SmolLM2, 512 prompt tokens, 128 output tokens, one prefill worker
and one of TP 1 for decode, as many threads each as there are cores, since they work one after the
other. `ARGS='--threads 1 --runs 3'` for less. In turn with each request the bare engine computes
the same in a process of its own, stepped by hand.
"""

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console

from bench.engines.running import Contestant, Running
from engine.clock import MonotonicClock
from kvferry.bench_report import publish, row
from kvferry.cluster import running_cluster
from kvferry.redis_server import free_port
from kvferry.settings import Settings, load
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from transport.grpc_options import channel_options

OUT = Path("bench/out/path.json")
NUM_TOKENS = 512
NUM_OUTPUT = 128
RUNS = 5
VOCABULARY = 49_000


def settings_of(folder: Path, threads: int) -> Settings:
    workers = {"num_blocks": 256, "threads": threads}
    return load(
        flags={
            "state_dir": folder,
            "num_prefill": 1,
            "num_decode": 1,
            "router": {"http_port": free_port(8000), "grpc_port": free_port(50051)},
            "prefill": workers,
            "decode": {**workers, "tp": 1},
        }
    )


async def ask(stub: Any, seed: int) -> tuple[float, float]:
    """Seconds to the first token and to the last. No two prompts begin alike."""
    source = random.Random(seed)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[source.randrange(17, VOCABULARY) for _ in range(NUM_TOKENS)]),
        sampling=pb.SamplingParams(max_tokens=NUM_OUTPUT, temperature=0, ignore_eos=True),
    )
    began, first = time.perf_counter(), 0.0
    async for response in stub.Generate(request, timeout=120):
        if response.delta.token_ids and not first:
            first = time.perf_counter() - began
    return first, time.perf_counter() - began


def alone(engine: Running) -> tuple[float, float]:
    """The same by the bare engine."""
    first = engine.ask(do="grow", batch=1, context=NUM_TOKENS, step=False)
    rest = engine.ask(do="decode", steps=NUM_OUTPUT - 1)
    engine.ask(do="end")
    return first, first + rest


async def measure(
    folder: Path, threads: int, runs: int, console: Console
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Seconds to the first and to the last token, by way of the cluster and of the bare engine."""
    through, bare = list[tuple[float, float]](), list[tuple[float, float]]()
    engine = Running(Contestant("kvferry"), threads)
    settings = settings_of(folder, threads)
    try:
        async with running_cluster(settings, lambda event: None, MonotonicClock()) as cluster:
            address = cluster.record.grpc_address
            async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
                stub: Any = inference_pb2_grpc.InferenceStub(channel)
                for seed in range(runs + 1):
                    through.append(await ask(stub, seed))
                    bare.append(await asyncio.to_thread(alone, engine))
                    (first, last), (bare_first, bare_last) = through[-1], bare[-1]
                    console.print(
                        f"first token {first:.3f} s, bare {bare_first:.3f};"
                        f" all {last:.3f} s, bare {bare_last:.3f}"
                    )
    finally:
        engine.close()
    return through[1:], bare[1:]  # the first of each warms up


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    console, load = Console(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        through, bare = await measure(Path(name), asked.threads, asked.runs, console)
    whole = f"{NUM_TOKENS} prompt and {NUM_OUTPUT} output tokens"
    parts: dict[str, Callable[[float, float], float]] = {
        whole: lambda first, last: last,
        "to the first token": lambda first, last: first,
        "each other token": lambda first, last: (last - first) / (NUM_OUTPUT - 1),
    }
    rows = []
    for what, part in parts.items():
        ours, theirs = [part(*each) for each in through], [part(*each) for each in bare]
        rows.append(row(what, ours, (), "the bare engine", theirs, "s"))
    publish(OUT, rows, console, load, {"threads": asked.threads})


if __name__ == "__main__":
    asyncio.run(main())
