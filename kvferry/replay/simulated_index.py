"""An index that can be lost, and news of blocks that come late.

While it is lost every call of workers and routers fails, as over a closed connection; when it comes
back it is empty. Only epochs go on, as they follow Redis's clock.
"""

from collections import deque
from collections.abc import Callable, Sequence

from prefix_index.index import (
    BlockEvent,
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


class LateNews:
    """What a worker has to say, as an announcer asks for it: its load at once, its blocks late."""

    def __init__(
        self,
        source: Callable[[], tuple[Load, Sequence[BlockEvent]]],
        num_new: Callable[[], int],
        clock: Clock,
        lag_s: float,
    ) -> None:
        self._source = source
        self._num_new = num_new
        self._clock = clock
        self._lag_s = lag_s
        self._held: deque[tuple[float, Sequence[BlockEvent]]] = deque()

    @property
    def waiting(self) -> bool:
        """Whether there are blocks to tell of, now or later."""
        return bool(self._held or self._num_new())

    def __call__(self) -> tuple[Load, Sequence[BlockEvent]]:
        load, events = self._source()
        now, due = self._clock.now(), list[BlockEvent]()
        if events:
            self._held.append((now, events))
        while self._held and self._held[0][0] <= now - self._lag_s:
            due += self._held.popleft()[1]
        return load, due


class SimulatedIndex:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lost = False
        self._last_epoch = 0
        self._inner = MemoryIndex(clock)

    def lose(self) -> None:
        self._lost = True

    def come_back_empty(self) -> None:
        self._lost = False
        self._inner = MemoryIndex(self._clock)

    def _reached(self) -> MemoryIndex:
        if self._lost:
            raise IndexUnavailable("the index is lost")
        return self._inner

    async def next_epoch(self, name: str) -> int:
        self._last_epoch += 1
        return await self._inner.next_epoch(name, self._last_epoch)

    async def register(self, record: WorkerRecord, lease_s: float) -> Residency:
        return await self._reached().register(record, lease_s)

    async def heartbeat(
        self, name: str, epoch: int, load: Load, lease_s: float
    ) -> Residency | None:
        return await self._reached().heartbeat(name, epoch, load, lease_s)

    async def deregister(self, name: str, epoch: int) -> None:
        await self._reached().deregister(name, epoch)

    async def workers(self) -> list[WorkerRecord]:
        return await self._reached().workers()

    async def publish(
        self,
        worker: str,
        epoch: int,
        events: Sequence[BlockEvent],
        sequence: int | None = None,
        known: Residency | None = None,
    ) -> None:
        await self._reached().publish(worker, epoch, events, sequence, known)

    async def clear(self, worker: str, epoch: int, sequence: int | None = None) -> int:
        return await self._reached().clear(worker, epoch, sequence)

    async def longest(self, names: Sequence[bytes]) -> dict[str, int]:
        return await self._reached().longest(names)

    async def survey(self) -> Survey:
        return await self._reached().survey()

    async def holdings(self, worker: str) -> Holdings | None:
        return await self._reached().holdings(worker)

    async def follow(self, cursor: Cursor, wait_s: float) -> Changes:
        return await self._reached().follow(cursor, wait_s)

    async def doubt(self, worker: str, epoch: int) -> None:
        await self._reached().doubt(worker, epoch)

    async def close(self) -> None:
        pass
