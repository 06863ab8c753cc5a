"""How large the index may grow: memory a block, time to announce, to start warm, to recover.

`make bench-index`, about two minutes: a million blocks of 64 workers through a real Redis, and ten
million of 1,000 workers in the mirror's table alone. `ARGS=--full` puts those through Redis, too:
some five minutes more and 6 GiB. `ARGS="--workers N --blocks N"` puts only that much through
Redis. Dynamo's index stands beside the table where `make bench-routers-env` has
installed it.
"""

import argparse
import asyncio
import gc
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
from redis.asyncio import Redis
from rich.console import Console

from kvferry.bench_report import Row, line, publish, row
from kvferry.index_bench.peers import dynamo
from kvferry.index_bench.prompts import PROMPT_BLOCKS, Size
from kvferry.index_bench.stage import Stage, stage
from kvferry.replay.command import silence
from prefix_index.compact_table import CompactTable, open_table
from prefix_index.events import EVENT_BYTES, PackedEvents
from prefix_index.prefix_table import Life

OUT = Path("bench/out/index.json")
THROUGH_REDIS = Size(num_workers=64, num_blocks=1_000_000)
LARGE = Size(num_workers=1000, num_blocks=10_000_000)
RUNS = 3
MATCHES = 2000
MATCHED_BLOCKS = 64


def told(*rows: Row) -> list[Row]:
    for each in rows:
        print(line(each), flush=True)
    return list(rows)


class Chain:
    """Blocks one after the other, as the events that bring them and that take them away."""

    def __init__(self, rng: np.random.Generator, length: int) -> None:
        events = np.zeros((length, EVENT_BYTES), np.uint8)
        events[:, 0] = ord("g")
        events[:, 1:5] = np.arange(length, dtype="<u4").view(np.uint8).reshape(length, 4)
        events[:, 5:] = rng.integers(0, 256, (length, EVENT_BYTES - 5), np.uint8)
        self.stored = PackedEvents(events.tobytes())

    @property
    def removed(self) -> PackedEvents:
        """Leaves first."""
        events = np.frombuffer(self.stored.data, np.uint8).reshape(-1, EVENT_BYTES)[::-1].copy()
        events[:, 0] = ord("-")
        events[:, 1:5] = 0
        return PackedEvents(events.tobytes())

    def names(self, count: int) -> list[bytes]:
        return [each.name for each in self.stored[:count]]


def table_rows(size: Size, peer: dict[str, list[float]]) -> list[Row]:
    """Chains of 64 to 512 blocks, half of them held by two workers."""
    rng, bytes_rng = random.Random(1), np.random.default_rng(1)
    made = open_table()
    assert isinstance(made, CompactTable), "no compiler"
    lives = [Life(f"w{number}", 1) for number in range(size.num_workers)]
    for life in lives:
        made.begin(life)
    chains: list[Chain] = []
    holders: list[Life] = []
    spent_s = 0.0
    while made.num_blocks < size.num_blocks:
        chain = Chain(bytes_rng, rng.randrange(MATCHED_BLOCKS, PROMPT_BLOCKS + 1))
        holder, other, twice = rng.choice(lives), rng.choice(lives), rng.random() < 0.5
        chains.append(chain)
        holders.append(holder)
        began = time.perf_counter()
        made.apply(holder, chain.stored)
        if twice:
            made.apply(other, chain.stored)
        spent_s += time.perf_counter() - began
    entries, blocks = made.num_entries, made.num_blocks
    label = f"{blocks / 1e6:.3g}M blocks, {size.num_workers:,} workers"

    def matches_per_ms(num_exchanges: int) -> float:
        """A chain goes and comes back `num_exchanges` times meanwhile."""
        asked = [rng.choice(chains).names(MATCHED_BLOCKS) for _ in range(MATCHES)]
        exchanged = [rng.randrange(len(chains)) for _ in range(num_exchanges)]
        packed = [(holders[at], chains[at].removed, chains[at].stored) for at in exchanged]
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
    return told(
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
    )


async def redis_rows(place: Stage, runs: int) -> list[Row]:
    blocks = place.size.num_blocks
    label = f"{blocks / 1e6:.3g}M blocks, {place.size.num_workers:,} workers"
    admin = Redis.from_url(place.url)
    used = (await admin.info("memory"))["used_memory"]
    stream = await admin.memory_usage("{kvferry}:2:events", samples=0) or 0
    rows = told(
        row(f"{label}: announced for the first time", [place.announced_s], unit="s"),
        row(f"{label}: Redis, bytes a block", [(used - stream) / blocks], unit="B"),
        row(f"{label}: Redis, the stream", [stream / 1e6], unit="MB"),
    )
    starts, anew = [], []
    for _ in range(runs):
        gc.collect()
        began = time.monotonic()
        async with place.mirror() as mirror:
            await place.until_whole(mirror)
            starts.append(time.monotonic() - began)
    rows += told(row(f"{label}: a router starts warm", starts, unit="s"))
    for _ in range(runs):
        async with place.mirror() as mirror:
            await place.until_whole(mirror)
            await admin.flushall()
            place.crowd.tell("wiped")
            anew.append((await place.crowd.hear())["announced_s"])
    await admin.aclose()
    bar = [10.0] if blocks == THROUGH_REDIS.num_blocks else ()
    return [*rows, *told(row(f"{label}: announced anew after a wipe", anew, bar, unit="s"))]


async def through_redis(size: Size, runs: int = RUNS) -> list[Row]:
    print(f"{size.num_workers:,} workers announce {size.num_blocks:,} blocks", flush=True)
    async with stage(size) as place:
        return await redis_rows(place, runs)


def everything(full: bool) -> list[Row]:
    peer, why_not = dynamo("chains")
    if why_not:
        print(why_not, flush=True)
    return [
        *table_rows(THROUGH_REDIS, peer),
        *table_rows(LARGE, {}),
        *asyncio.run(through_redis(THROUGH_REDIS)),
        *(asyncio.run(through_redis(LARGE, runs=1)) if full else ()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--workers", type=int, default=THROUGH_REDIS.num_workers)
    parser.add_argument("--blocks", type=int, default=0)
    asked = parser.parse_args()
    silence()
    load = os.getloadavg()[0]
    if asked.blocks:
        rows = asyncio.run(through_redis(Size(asked.workers, asked.blocks)))
    else:
        rows = everything(asked.full)
    return publish(OUT, rows, Console(width=130), load, bars=True)


if __name__ == "__main__":
    sys.exit(main())
