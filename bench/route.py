"""How long a router decides where a prompt goes, with everything else of it running.

`make bench-route`. A prompt of 8,192 tokens, 64 workers, a million blocks in the mirror: a real
Redis, announcers in a process of their own, and events all the time. A prompt arrives on a pipe,
and what it waits for its turn counts.
"""

import asyncio
import os
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from engine.clock import MonotonicClock
from kvcache.block_hash import PUBLIC, BlockHash, Namespace, index_names
from kvferry.die_with_parent import wrap
from kvferry.index_bench.prompts import BLOCK_SIZE, SPACE, Size, names_of, prompt
from kvferry.index_bench.stage import Stage, decision, fleet_of, stage
from kvferry.replay.command import silence
from kvferry.transfer_bench.report import Row, row, table, write
from prefix_index.mirror import Mirror
from router.fleet import Fleet
from router.sightings import Sightings

OUT = Path("bench/out/route.json")
SIZE = Size(num_workers=64, num_blocks=1_000_000)
RUNS = 5
PROMPTS = 200  # of a run
EVENTS_PER_S = 20_000  # a block of 16 tokens: what computes 320,000 tokens a second makes
ARRIVALS_PER_S = 100
OTHERS_PER_S = 100

# Writes when it wrote, each time: nobody's clock but the machine's.
ARRIVALS = """
import os, random, struct, sys, time
rng, rate = random.Random(3), float(sys.argv[1])
while True:
    time.sleep(rng.expovariate(rate))
    os.write(1, struct.pack("d", time.monotonic()))
"""


def timed(work: Callable[[int], object], count: int) -> list[float]:
    """Milliseconds of each call."""
    took = []
    for number in range(count):
        began = time.perf_counter()
        work(number)
        took.append((time.perf_counter() - began) * 1e3)
    return took


def share(values: Sequence[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def rows_of(what: str, runs: Sequence[Sequence[float]], p50: float, p99: float) -> list[Row]:
    """The limits are the bars: shares above 1 miss them."""
    return [
        row(f"{what}, p50", [share(run, 50) for run in runs], [p50], unit="ms"),
        row(f"{what}, p99", [share(run, 99) for run in runs], [p99], unit="ms"),
    ]


def named(numbers: Sequence[int]) -> list[Callable[[Namespace, int], Sequence[BlockHash]]]:
    """Names made beforehand: naming is measured by itself."""

    def given(names: Sequence[BlockHash]) -> Callable[[Namespace, int], Sequence[BlockHash]]:
        return lambda _namespace, _block_size: names

    return [given(names_of(number)) for number in numbers]


async def alone(mirror: Mirror, fleet: Fleet) -> list[Row]:
    prompts = [prompt(number) for number in range(PROMPTS)]
    asked = [names_of(number) for number in range(PROMPTS)]
    names = named(range(PROMPTS))
    naming, walks, choices, notes = [], [], [], []
    sightings = Sightings(MonotonicClock())
    for _ in range(RUNS):
        naming.append(timed(lambda i: index_names(SPACE, PUBLIC, prompts[i], BLOCK_SIZE), PROMPTS))
        walks.append(timed(lambda i: mirror.runs(asked[i]), PROMPTS))
        choices.append(timed(lambda i: decision(fleet, names[i], b"%d" % i), PROMPTS))
        notes.append(timed(lambda i: sightings.note(asked[i], "w"), PROMPTS))
        await asyncio.sleep(0)
    return [
        *rows_of("naming 8,192 tokens", naming, 0.5, 0.5),
        *rows_of("longest prefix in the mirror", walks, 0.2, 1.0),
        *rows_of("noting what was routed", notes, 0.2, 1.0),
        *rows_of("a decision, nothing else running", choices, 1.0, 5.0),
    ]


async def in_company(place: Stage, mirror: Mirror, fleet: Fleet) -> list[Row]:
    """Arrivals from another process, the stream of events, heartbeats, other requests."""
    names = named(range(PROMPTS))
    prompts = [prompt(number) for number in range(PROMPTS)]
    deciding: list[float] = []
    waiting: list[float] = []
    place.crowd.tell(f"churn {EVENTS_PER_S / 2}")
    place.crowd.tell("load")
    before = mirror.counts.changes

    def decide(number: int) -> None:
        at = number % PROMPTS
        began = time.perf_counter()
        decision(fleet, names[at], b"%d" % number)
        deciding.append((time.perf_counter() - began) * 1e3)

    async def others() -> None:
        for number in range(10**9):
            at = number % PROMPTS
            index_names(SPACE, PUBLIC, prompts[at], BLOCK_SIZE)
            decision(fleet, names[at], b"%d" % number)
            await asyncio.sleep(1 / OTHERS_PER_S)

    process = await asyncio.create_subprocess_exec(
        *wrap((sys.executable, "-c", ARRIVALS, str(ARRIVALS_PER_S)), os.getpid()),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    company = [asyncio.create_task(others()), asyncio.create_task(fleet.run())]
    try:
        chosen, waited, number = [], [], 0
        for _ in range(RUNS):
            deciding.clear()
            waiting.clear()
            while len(deciding) < 5 * PROMPTS:
                (arrived,) = struct.unpack("d", await process.stdout.readexactly(8))
                decide(number)
                waiting.append((time.monotonic() - arrived) * 1e3)
                number += 1
            chosen.append(list(deciding))
            waited.append(list(waiting))
    finally:
        process.kill()
        await process.wait()
        for task in company:
            task.cancel()
        await asyncio.gather(*company, return_exceptions=True)
    assert mirror.counts.changes - before > 100, "the mirror had nothing to apply"
    return [
        *rows_of("a decision, everything running", chosen, 1.0, 5.0),
        *rows_of("from arrival to decision, everything running", waited, 1.0, 5.0),
    ]


async def measure() -> list[Row]:
    async with stage(SIZE) as place, place.mirror() as mirror:
        await place.until_whole(mirror)
        fleet = fleet_of(mirror)
        fleet.refresh()
        return [*await alone(mirror, fleet), *await in_company(place, mirror, fleet)]


def main() -> int:
    load = os.getloadavg()[0]
    silence()
    rows = asyncio.run(measure())
    console = Console(width=130)
    console.print(table(rows))
    write(OUT, rows, {"machine": {"cpus": os.cpu_count(), "load": round(load, 2)}})
    missed = [each.what for each in rows if each.share_of_limit and each.share_of_limit > 1]
    console.print(f"load before: {load:.2f}; rows: {OUT}", highlight=False)
    for what in missed:
        console.print(f"MISSED: {what}", highlight=False)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
