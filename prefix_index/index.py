"""The prefix index: its words, its promises, and the errors it may raise.

    register    a life of a worker becomes visible, empty; the life before it is forgotten
    publish     numbered events say which blocks it stores and which it has removed
    heartbeat   keeps its lease, reports its load, answers what the index believes it holds
    clear       everything it holds is forgotten at once
    deregister  it leaves

Every operation on a worker's entries has a number, 1, 2, 3... within the epoch, and the index keeps
the last one it applied, with a fingerprint of the entries, in the same atomic update. A repeat is
recognised by its number and changes nothing. A gap, or a fingerprint that is not the worker's own,
means the two disagree; the worker then clears and publishes all it holds.

Entries are hints. The worker that owns a block decides whether it is there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvcache.block_pool import BlockEvent, Removed, Stored, Tier
from prefix_index.events import PackedEvents
from prefix_index.worker_record import Load, MalformedRecord, Manifest, Role, WorkerRecord

__all__ = [
    "EMPTY",
    "UNPROVEN",
    "BlockEvent",
    "Change",
    "Changes",
    "Clock",
    "Cursor",
    "EntriesCleared",
    "EntriesPublished",
    "Fingerprint",
    "Holdings",
    "IndexUnavailable",
    "Load",
    "MalformedRecord",
    "Manifest",
    "Member",
    "OutOfStep",
    "PrefixIndex",
    "PrefixIndexError",
    "Removed",
    "Residency",
    "Role",
    "StaleEpoch",
    "Stored",
    "Survey",
    "Tier",
    "WorkerGone",
    "WorkerRecord",
    "WorkerRegistered",
    "changed",
    "fingerprint",
    "moved",
    "unapplied",
]

Fingerprint = NewType("Fingerprint", int)  # sum of the block names as numbers, modulo 2**128
# No set has this fingerprint: these entries are damaged and agree with nobody's.
UNPROVEN = Fingerprint(-1)

Cursor = NewType("Cursor", tuple[int, int])  # a place in the stream of changes; later is greater


class PrefixIndexError(Exception):
    """PrefixIndexError
    - IndexUnavailable   out of reach, slow, read-only or full: try again later
    - StaleEpoch         a later life of the same worker exists: stop announcing
    - OutOfStep          the index's entries are not what the caller thinks: register, republish
    """


class IndexUnavailable(PrefixIndexError):
    pass


class StaleEpoch(PrefixIndexError):
    pass


class OutOfStep(PrefixIndexError):
    pass


def fingerprint(names: Iterable[bytes]) -> Fingerprint:
    """Order-free: equal for equal sets. Block names are digests, so a sum suffices."""
    return Fingerprint(sum(int.from_bytes(name, "little") for name in names) % 2**128)


def changed(before: Fingerprint, added: Iterable[bytes], removed: Iterable[bytes]) -> Fingerprint:
    """The fingerprint of a set after it has gained and lost these."""
    return moved(before, fingerprint(added) - fingerprint(removed))


def moved(before: Fingerprint, by: int) -> Fingerprint:
    """`by` is the sum of the names gained less that of those lost; UNPROVEN stays UNPROVEN."""
    return UNPROVEN if before == UNPROVEN else Fingerprint((before + by) % 2**128)


def unapplied(
    events: Sequence[BlockEvent], sequence: int | None, applied: int
) -> Sequence[BlockEvent]:
    """Those of `events`, the first of which is number `sequence`, that come after `applied`."""
    first = applied + 1 if sequence is None else sequence
    if first > applied + 1:
        raise OutOfStep(f"event {first} came after event {applied}: {first - applied - 1} missing")
    return events[applied + 1 - first :]


@dataclass(frozen=True, slots=True)
class Residency:
    """What a worker holds, small enough to compare: last operation, fingerprint, count."""

    sequence: int
    fingerprint: Fingerprint
    num_blocks: int

    def after(self, events: Sequence[BlockEvent]) -> "Residency":
        """The residency once `events`, each of which changes the set, have been applied."""
        stored = [event.name for event in events if isinstance(event, Stored)]
        removed = [event.name for event in events if isinstance(event, Removed)]
        return Residency(
            sequence=self.sequence + len(events),
            fingerprint=changed(self.fingerprint, stored, removed),
            num_blocks=self.num_blocks + len(stored) - len(removed),
        )


EMPTY = Residency(sequence=0, fingerprint=Fingerprint(0), num_blocks=0)


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    record: WorkerRecord
    residency: Residency  # what survives of its entries; a new epoch starts with none


@dataclass(frozen=True, slots=True)
class EntriesPublished:
    worker: str
    epoch: int
    sequence: int  # of the first event
    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True)
class EntriesCleared:
    worker: str
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class WorkerGone:
    worker: str
    epoch: int


Change = WorkerRegistered | EntriesPublished | EntriesCleared | WorkerGone


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes in order, the place to go on from, and how many entries could not be read."""

    cursor: Cursor
    changes: tuple[Change, ...]
    num_garbage: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """A worker with a live lease."""

    record: WorkerRecord
    residency: Residency


