"""How long a worker takes from its start to its first token, and what memory it holds then.

`make bench-start`, a minute and a half; `ARGS='--peer'` starts vLLM, too, which must have compiled
before. A prefill worker with the settings that `up` gives it, SmolLM2-135M; it says that it is
ready once its warm-up has made tokens. The limits: 6 s, and its weights, its pool and 400 MiB.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from bench.engine_speed import MORE_BYTES, WEIGHT_BYTES
from bench.engines.running import Contestant, Running, memory_of
from engine.clock import Clock, MonotonicClock
from kvferry.bench_report import Row, publish, row, table
from kvferry.launcher import Part, PartEvent, PartState, Role
from kvferry.local_launcher import LocalLauncher
from kvferry.redis_server import redis_server
from kvferry.settings import Settings, load
from kvferry.state import only_cluster
from model.source import open_model

OUT = Path("bench/out/start.json")
MAY_TAKE_S = 6.0
FORMS = ("dense", "stored", "int8", "int4", "bf16")
RUNS = 3


async def start_once(settings: Settings, folder: Path, clock: Clock) -> tuple[float, int]:
    """Seconds until it is ready, and bytes resident then."""
    taken: list[float] = []

    def hear(event: PartEvent) -> None:
        if event.state is PartState.READY:
            taken.append(event.seconds)

    launcher = LocalLauncher(folder, hear, clock)
    try:
        worker = settings.prefill_worker(0)
        handle = await launcher.start(Part(worker.name, Role.PREFILL, worker))
        assert handle.pid is not None
        return taken[0], memory_of(handle.pid, "VmRSS")
    finally:
        await launcher.stop()


async def measure(form: str, runs: int, folder: Path) -> tuple[list[float], list[float], float]:
    """Seconds and MiB of each run, and the MiB that it may hold."""
    clock, flags = MonotonicClock(), {"state_dir": folder, "weights": form}
    settings = load(flags=flags)
    worker = settings.prefill
    spec = open_model(settings.model).cache_spec(worker.block_size, worker.dtype)
    pool = spec.bytes_per_block(spec.num_kv_heads) * worker.num_blocks
    with only_cluster(folder):
        async with redis_server("", folder / "logs" / "redis.log", clock) as place:
            here = settings.with_redis(place.url)
            found = [await start_once(here, folder, clock) for _ in range(runs)]
    may = (WEIGHT_BYTES[form] + pool + MORE_BYTES) / 2**20
    return [seconds for seconds, _ in found], [held / 2**20 for _, held in found], may


def peer_start() -> list[float]:
    running = Running(Contestant("vLLM"), len(os.sched_getaffinity(0)))
    running.close()
    return [running.start_s]


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", action="append", choices=FORMS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--peer", action="store_true")
    asked = parser.parse_args()
    console, rows, load = Console(), list[Row](), os.getloadavg()[0]
    theirs = await asyncio.to_thread(peer_start) if asked.peer else []
    with tempfile.TemporaryDirectory() as name:
        for form in asked.weights or FORMS[:2]:
            seconds, held, may = await measure(form, asked.runs, Path(name))
            what, peer = f"{form}: start to first token", "vLLM" if theirs else None
            rows.append(row(what, seconds, [MAY_TAKE_S], peer, theirs, "s"))
            rows.append(row(f"{form}: resident", held, [may], unit="MiB"))
            console.print(table(rows[-2:]))
    return publish(OUT, rows, console, load, bars=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
