"""The worker's side of the index: announce it, keep its lease, publish what its pool does.

    OUTSIDE   not registered, or no longer sure what the index holds for us
    INSIDE    registered, and the index holds exactly what has been acknowledged
    FENCED    a later life of this name exists; the end

OUTSIDE -> INSIDE: register; when the index holds something else than what it last acknowledged,
clear it and publish everything that is resident, parents first, so that what is there so far is
always a truthful part. INSIDE -> OUTSIDE: the index does not know us any more (it was wiped, or our
lease ran out), it holds something else, or an event went missing on the way.

An unreachable index changes nothing but the time: events wait, and once there are more of them than
resident blocks they are dropped in favour of publishing all that is resident.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from itertools import islice

import structlog

from kvcache.block_hash import BlockHash
from prefix_index.index import (
    EMPTY,
    BlockEvent,
    Clock,
    IndexUnavailable,
    Load,
    OutOfStep,
    PrefixIndex,
    PrefixIndexError,
    Removed,
    Residency,
    StaleEpoch,
    Stored,
    Tier,
    WorkerRecord,
)

# One transaction of this many events takes Redis about 1 ms, so nobody else waits long.
MAX_BATCH_EVENTS = 1024
LEAVE_TIMEOUT_S = 1.0

log = structlog.get_logger()


class AnnouncerState(Enum):
    OUTSIDE = "outside"
    INSIDE = "inside"
    FENCED = "fenced"


class Announcer:
    """`source` gives the load and the pool's events since it was last asked, in order; `resident`
    gives all its blocks, parents before children. Both are called on the event loop
    and return at once. Events between the two calls may be told twice, never lost.
    """

    def __init__(
        self,
        index: PrefixIndex,
        record: WorkerRecord,
        source: Callable[[], tuple[Load, Sequence[BlockEvent]]],
        resident: Callable[[], Sequence[BlockEvent]],
        clock: Clock,
        *,
        heartbeat_s: float = 1.0,
        lease_s: float = 5.0,
        publish_s: float = 0.05,
    ) -> None:
        self._index = index
        self.record = record
        self._source = source
        self._resident = resident
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._lease_s = lease_s
        self._publish_s = publish_s
        self.state = AnnouncerState.OUTSIDE
        self.num_failures = 0  # times the index was unavailable
        self.num_resyncs = 0  # times all that is resident was published
        self._heartbeat_due = -math.inf
        self._entered_at = -math.inf
        self._reachable = True
        self._draining = False
        self._load = record.load
        self._acknowledged = EMPTY  # what the index held when it last answered
        self._pending: deque[BlockEvent] = deque()  # each changes the set; not acknowledged yet
        # What there is after `pending`, and in which tier; None: ask `resident`.
        self._names: dict[BlockHash, Tier] | None = None

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def silent_until(self) -> float:
        """Before then a step says nothing unless `source` has news."""
        waits = self.state is AnnouncerState.OUTSIDE or self._pending
        return -math.inf if waits else self._heartbeat_due

    async def run(self) -> None:
        """Announce until cancelled, then leave. Returns by itself only when FENCED.

        Trouble with the index is never raised: it costs its routers what they would have known.
        """
        try:
            while self.state is not AnnouncerState.FENCED:
                await self._clock.sleep(await self.step())
        finally:
            await self._leave()

    def drain(self) -> None:
        """Say, with a heartbeat at once, that no new work is wanted."""
        self._draining = True
        self._heartbeat_due = -math.inf

    async def step(self) -> float:
        """Do what is due, and return the seconds until the next step."""
        self._absorb()
        try:
            await self._do_what_is_due()
            self._say_reachable(True)
        except IndexUnavailable as error:
            self.num_failures += 1
            self._say_reachable(False, str(error))
            self._shed()
            return self._heartbeat_s / 2
        except OutOfStep as error:
            return self._step_outside(str(error))
        except StaleEpoch as error:
            self.state = AnnouncerState.FENCED
            log.error("worker_fenced", worker=self.record.name, reason=str(error))
        return self._publish_s

    async def _do_what_is_due(self) -> None:
        try:
            if self.state is AnnouncerState.OUTSIDE:
                await self._enter()
            await self._publish_pending()
        except IndexUnavailable:
            # A full Redis refuses news, yet renews leases; what it holds nobody can tell now.
            await self._heartbeat_if_due(compare=False)
            raise
        await self._heartbeat_if_due()

    def _absorb(self) -> None:
        """Take the pool's news. While the set is unknown its events say nothing."""
        load, events = self._source()
        if _subjects(load) != _subjects(self._load):
            self._heartbeat_due = -math.inf  # routers are to know at once
        self._load = replace(load, draining=load.draining or self._draining)
        if self._names is None:
            return
        for event in events:
            self._queue(event, self._names)

    def _queue(self, event: BlockEvent, names: dict[BlockHash, Tier]) -> None:
        """A block that has only moved to another tier leaves the set and enters it again."""
        tier = event.tier if isinstance(event, Stored) else None
        before = names.get(event.name)
        if before is tier:
            return
        if before is not None:
            self._pending.append(Removed(event.name))
            del names[event.name]
        if tier is not None:
            self._pending.append(event)
            names[event.name] = tier

    async def _enter(self) -> None:
        held = await self._index.register(self.record.with_load(self._load), self._lease_s)
        self._heartbeat_due = self._clock.now() + self._heartbeat_s
        if self._names is None or held != self._acknowledged:
            await self._start_over(held)
        self.state = AnnouncerState.INSIDE
        self._entered_at = self._clock.now()
        log.info("worker_registered", worker=self.record.name, epoch=self.record.epoch)

    async def _start_over(self, held: Residency) -> None:
        """Empty the index's entries, and queue everything resident."""
        self._names = None
        self._pending.clear()
        self._acknowledged = Residency(held.sequence, EMPTY.fingerprint, 0)
        if held != self._acknowledged:
            number = held.sequence + 1
            await self._index.clear(self.record.name, self.record.epoch, number)
            self._acknowledged = replace(self._acknowledged, sequence=number)
        self._absorb()  # what happened before the next line is in what it returns
        self._names = {}
        for event in self._resident():
            self._queue(event, self._names)
        self.num_resyncs += bool(self._names)

    async def _publish_pending(self) -> None:
        while self._pending:
            batch = list(islice(self._pending, MAX_BATCH_EVENTS))
            sequence = self._acknowledged.sequence + 1
            await self._index.publish(
                self.record.name, self.record.epoch, batch, sequence, self._acknowledged
            )
            self._acknowledged = self._acknowledged.after(batch)
            for _ in batch:
                self._pending.popleft()
            await self._heartbeat_if_due()

    async def _heartbeat_if_due(self, *, compare: bool = True) -> None:
        if self._clock.now() < self._heartbeat_due:
            return
        held = await self._index.heartbeat(
            self.record.name, self.record.epoch, self._load, self._lease_s
        )
        self._heartbeat_due = self._clock.now() + self._heartbeat_s
        if not compare:
            return
        if held is None:
            raise OutOfStep("the index does not know this worker")
        if held != self._acknowledged:
            raise OutOfStep(f"the index holds {held}, acknowledged was {self._acknowledged}")

    def _step_outside(self, reason: str) -> float:
        """Come back at once, unless that was just tried: starting over is dear."""
        self.state = AnnouncerState.OUTSIDE
        log.warning("worker_out_of_step", worker=self.record.name, reason=reason)
        was_inside_s = self._clock.now() - self._entered_at
        return self._publish_s if was_inside_s > self._heartbeat_s / 2 else self._heartbeat_s

    def _say_reachable(self, reachable: bool, reason: str = "") -> None:
        if reachable != self._reachable:
            self._reachable = reachable
            event = "index_reachable" if reachable else "index_unavailable"
            log.warning(event, worker=self.record.name, reason=reason)

    def _shed(self) -> None:
        """When replaying costs more than starting over, start over."""
        if self._names is not None and len(self._pending) > len(self._names) + MAX_BATCH_EVENTS:
            self._names = None
            self._pending.clear()
            self.state = AnnouncerState.OUTSIDE

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._index.deregister(self.record.name, self.record.epoch)
        except (PrefixIndexError, TimeoutError) as error:
            log.warning("worker_not_deregistered", worker=self.record.name, reason=str(error))


def _subjects(load: Load) -> set[tuple[str, int, str]]:
    return {each.subject for each in load.quarantines}
