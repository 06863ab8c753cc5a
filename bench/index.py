"""How large the index may grow: memory a block, time to announce, to start warm, to recover.

`make bench-index` measures a million blocks of 64 workers through a real Redis, and ten million of
1,000 workers in the mirror's table alone; `ARGS="WORKERS BLOCKS"` puts another size through Redis.
Dynamo's index stands beside the table where `KVFERRY_DYNAMO_PYTHON` names a Python that has it.
"""

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from redis.asyncio import Redis
from rich.console import Console

from kvcache.block_hash import BlockHash
from kvferry.index_bench.prompts import PROMPT_BLOCKS, Size
from kvferry.index_bench.stage import Stage, stage
from kvferry.replay.command import silence
from kvferry.transfer_bench.report import Row, row, table, write
from prefix_index.compact_table import CompactTable, open_table
from prefix_index.events import PackedEvents, pack
from prefix_index.index import Removed, Stored
from prefix_index.prefix_table import Life

OUT = Path("bench/out/index.json")
THROUGH_REDIS = Size(num_workers=64, num_blocks=1_000_000)
RUNS = 3
MATCHES = 2000


def chain(rng: random.Random, length: int) -> list[BlockHash]:
    return [BlockHash(rng.randbytes(16)) for _ in range(length)]


def stored(names: Sequence[BlockHash]) -> PackedEvents:
    return pack(Stored(name, None, depth) for depth, name in enumerate(names))


def table_rows(size: Size, peer: dict[str, list[float]]) -> list[Row]:
    """Chains of 64 to 512 blocks, half of them held by two workers."""
    rng = random.Random(1)
    made = open_table()
    assert isinstance(made, CompactTable), "no compiler"
    lives = [Life(f"w{number}", 1) for number in range(size.num_workers)]
    for life in lives:
        made.begin(life)
    chains: list[list[BlockHash]] = []
    holders: list[Life] = []
    spent_s = 0.0
    while made.num_blocks < size.num_blocks:
        names = chain(rng, rng.randrange(64, PROMPT_BLOCKS + 1))
        events = stored(names)
        holder, other, twice = rng.choice(lives), rng.choice(lives), rng.random() < 0.5
        chains.append(names)
        holders.append(holder)
        began = time.perf_counter()
        made.apply(holder, events)
        if twice:
            made.apply(other, events)
        spent_s += time.perf_counter() - began
    entries, blocks = made.num_entries, made.num_blocks
    label = f"{blocks / 1e6:.0f}M blocks, {size.num_workers} workers"

    def matches_per_ms(num_exchanges: int) -> float:
        """A chain goes and comes back `num_exchanges` times meanwhile."""
        asked = [rng.choice(chains)[:64] for _ in range(MATCHES)]
        exchanged = [rng.randrange(len(chains)) for _ in range(num_exchanges)]
        packed = [
            (
                holders[at],
                pack([Removed(name) for name in reversed(chains[at])]),
                stored(chains[at]),
            )
            for at in exchanged
        ]
        began = time.perf_counter()
        for number, names in enumerate(asked):
            made.longest(names)
            if packed and number % 20 == 0:
                life, gone, back = packed[number // 20]
                made.apply(life, gone)
                made.apply(life, back)
        return len(asked) / (time.perf_counter() - began) / 1e3

    alone = [matches_per_ms(0) for _ in range(RUNS)]
    mixed = [matches_per_ms(MATCHES // 20) for _ in range(RUNS)]
    began = time.perf_counter()
    made.retire(lives[0])
    while made.sweep(4096):
        pass
    clear_ms = (time.perf_counter() - began) * 1e3
    beside = "Dynamo's RadixTree, 1M blocks" if peer else None
    return [
        row(f"{label}: bytes a block", [made.num_bytes / blocks], [64], unit="B"),
        row(f"{label}: bytes an entry", [made.num_bytes / entries], [64], unit="B"),
        row(f"{label}: events applied", [entries / spent_s / 1e3], unit="k/s"),
        row(
            f"{label}: matches of 64 blocks",
            alone,
            peer=beside,
            peer_values=peer.get("match", ()),
            unit="k/s",
        ),
        row(
            f"{label}: the same, with events and evictions",
            mixed,
            peer=beside,
            peer_values=peer.get("mixed", ()),
            unit="k/s",
        ),
        row(f"{label}: a worker forgotten", [clear_ms], unit="ms"),
    ]


async def redis_rows(place: Stage) -> list[Row]:
    blocks = place.size.num_blocks
    label = f"{blocks / 1e6:g}M blocks, {place.size.num_workers} workers"
    admin = Redis.from_url(place.url)
    used = (await admin.info("memory"))["used_memory"]
    stream = await admin.memory_usage("{kvferry}:2:events", samples=0) or 0
    starts, anew = [], []
    for _ in range(RUNS):
        gc.collect()
        began = time.monotonic()
        async with place.mirror() as mirror:
            await place.until_whole(mirror)
            starts.append(time.monotonic() - began)
    for _ in range(RUNS):
        async with place.mirror() as mirror:
            await place.until_whole(mirror)
            await admin.flushall()
            place.crowd.tell("wiped")
            anew.append((await place.crowd.hear())["announced_s"])
    await admin.aclose()
    return [
        row(f"{label}: announced for the first time", [place.announced_s], unit="s"),
        row(f"{label}: announced anew after a wipe", anew, [10 * blocks / 1e6], unit="s"),
        row(f"{label}: a router starts warm", starts, unit="s"),
        row(f"{label}: Redis, bytes a block", [(used - stream) / blocks], unit="B"),
        row(f"{label}: Redis, the stream", [stream / 1e6], unit="MB"),
    ]


def peer_rates() -> dict[str, list[float]]:
    """Thousands of matches a second, alone and with events and evictions; empty without a peer."""
    python = os.environ.get("KVFERRY_DYNAMO_PYTHON", "")
    if not python:
        return {}
    script = Path(__file__).parents[1] / "kvferry/index_bench/dynamo.py"
    done = subprocess.run([python, "-I", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"Dynamo's index was not measured: {done.stderr.strip().splitlines()[-1]}")
        return {}
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


async def through_redis(size: Size) -> list[Row]:
    async with stage(size) as place:
        return await redis_rows(place)


def main() -> int:
    silence()
    load = os.getloadavg()[0]
    if len(sys.argv) > 2:
        rows = asyncio.run(through_redis(Size(int(sys.argv[1]), int(sys.argv[2]))))
    else:
        peer = peer_rates()
        rows = [
            *table_rows(Size(64, 1_000_000), peer),
            *table_rows(Size(1000, 10_000_000), {}),
            *asyncio.run(through_redis(THROUGH_REDIS)),
        ]
    console = Console(width=130)
    console.print(table(rows))
    write(OUT, rows, {"machine": {"cpus": os.cpu_count(), "load": round(load, 2)}})
    missed = [each.what for each in rows if each.share_of_limit and each.share_of_limit > 1]
    for what in missed:
        console.print(f"MISSED: {what}", highlight=False)
    console.print(f"load before: {load:.2f}; rows: {OUT}", highlight=False)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
