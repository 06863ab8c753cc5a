"""How long a router decides where a prompt goes, with everything else of it running.

`make bench-route`, about a minute. A prompt of 8,192 tokens, 64 workers, a million blocks in the
mirror: a real Redis, announcers in a process of their own, and events all the time. A prompt
arrives on a pipe, and what it waits for its turn counts. `ARGS="--workers N --blocks N"` takes
another size, which no bar is for. Dynamo's index stands beside ours where `make bench-routers-env`
has installed it: names and lookups of as many prompts, in its own Python.
"""

import argparse
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
from kvferry.bench_report import Row, line, publish, row
from kvferry.die_with_parent import wrap
from kvferry.index_bench.peers import dynamo
from kvferry.index_bench.prompts import BLOCK_SIZE, SPACE, Size, names_of, prompt
from kvferry.index_bench.stage import Stage, decision, fleet_of, stage
from kvferry.replay.command import silence
from prefix_index.mirror import Mirror
from router.fleet import Fleet
from router.sightings import Sightings

OUT = Path("bench/out/route.json")
SIZE = Size(num_workers=64, num_blocks=1_000_000)
RUNS = 5
PROMPTS = 200  # of a run
ARRIVALS = 500  # of a run, beside everything else
EVENTS_PER_S = 20_000  # a block of 16 tokens: what computes 320,000 tokens a second makes
ARRIVALS_PER_S = 100
OTHERS_PER_S = 100

# Writes when it wrote, each time: nobody's clock but the machine's.
ARRIVING = """
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


def rows_of(
    what: str,
    runs: Sequence[Sequence[float]],
    p50: float,
    p99: float,
    peer: Sequence[Sequence[float]] = (),
) -> list[Row]:
    """The limits are the bars: shares above 1 miss them. `peer` is Dynamo's."""
    made = []
    for percent, bar in ((50, p50), (99, p99)):
        theirs = [share(run, percent) for run in peer]
        ours = [share(run, percent) for run in runs]
        who = "Dynamo" if peer else None
        made.append(row(f"{what}, p{percent}", ours, [bar], who, theirs, unit="ms"))
    for each in made:
        print(line(each), flush=True)
    return made


def named(numbers: Sequence[int]) -> list[Callable[[Namespace, int], Sequence[BlockHash]]]:
    """Names made beforehand: naming is measured by itself."""

    def given(names: Sequence[BlockHash]) -> Callable[[Namespace, int], Sequence[BlockHash]]:
        return lambda _namespace, _block_size: names

    return [given(names_of(number)) for number in numbers]


async def alone(mirror: Mirror, fleet: Fleet, size: Size, runs: int) -> list[Row]:
    peer, why_not = dynamo("prompts", str(size.num_workers), str(size.num_blocks))
    if why_not:
        print(why_not, flush=True)
    prompts = [prompt(number) for number in range(PROMPTS)]
    asked = [names_of(number) for number in range(PROMPTS)]
    names = named(range(PROMPTS))
    naming, walks, choices, notes = [], [], [], []
    sightings = Sightings(MonotonicClock())
    for _ in range(runs):
        naming.append(timed(lambda i: index_names(SPACE, PUBLIC, prompts[i], BLOCK_SIZE), PROMPTS))
        walks.append(timed(lambda i: mirror.runs(asked[i]), PROMPTS))
        choices.append(timed(lambda i: decision(fleet, names[i], b"%d" % i), PROMPTS))
        notes.append(timed(lambda i: sightings.note(asked[i], "w"), PROMPTS))
        await asyncio.sleep(0)
    return [
        *rows_of("naming 8,192 tokens", naming, 0.5, 1.0, peer.get("naming", ())),
        *rows_of("longest prefix in the mirror", walks, 0.2, 1.0, peer.get("longest", ())),
        *rows_of("noting what was routed", notes, 0.2, 1.0),
        *rows_of("a decision, nothing else running", choices, 1.0, 5.0),
    ]


async def in_company(
    place: Stage, mirror: Mirror, fleet: Fleet, runs: int, arrivals: int
) -> list[Row]:
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
        *wrap((sys.executable, "-c", ARRIVING, str(ARRIVALS_PER_S)), os.getpid()),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    company = [asyncio.create_task(others()), asyncio.create_task(fleet.run())]
    try:
        chosen, waited, number = [], [], 0
        for _ in range(runs):
            deciding.clear()
            waiting.clear()
            while len(deciding) < arrivals:
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
    assert mirror.counts.changes > before, "the mirror had nothing to apply"
    return [
        *rows_of("a decision, everything running", chosen, 1.0, 5.0),
        *rows_of("from arrival to decision, everything running", waited, 1.0, 5.0),
    ]


async def measure(size: Size, runs: int = RUNS, arrivals: int = ARRIVALS) -> list[Row]:
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - began:3.0f} s] {what}", flush=True)

    say(f"{size.num_workers} workers announce {size.num_blocks:,} blocks")
    async with stage(size) as place, place.mirror() as mirror:
        say("a router reads them")
        await place.until_whole(mirror)
        fleet = fleet_of(mirror)
        fleet.refresh()
        say("nothing else running")
        rows = await alone(mirror, fleet, size, runs)
        say("everything running")
        return [*rows, *await in_company(place, mirror, fleet, runs, arrivals)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=SIZE.num_workers)
    parser.add_argument("--blocks", type=int, default=SIZE.num_blocks)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    silence()
    rows = asyncio.run(measure(Size(asked.workers, asked.blocks)))
    return publish(OUT, rows, Console(width=130), load, bars=True)


if __name__ == "__main__":
    sys.exit(main())
