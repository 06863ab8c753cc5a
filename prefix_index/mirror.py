"""The router's side of the index: everything in memory, so that a lookup never waits for anyone.

One loop follows the stream of changes and, once a second, surveys the index and compares. What the
stream missed shows as a gap in a worker's numbers, a number that is not reached, or a fingerprint
that differs; then that worker's entries are read again. An index that cannot be reached leaves the
mirror as it is: its age grows, its answers go on.

A worker leaves the mirror when its lease has lapsed or it says goodbye. It gets `grace_s` to come
back when it is merely unknown, because the store lost its contents, and when the store was out of
reach until just now, so that nobody could renew a lease.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from prefix_index.compact_table import open_table
from prefix_index.index import (
    EMPTY,
    UNPROVEN,
    BlockEvent,
    Change,
    Clock,
    Cursor,
    EntriesCleared,
    EntriesPublished,
    Fingerprint,
    IndexUnavailable,
    OutOfStep,
    PrefixIndex,
    Residency,
    Survey,
    WorkerGone,
    WorkerRecord,
    WorkerRegistered,
    fingerprint,
    moved,
    unapplied,
)
from prefix_index.prefix_table import Life, PrefixTable, Run

# Work between two turns of the event loop; about 2 ms of it.
MAX_BLOCKS_A_TURN = 4096
RETRY_S = 0.5

log = structlog.get_logger()


@dataclass(slots=True)
class MirrorCounts:
    """What happened so far; every number only grows."""

    changes: int = 0
    gaps: int = 0  # events found missing
    reloads: int = 0  # workers read again as a whole
    doubts: int = 0  # workers whose entries in the index were found damaged
    garbage: int = 0  # things in the index that nobody of ours can have written
    failures: int = 0  # times the index was unavailable


@dataclass(slots=True)
class _View:
    """One worker as this router sees it; its entries are in the table."""

    record: WorkerRecord
    sequence: int = 0
    fingerprint: Fingerprint = EMPTY.fingerprint
    settled: int = 0  # the fingerprint means something from this event on
    must_reach: int = 0  # the index had applied this event a survey ago
    exact_at: int = -1  # the entries were read, exactly, as of this event
    missing_since: float = math.inf

    @property
    def life(self) -> Life:
        return Life(self.record.name, self.record.epoch)


class Mirror:
    """`run` keeps it current; everything else answers at once from memory.

    Belongs to one event loop. Several mirrors may follow one index, each with a `table` of its own.
    """

    def __init__(
        self,
        index: PrefixIndex,
        clock: Clock,
        *,
        survey_s: float = 1.0,
        grace_s: float = 5.0,
        table: PrefixTable | None = None,
    ) -> None:
        self._index = index
        self._clock = clock
        self._survey_s = survey_s
        self._grace_s = grace_s
        self.counts = MirrorCounts()
        self._table = open_table() if table is None else table
        self._views: dict[str, _View] = {}
        self.version = 0  # of what `workers` answers
        self.num_behind = 0  # workers of which the last survey had news that were not here
        self._cursor: Cursor | None = None
        self._survey_due = -math.inf
        self._heard_at = -math.inf
        self._in_touch_since = -math.inf
        self._failing = False

    @property
    def ready(self) -> bool:
        """Whether the index has been read once; from then on it stays true."""
        return self._cursor is not None

    @property
    def age_s(self) -> float:
        """Seconds since the index last answered: what it has heard since is not in here."""
        return self._clock.now() - self._heard_at

    @property
    def num_blocks(self) -> int:
        return self._table.num_blocks

    def workers(self) -> tuple[WorkerRecord, ...]:
        """By name."""
        return tuple(self._views[name].record for name in sorted(self._views))

    def longest(self, names: Sequence[bytes]) -> dict[str, int]:
        """For each of `workers`, how many of `names` it holds without a gap from the first on."""
        runs = self.runs(names)
        return {worker: runs[worker].num_blocks if worker in runs else 0 for worker in self._views}

    def runs(self, names: Sequence[bytes]) -> dict[str, Run]:
        """`longest` of those who hold any, and in which memory they hold it."""
        return self._table.longest(names)

    def check(self) -> None:
        """Raise if the books do not balance: the table, the fingerprints, who is listed."""
        self._table.check()
        for view in self._views.values():
            held = fingerprint(entry.name for entry in self._table.entries(view.life))
            assert view.fingerprint in (held, UNPROVEN), f"{view.life} holds something else"

    async def run(self) -> None:
        """Keep current until cancelled. Trouble with the index is never raised."""
        while True:
            try:
                await self.step()
            except IndexUnavailable as error:
                self._note_failure("index_unavailable", str(error))
                await self._clock.sleep(RETRY_S)
            except Exception as error:  # whatever is wrong with the index, routing goes on
                self._note_failure("mirror_failed", repr(error))
                await self._clock.sleep(RETRY_S)

    async def step(self) -> None:
        """Survey if it is time to, else wait for changes and apply them."""
        wait_s = self._survey_due - self._clock.now()
        if self._cursor is None or wait_s <= 0:
            survey = await self._index.survey()
            self._note_contact()
            await self._compare(survey)
            self._survey_due = self._clock.now() + self._survey_s
        else:
            news = await self._index.follow(self._cursor, wait_s)
            self._note_contact()
            self.counts.garbage += news.num_garbage
            for change in news.changes:
                await self._apply(change)
            self._cursor = news.cursor
        while self._table.sweep(MAX_BLOCKS_A_TURN):
            await asyncio.sleep(0)

    async def _compare(self, survey: Survey) -> None:
        self.counts.garbage += survey.num_garbage
        if self._cursor is None or survey.cursor < self._cursor:
            self._cursor = survey.cursor  # at the start, and after the stream has begun anew
        self.num_behind = 0
        for name, member in survey.members.items():
            view = self._views.get(name)
            if view is None or view.record.epoch != member.record.epoch:
                view = self._begin(member.record)
                await self._reload(view)
            self._know(view, member.record)
            await self._compare_entries(view, member.residency)
        for name in self._views.keys() - survey.members.keys():
            self._miss(self._views[name], expired=name in survey.expired)

    async def _compare_entries(self, view: _View, theirs: Residency) -> None:
        self.num_behind += view.sequence < theirs.sequence
        if self._is_behind_or_astray(view, theirs):
            await self._reload(view)
        is_exact = view.exact_at == view.sequence == theirs.sequence
        if is_exact and view.fingerprint != theirs.fingerprint:
            await self._doubt(view)
        view.must_reach = theirs.sequence

    def _is_behind_or_astray(self, view: _View, theirs: Residency) -> bool:
        """A number that was not reached within a survey, one that was taken back, or other blocks.

        Whoever has just read the entries as they are is neither: then it is the index that errs.
        """
        if view.sequence != theirs.sequence:
            return view.sequence > theirs.sequence or view.sequence < view.must_reach
        differs = view.sequence >= view.settled and view.fingerprint != theirs.fingerprint
        return differs and view.exact_at != view.sequence

    def _miss(self, view: _View, *, expired: bool) -> None:
        now = self._clock.now()
        view.missing_since = min(view.missing_since, now)
        since = self._in_touch_since if expired else view.missing_since
        if now - since >= self._grace_s:
            self._drop(view)

    async def _apply(self, change: Change) -> None:
        self.counts.changes += 1
        match change:
            case WorkerRegistered(record):
                await self._apply_registered(change, self._views.get(record.name))
            case WorkerGone(worker, epoch):
                view = self._views.get(worker)
                if view is not None and view.record.epoch <= epoch:
                    self._drop(view)
            case EntriesPublished(worker, epoch) | EntriesCleared(worker, epoch):
                view = self._views.get(worker)
                if view is None or view.record.epoch < epoch:
                    self._survey_due = -math.inf  # a life whose beginning was missed
                elif view.record.epoch == epoch:
                    await self._apply_entries(change, view)

    async def _apply_registered(self, change: WorkerRegistered, view: _View | None) -> None:
        record, residency = change.record, change.residency
        if view is not None and view.record.epoch > record.epoch:
            return
        if view is None or view.record.epoch < record.epoch:
            view = self._begin(record)
        self._know(view, record)
        if residency.sequence == view.sequence:
            return
        if residency.num_blocks == 0:
            self._empty(view, residency.sequence)
        else:
            await self._reload(view)

    async def _apply_entries(self, change: EntriesPublished | EntriesCleared, view: _View) -> None:
        if isinstance(change, EntriesCleared):
            if change.sequence > view.sequence:
                self._empty(view, change.sequence)
            return
        try:
            events = unapplied(change.events, change.sequence, view.sequence)
        except OutOfStep:
            self.counts.gaps += 1
            await self._reload(view)
            return
        self._put(view, events)
        view.sequence += len(events)
        await asyncio.sleep(0)

    async def _reload(self, view: _View) -> None:
        """Read all of a worker's entries; the stream will tell what happened since."""
        self.counts.reloads += 1
        holdings = await self._index.holdings(view.record.name)
        if holdings is None or holdings.epoch != view.record.epoch:
            self._survey_due = -math.inf
            return
        self.counts.garbage += holdings.num_garbage
        self._empty(view, holdings.sequence)
        for start in range(0, len(holdings.entries), MAX_BLOCKS_A_TURN):
            self._put(view, holdings.entries[start : start + MAX_BLOCKS_A_TURN])
            await asyncio.sleep(0)
        view.settled = view.must_reach = holdings.settled
        if holdings.settled == holdings.sequence:
            view.exact_at = holdings.sequence

    def _put(self, view: _View, events: Sequence[BlockEvent]) -> None:
        gained, lost = self._table.apply(view.life, events)
        view.fingerprint = moved(view.fingerprint, gained - lost)

    async def _doubt(self, view: _View) -> None:
        """The index contradicts itself about this worker: believe none of it, and say so."""
        self.counts.doubts += 1
        self._empty(view, view.sequence)
        view.fingerprint, view.exact_at = UNPROVEN, view.sequence
        await self._index.doubt(view.record.name, view.record.epoch)

    def _know(self, view: _View, record: WorkerRecord) -> None:
        if view.record is not record:
            view.record = record
            self.version += 1
        view.missing_since = math.inf

    def _begin(self, record: WorkerRecord) -> _View:
        """See a life for the first time, holding nothing; the life before it is over."""
        before = self._views.get(record.name)
        if before is not None:
            self._table.retire(before.life)
        view = self._views[record.name] = _View(record)
        self._table.begin(view.life)
        self.version += 1
        return view

    def _empty(self, view: _View, sequence: int) -> None:
        self._table.begin(view.life)
        view.sequence, view.fingerprint = sequence, EMPTY.fingerprint
        view.settled, view.exact_at, view.must_reach = 0, -1, 0

    def _drop(self, view: _View) -> None:
        del self._views[view.record.name]
        self._table.retire(view.life)
        self.version += 1

    def _note_failure(self, event: str, reason: str) -> None:
        self.counts.failures += 1
        if not self._failing:
            log.warning(event, reason=reason)
        self._failing = True

    def _note_contact(self) -> None:
        now = self._clock.now()
        if now - self._heard_at > 2 * self._survey_s:
            self._in_touch_since = now
        self._heard_at = now
        if self._failing:
            log.warning("index_reachable", failures=self.counts.failures)
        self._failing = False
