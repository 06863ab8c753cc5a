"""The workers of a whole fleet in one process: real announcers, blocks that nobody computes.

`python -m kvferry.index_bench.crowd REDIS_URL WORKERS BLOCKS` prints a line of JSON when everything
is announced that it holds, and obeys a command a line from then on:

    churn N   each second prompts with N blocks in all are stored, and as many evicted
    wiped     Redis has just been emptied: answers when everybody has told everything anew
    load      the workers report other loads at each heartbeat from now on
"""

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence

from engine.clock import MonotonicClock
from kvferry.index_bench.prompts import PROMPT_BLOCKS, Size, load, record, removed, stored
from kvferry.replay.command import silence
from prefix_index.announcer import Announcer, AnnouncerState
from prefix_index.index import BlockEvent, Load
from prefix_index.redis_index import RedisIndex

TICK_S = 0.05
POLL_S = 0.02


class Member:
    """One worker's pool, in whole prompts."""

    def __init__(self, number: int, size: Size) -> None:
        self.number = number
        self._held = {each: stored(each) for each in size.prompts_of(number)}
        self._events: list[BlockEvent] = []
        self._load = load(0, 0, len(self._held) * PROMPT_BLOCKS)

    @property
    def holds_any(self) -> bool:
        return bool(self._held)

    def source(self) -> tuple[Load, Sequence[BlockEvent]]:
        events, self._events = self._events, []
        return self._load, events

    def resident(self) -> list[BlockEvent]:
        return [event for events in self._held.values() for event in events]

    def exchange(self, number: int) -> None:
        """The prompt that has been there longest makes room for a new one."""
        if self._held:
            self._events += removed(self._held.pop(next(iter(self._held))))
        self._held[number] = stored(number)
        self._events += self._held[number]

    def report(self, rng: random.Random) -> None:
        num_blocks = len(self._held) * PROMPT_BLOCKS
        self._load = load(rng.randrange(32), rng.randrange(30_000), num_blocks)


class Crowd:
    def __init__(self, url: str, size: Size) -> None:
        self._url = url
        self._size = size
        self._members = [Member(number, size) for number in range(size.num_workers)]
        self._announcers: list[Announcer] = []
        self._indexes: list[RedisIndex] = []
        self._next_prompt = itertools.count(size.num_prompts)
        self._rng = random.Random(1)

    async def start(self) -> list[asyncio.Task[None]]:
        clock, pace_s = MonotonicClock(), 0.05 if len(self._members) <= 100 else 0.5
        for member in self._members:
            # A worker's process has one index; a second's patience is for processes of one worker.
            index = RedisIndex(self._url, clock, timeout_s=10.0)
            epoch = await index.next_epoch(f"w{member.number}")
            busy, _ = member.source()
            announcer = Announcer(
                index,
                record(member.number, epoch, busy),
                member.source,
                member.resident,
                clock,
                publish_s=pace_s,
                lease_s=60.0,
            )
            self._indexes.append(index)
            self._announcers.append(announcer)
        return [asyncio.create_task(each.run()) for each in self._announcers]

    async def settle(self) -> None:
        """Until all that is held is announced."""
        while not all(
            each.state is AnnouncerState.INSIDE and not each.num_pending
            for each in self._announcers
        ):
            await asyncio.sleep(POLL_S)

    async def churn(self, blocks_per_s: float) -> None:
        due = 0.0
        while True:
            due += blocks_per_s * TICK_S / PROMPT_BLOCKS
            for _ in range(int(due)):
                self._rng.choice(self._members).exchange(next(self._next_prompt))
            due -= int(due)
            await asyncio.sleep(TICK_S)

    async def vary(self) -> None:
        while True:
            for member in self._members:
                member.report(self._rng)
            await asyncio.sleep(1.0)

    async def tell_anew(self) -> None:
        before = [each.num_resyncs for each in self._announcers]
        while any(
            each.num_resyncs == count and member.holds_any
            for each, member, count in zip(self._announcers, self._members, before, strict=True)
        ):
            await asyncio.sleep(POLL_S)
        await self.settle()


def say(**facts: float) -> None:
    print(json.dumps(facts), flush=True)


async def main() -> None:
    url, workers, blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    crowd = Crowd(url, Size(workers, blocks))
    tasks = await crowd.start()
    began = time.monotonic()
    await crowd.settle()
    say(announced_s=time.monotonic() - began)
    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.split():
            case ["churn", rate]:
                tasks.append(asyncio.create_task(crowd.churn(float(rate))))
            case ["load"]:
                tasks.append(asyncio.create_task(crowd.vary()))
            case ["wiped"]:
                began = time.monotonic()
                await crowd.tell_anew()
                say(announced_s=time.monotonic() - began)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    silence()
    asyncio.run(main())
