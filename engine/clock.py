"""Where time comes from: the machine, or a test that moves it by hand.

Control-plane code takes a `Clock` and never asks the machine itself, so the same code runs in real
time and under a test. Other folders declare the same two methods as a Protocol of their own.
"""

import asyncio
import heapq
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never goes backwards; only differences mean anything."""

    async def sleep(self, seconds: float) -> None:
        """Return once `now()` has grown by `seconds`."""


class MonotonicClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that stands still until told to move. Belongs to one event loop."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._num_slept = 0

    def now(self) -> float:
        return self._now

    @property
    def num_sleeping(self) -> int:
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_slept += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._num_slept, future))
        await future

    def advance(self, seconds: float) -> None:
        """Move time at once; everyone who is due wakes when the loop next runs, earliest first."""
        self._wake_until(self._now + seconds)

    async def run(self, seconds: float) -> None:
        """Move time from one due sleeper to the next, letting the loop settle after each."""
        end = self._now + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._wake_until(max(self._now, self._sleepers[0][0]))
            await _settle()
        self._wake_until(end)
        await _settle()

    def _wake_until(self, moment: float) -> None:
        self._now = moment
        while self._sleepers and self._sleepers[0][0] <= moment:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)


async def _settle() -> None:
    """Let tasks that are ready run, and those that they wake, for a bounded number of turns."""
    for _ in range(20):
        await asyncio.sleep(0)
