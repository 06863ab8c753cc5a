"""The prefix index of a single process: for tests, simulations and one router without Redis."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from prefix_index.events import pack
from prefix_index.index import (
    EMPTY,
    UNPROVEN,
    BlockEvent,
    Change,
    Changes,
    Clock,
    Cursor,
    EntriesCleared,
    EntriesPublished,
    Holdings,
    Load,
    Member,
    OutOfStep,
    Residency,
    StaleEpoch,
    Stored,
    Survey,
    WorkerGone,
    WorkerRecord,
    WorkerRegistered,
    unapplied,
)


@dataclass(slots=True)
class _Life:
    record: WorkerRecord
    lease_until: float
    residency: Residency = EMPTY
    entries: dict[bytes, Stored] = field(default_factory=dict)


class MemoryIndex:
    """Plain dictionaries, walked plainly: what faster lookups are compared with.

    A life whose lease lapsed is kept for `retention_s`, so that a worker that was only slow finds
    its entries again. The last `max_changes` changes can be followed.
    """

    def __init__(self, clock: Clock, *, retention_s: float = 60.0, max_changes: int = 4096) -> None:
        self._clock = clock
        self._retention_s = retention_s
        self._epochs: dict[str, int] = {}
        self._lives: dict[str, _Life] = {}
        self._changes: deque[tuple[int, Change]] = deque(maxlen=max_changes)
        self._num_changes = 0
        self._changed = asyncio.Event()

    async def next_epoch(self, name: str, least: int = 0) -> int:
        """`least` is where whoever has wiped an index before this one lets epochs go on."""
        self._epochs[name] = max(least, self._epochs.get(name, 0) + 1)
        return self._epochs[name]

    async def register(self, record: WorkerRecord, lease_s: float) -> Residency:
        self._refuse_stale(record.name, record.epoch)
        self._epochs[record.name] = record.epoch
        life = self._lives.get(record.name)
        lease_until = self._clock.now() + lease_s
        if life is None or life.record.epoch != record.epoch:
            life = self._lives[record.name] = _Life(record, lease_until)
        life.record, life.lease_until = record, lease_until
        self._tell(WorkerRegistered(record, life.residency))
        return life.residency

    async def heartbeat(
        self, name: str, epoch: int, load: Load, lease_s: float
    ) -> Residency | None:
        self._refuse_stale(name, epoch)
        life = self._lives.get(name)
        if life is None or life.record.epoch != epoch or not self._is_live(life):
            return None
        life.record = life.record.with_load(load)
        life.lease_until = self._clock.now() + lease_s
        return life.residency

    async def deregister(self, name: str, epoch: int) -> None:
        life = self._lives.get(name)
        if life is not None and life.record.epoch == epoch:
            del self._lives[name]
            self._tell(WorkerGone(name, epoch))

    async def workers(self) -> list[WorkerRecord]:
        return [self._lives[n].record for n in sorted(self._lives) if self._is_live(self._lives[n])]

    async def publish(
        self,
        worker: str,
        epoch: int,
        events: Sequence[BlockEvent],
        sequence: int | None = None,
        known: Residency | None = None,
    ) -> None:
        life = self._life(worker, epoch)
        events = unapplied(events, sequence, life.residency.sequence)
        if not events:
            return
        first = life.residency.sequence + 1
        effective = [event for event in events if _apply(event, life.entries)]
        life.residency = replace(
            life.residency.after(effective), sequence=life.residency.sequence + len(events)
        )
        self._tell(EntriesPublished(worker, epoch, first, tuple(events)))

    async def clear(self, worker: str, epoch: int, sequence: int | None = None) -> int:
        life = self._life(worker, epoch)
        applied = life.residency.sequence
        number = applied + 1 if sequence is None else sequence
        if number <= applied:
            raise OutOfStep(f"worker {worker}: clear {number} came after event {applied}")
        num_cleared = len(life.entries)
        life.entries = {}
        life.residency = Residency(number, EMPTY.fingerprint, 0)
        self._tell(EntriesCleared(worker, epoch, number))
        return num_cleared

    async def longest(self, names: Sequence[bytes]) -> dict[str, int]:
        found: dict[str, int] = {}
        for worker, life in self._lives.items():
            if self._is_live(life):
                gaps = (depth for depth, name in enumerate(names) if name not in life.entries)
                found[worker] = next(gaps, len(names))
        return found

    async def survey(self) -> Survey:
        now = self._clock.now()
        for name, life in list(self._lives.items()):
            if life.lease_until + self._retention_s < now:
                del self._lives[name]
        live = {name: life for name, life in self._lives.items() if self._is_live(life)}
        return Survey(
            members={name: Member(life.record, life.residency) for name, life in live.items()},
            expired=frozenset(self._lives.keys() - live.keys()),
            cursor=Cursor((0, self._num_changes)),
        )

    async def holdings(self, worker: str) -> Holdings | None:
        life = self._lives.get(worker)
        if life is None:
            return None
        sequence = life.residency.sequence
        return Holdings(life.record.epoch, sequence, sequence, pack(life.entries.values()))

    async def follow(self, cursor: Cursor, wait_s: float) -> Changes:
        if self._num_changes <= cursor[1]:
            await self._wait_for_change(wait_s)
        news = takewhile(lambda numbered: numbered[0] > cursor[1], reversed(self._changes))
        changes = tuple(change for _, change in news)[::-1]
        return Changes(Cursor((0, max(self._num_changes, cursor[1]))), changes)

    async def doubt(self, worker: str, epoch: int) -> None:
        life = self._lives.get(worker)
        if life is not None and life.record.epoch == epoch:
            life.residency = replace(life.residency, fingerprint=UNPROVEN)

    async def close(self) -> None:
        pass

    def _refuse_stale(self, name: str, epoch: int) -> None:
        newest = self._epochs.get(name, 0)
        if epoch < newest:
            raise StaleEpoch(f"worker {name}: epoch {epoch} has been followed by epoch {newest}")

    def _life(self, worker: str, epoch: int) -> _Life:
        self._refuse_stale(worker, epoch)
        life = self._lives.get(worker)
        if life is None or life.record.epoch != epoch:
            raise OutOfStep(f"worker {worker}: epoch {epoch} is not registered")
        return life

    def _is_live(self, life: _Life) -> bool:
        return self._clock.now() < life.lease_until

    def _tell(self, change: Change) -> None:
        self._num_changes += 1
        self._changes.append((self._num_changes, change))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, wait_s: float) -> None:
        change = asyncio.ensure_future(self._changed.wait())
        pause = asyncio.ensure_future(self._clock.sleep(wait_s))
        try:
            await asyncio.wait((change, pause), return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
            pause.cancel()


def _apply(event: BlockEvent, entries: dict[bytes, Stored]) -> bool:
    """Whether the event changed the set of names."""
    before = len(entries)
    if isinstance(event, Stored):
        entries[event.name] = event
    else:
        entries.pop(event.name, None)
    return len(entries) != before
