"""An index whose store can be lost, and whose answers and stream misbehave as a seed says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from prefix_index.index import (
    BlockEvent,
    Change,
    Changes,
    Clock,
    Cursor,
    Holdings,
    IndexUnavailable,
    Load,
    Residency,
    Survey,
    WorkerRecord,
)
from prefix_index.memory_index import MemoryIndex


class FlakyIndex:
    """A MemoryIndex behind a bad line. `fault_rate` is how often each thing goes wrong."""

    def __init__(self, clock: Clock, rng: Random, *, max_changes: int) -> None:
        self._clock = clock
        self._rng = rng
        self._max_changes = max_changes
        self._last_epoch = 0
        self.fault_rate = 0.0
        self.wipe()

    def wipe(self) -> None:
        """Restarted empty: only the store's clock, which epochs start from, has gone on."""
        self.inner = MemoryIndex(self._clock, max_changes=self._max_changes)

    def _goes_wrong(self) -> bool:
        return self._rng.random() < self.fault_rate

    def _maybe_lose(self, what: str) -> None:
        """Before the operation the request is lost, after it the answer."""
        if self._goes_wrong():
            raise IndexUnavailable(f"{what} lost")

    async def next_epoch(self, name: str) -> int:
        self._last_epoch += 1
        return await self.inner.next_epoch(name, self._last_epoch)

    async def register(self, record: WorkerRecord, lease_s: float) -> Residency:
        self._maybe_lose("request")
        residency = await self.inner.register(record, lease_s)
        self._maybe_lose("answer")
        return residency

    async def heartbeat(
        self, name: str, epoch: int, load: Load, lease_s: float
    ) -> Residency | None:
        self._maybe_lose("request")
        residency = await self.inner.heartbeat(name, epoch, load, lease_s)
        self._maybe_lose("answer")
        return residency

    async def deregister(self, name: str, epoch: int) -> None:
        await self.inner.deregister(name, epoch)

    async def workers(self) -> list[WorkerRecord]:
        return await self.inner.workers()

    async def publish(
        self,
        worker: str,
        epoch: int,
        events: Sequence[BlockEvent],
        sequence: int | None = None,
        known: Residency | None = None,
    ) -> None:
        self._maybe_lose("request")
        await self.inner.publish(worker, epoch, events, sequence, known)
        self._maybe_lose("answer")

    async def clear(self, worker: str, epoch: int, sequence: int | None = None) -> int:
        self._maybe_lose("request")
        num_cleared = await self.inner.clear(worker, epoch, sequence)
        self._maybe_lose("answer")
        return num_cleared

    async def longest(self, names: Sequence[bytes]) -> dict[str, int]:
        return await self.inner.longest(names)

    async def survey(self) -> Survey:
        self._maybe_lose("survey")
        return await self.inner.survey()

    async def holdings(self, worker: str) -> Holdings | None:
        self._maybe_lose("holdings")
        return await self.inner.holdings(worker)

    async def follow(self, cursor: Cursor, wait_s: float) -> Changes:
        self._maybe_lose("changes")
        news = await self.inner.follow(cursor, 0)
        return replace(news, changes=self._mangled(list(news.changes)))

    def _mangled(self, changes: list[Change]) -> tuple[Change, ...]:
        mangles: list[Callable[[list[Change]], None]] = [
            lambda some: some.remove(self._rng.choice(some)),
            lambda some: some.insert(self._rng.randrange(len(some)), self._rng.choice(some)),
            lambda some: self._rng.shuffle(some),
        ]
        for mangle in mangles:
            if changes and self._goes_wrong():
                mangle(changes)
        return tuple(changes)

    async def doubt(self, worker: str, epoch: int) -> None:
        await self.inner.doubt(worker, epoch)

    async def close(self) -> None:
        await self.inner.close()
