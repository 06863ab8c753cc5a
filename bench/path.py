"""What the way through router, prefill, transfer and decode adds to a request's time.

`make bench-path`: SmolLM2, 512 prompt tokens, 128 output tokens, one prefill worker and one of TP 1
for decode, as many threads each as there are cores, since they work one after the other. In turn
with each request the bare engine computes the same in a process of its own, stepped by hand.
"""

import asyncio
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console

from bench.engines.running import Contestant, Running
from engine.clock import MonotonicClock
from kvferry.cluster import running_cluster
from kvferry.redis_server import free_port
from kvferry.settings import Settings, load
from kvferry.transfer_bench.report import row, table, write
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from transport.grpc_options import channel_options

OUT = Path("bench/out/path.json")
NUM_TOKENS = 512
NUM_OUTPUT = 128
RUNS = 7
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
    prefill = engine.ask(do="grow", batch=1, context=NUM_TOKENS)  # and one step of decode
    rest = engine.ask(do="decode", steps=NUM_OUTPUT - 2)
    engine.ask(do="end")
    return prefill, prefill + rest


async def measure(folder: Path, threads: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of whole requests, of the same by the bare engine, and to first tokens."""
    whole, bare, first = list[float](), list[float](), list[float]()
    engine = Running(Contestant("kvferry"), threads)
    settings = settings_of(folder, threads)
    try:
        async with running_cluster(settings, lambda event: None, MonotonicClock()) as cluster:
            address = cluster.record.grpc_address
            async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
                stub: Any = inference_pb2_grpc.InferenceStub(channel)
                for seed in range(RUNS + 1):
                    to_first, to_last = await ask(stub, seed)
                    taken = await asyncio.to_thread(alone, engine)
                    if seed:  # the first one warms up
                        first.append(to_first)
                        whole.append(to_last)
                        bare.append(taken[1])
    finally:
        engine.close()
    return whole, bare, first


async def main() -> None:
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        whole, bare, first = await measure(Path(name), threads)
    what = f"{NUM_TOKENS} prompt and {NUM_OUTPUT} output tokens"
    rows = [
        row(what, whole, peer="the bare engine", peer_values=bare, unit="s"),
        row("to the first token", first, unit="s"),
    ]
    Console().print(table(rows))
    write(OUT, rows, {"threads": threads, "load": os.getloadavg()[0]})
    print(f"wrote {OUT}")


if __name__ == "__main__":
    asyncio.run(main())