@dataclass(frozen=True, slots=True)
class Survey:
    """Who is there, all at about one moment. `cursor` is the end of the stream before it.

    A name in `expired` once registered and has let its lease lapse. A name in neither is unknown
    here: it has left, or the store has lost its contents.
    """

    members: Mapping[str, Member]
    expired: frozenset[str]
    cursor: Cursor
    num_garbage: int = 0

    def joined(self, other: "Survey") -> "Survey":
        """Of other workers, taken a moment later: whatever came between is after `cursor`."""
        members = {**self.members, **other.members}
        expired = self.expired | other.expired
        return Survey(members, expired, self.cursor, self.num_garbage + other.num_garbage)


@dataclass(frozen=True, slots=True)
class Holdings:
    """Every block of one worker, as if it stored them all, read while it goes on publishing.

    What the events after number `sequence`, up to `settled`, say is in here or is not. Whoever
    applies them all has exactly the worker's entries; if the two are equal, these are exact.
    """

    epoch: int
    sequence: int
    settled: int
    entries: PackedEvents  # an entry may stand here twice
    num_garbage: int = 0


class Clock(Protocol):
    """Any object with these two; the engine's clock fits."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class PrefixIndex(Protocol):
    """The authority across routers and restarts. All methods may raise IndexUnavailable.

    Belongs to one event loop.
    """

    async def next_epoch(self, name: str) -> int:
        """An epoch greater than every one before it for this name. Fences them."""

    async def register(self, record: WorkerRecord, lease_s: float) -> Residency:
        """Make `record` visible for `lease_s`, and return what the index holds for its epoch.

        The entries of earlier epochs are gone before the record shows. Registering again with the
        same epoch keeps the entries. Raises StaleEpoch.
        """

    async def heartbeat(
        self, name: str, epoch: int, load: Load, lease_s: float
    ) -> Residency | None:
        """Renew the lease and return what the index holds; None: not registered (any more).

        Raises StaleEpoch.
        """

    async def deregister(self, name: str, epoch: int) -> None:
        """Remove record, lease and entries, if they are still those of `epoch`."""

    async def workers(self) -> list[WorkerRecord]:
        """The workers with a live lease, by name, each with its latest load."""

    async def publish(
        self,
        worker: str,
        epoch: int,
        events: Sequence[BlockEvent],
        sequence: int | None = None,
        known: Residency | None = None,
    ) -> None:
        """Apply events, the first of which has number `sequence` (None: whichever is next).

        Events already applied are skipped, so a publish whose answer was lost is simply repeated.
        A block stored twice or removed while absent counts but changes nothing. `known` is what
        the index holds as far as the caller was told: while that is so, every event changes it.
        Raises StaleEpoch, or OutOfStep on a gap and when the worker is not registered.
        """

    async def clear(self, worker: str, epoch: int, sequence: int | None = None) -> int:
        """Forget the worker's entries, as operation number `sequence`; return how many there were.

        Costs the worker's own entries. Any number that is not in the past is in order here, for
        what went before no longer matters. Raises StaleEpoch or OutOfStep.
        """

    async def longest(self, names: Sequence[bytes]) -> dict[str, int]:
        """For each live worker, how many of `names` it holds without a gap from the first on."""

    async def survey(self) -> Survey:
        """Everyone's record and residency, for a mirror to compare itself with."""

    async def holdings(self, worker: str) -> Holdings | None:
        """All entries of one worker, or None when it has none registered."""

    async def follow(self, cursor: Cursor, wait_s: float) -> Changes:
        """Changes after `cursor`, waiting at most `wait_s` for the first one.

        Old changes are dropped from the stream in time: numbers show what is missing.
        """

    async def doubt(self, worker: str, epoch: int) -> None:
        """Mark a worker's entries as UNPROVEN, so that its next heartbeat makes it republish."""

    async def close(self) -> None: ...
