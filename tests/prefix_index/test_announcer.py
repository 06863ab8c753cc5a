"""What a worker's announcer tells the index, and how it finds its way back."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.clock import ManualClock
from prefix_index.announcer import MAX_BATCH_EVENTS, Announcer, AnnouncerState
from prefix_index.index import (
    EMPTY,
    BlockEvent,
    IndexUnavailable,
    Load,
    Residency,
    WorkerRecord,
    fingerprint,
)
from prefix_index.memory_index import MemoryIndex
from prefix_index.quarantine import Quarantine
from tests.prefix_index.samples import IDLE, Pool, block, blocks, removed, stored, worker


class WatchedIndex(MemoryIndex):
    """Notes what it is asked; loses the requests, or only the answers, on demand."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.asked: list[str] = []
        self.lose: str | None = None

    async def register(self, record: WorkerRecord, lease_s: float) -> Residency:
        self._note("register")
        return await super().register(record, lease_s)

    async def heartbeat(
        self, name: str, epoch: int, load: Load, lease_s: float
    ) -> Residency | None:
        self._note("heartbeat")
        return await super().heartbeat(name, epoch, load, lease_s)

    async def publish(
        self,
        worker: str,
        epoch: int,
        events: Sequence[BlockEvent],
        sequence: int | None = None,
        known: Residency | None = None,
    ) -> None:
        self._note(f"publish {sequence}+{len(events)}")
        await super().publish(worker, epoch, events, sequence, known)
        if self.lose == "answer":
            raise IndexUnavailable("answer lost")

    async def clear(self, worker: str, epoch: int, sequence: int | None = None) -> int:
        self._note(f"clear {sequence}")
        return await super().clear(worker, epoch, sequence)

    def _note(self, call: str) -> None:
        if self.lose == "request":
            raise IndexUnavailable("request lost")
        self.asked.append(call)

    def taken(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def index(clock: ManualClock) -> WatchedIndex:
    return WatchedIndex(clock)


def announcer_of(index: WatchedIndex, pool: Pool, clock: ManualClock, epoch: int = 1) -> Announcer:
    return Announcer(index, worker(epoch=epoch), pool.source, pool.resident, clock)


async def test_it_registers_then_publishes_all_that_is_resident(
    index: WatchedIndex, clock: ManualClock
) -> None:
    pool = Pool()
    pool.store(1, 2, 3)
    announcer = announcer_of(index, pool, clock)
    assert await announcer.step() == 0.05
    assert index.taken() == ["register", "publish 1+3"]
    assert await index.longest(blocks([1, 2, 3])) == {"w0": 3}
    assert announcer.state is AnnouncerState.INSIDE


async def test_without_news_it_is_silent_until_its_next_heartbeat(
    index: WatchedIndex, clock: ManualClock
) -> None:
    announcer = announcer_of(index, Pool(), clock)
    assert announcer.silent_until == -math.inf  # it has not registered yet
    await announcer.step()
    assert announcer.silent_until == clock.now() + 1.0
    index.taken()
    clock.advance(0.99)
    await announcer.step()
    assert index.taken() == []
    clock.advance(0.02)
    await announcer.step()
    assert index.taken() == ["heartbeat"]


async def test_what_was_not_acknowledged_leaves_no_silence(
    index: WatchedIndex, clock: ManualClock
) -> None:
    pool = Pool()
    announcer = announcer_of(index, pool, clock)
    await announcer.step()
    index.lose = "request"
    pool.store(1)
    await announcer.step()
    assert announcer.silent_until == -math.inf


async def test_events_are_numbered_without_a_gap(index: WatchedIndex, clock: ManualClock) -> None:
    pool = Pool()
    announcer = announcer_of(index, pool, clock)
    await announcer.step()
    pool.store(1, 2)
    await announcer.step()
    await announcer.step()
    pool.remove(2)
    pool.store(5)
    await announcer.step()
    assert index.taken() == ["register", "publish 1+2", "publish 3+2"]
    assert await index.longest(blocks([1])) == {"w0": 1}
    assert await index.longest(blocks([2])) == {"w0": 0}


async def test_it_keeps_its_lease_with_a_heartbeat_a_second(
    index: WatchedIndex, clock: ManualClock
) -> None:
    running = asyncio.create_task(announcer_of(index, Pool(), clock).run())
    await clock.run(10.0)
    assert index.taken().count("heartbeat") == pytest.approx(10, abs=1)
    assert [record.name for record in await index.workers()] == ["w0"]
    running.cancel()
    await asyncio.wait([running])


async def test_it_leaves_when_it_is_cancelled(index: WatchedIndex, clock: ManualClock) -> None:
    running = asyncio.create_task(announcer_of(index, Pool(), clock).run())
    await clock.run(0.2)
    assert len(await index.workers()) == 1
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert await index.workers() == []


async def test_draining_is_told_at_once(index: WatchedIndex, clock: ManualClock) -> None:
    announcer = announcer_of(index, Pool(), clock)
    await announcer.step()
    announcer.drain()
    await announcer.step()
    assert [record.load for record in await index.workers()] == [replace(IDLE, draining=True)]


async def test_new_quarantines_are_told_with_a_heartbeat_at_once(
    index: WatchedIndex, clock: ManualClock
) -> None:
    held = Quarantine("p0", 1, "tcp", 0.0, 60.0, "9 of 90 cells came damaged")
    load = IDLE
    announcer = Announcer(index, worker(), lambda: (load, []), lambda: [], clock)
    await announcer.step()
    index.taken()
    for left_s in (60.0, 59.9):  # the second says nothing new
        load = replace(IDLE, quarantines=(replace(held, left_s=left_s),))
        await announcer.step()
    assert index.taken() == ["heartbeat"]
    (record,) = await index.workers()
    assert record.load.quarantines == (held,)


async def test_an_event_told_twice_counts_once(index: WatchedIndex, clock: ManualClock) -> None:
    pool = Pool()
    announcer = announcer_of(index, pool, clock)
    await announcer.step()
    pool.store(1)
    pool.events = [*stored(1, 1), *removed(7), *stored(1)]
    await announcer.step()
    assert index.taken() == ["register", "publish 1+1"]
    held = await index.heartbeat("w0", 1, IDLE, 5.0)
    assert held == Residency(1, fingerprint([block(1)]), 1)


async def test_a_publish_whose_answer_was_lost_is_repeated_and_skipped(
    index: WatchedIndex, clock: ManualClock
) -> None:
    pool = Pool()
    announcer = announcer_of(index, pool, clock)
    await announcer.step()
    pool.store(1, 2)
    index.lose = "answer"
    assert await announcer.step() == 0.5
    index.lose = None
    pool.remove(1)
    clock.advance(1.0)
    await announcer.step()
    assert index.taken() == ["register", "publish 1+2", "publish 1+3", "heartbeat"]
    assert announcer.state is AnnouncerState.INSIDE
    assert announcer.num_resyncs == 0


async def test_an_index_that_forgot_everything_is_told_everything(
    index: WatchedIndex, clock: ManualClock
) -> None:
    pool = Pool()
    announcer = announcer_of(index, pool, clock)
    pool.store(*range(5))
    await announcer.step()
    await index.deregister("w0", 1)
    index.taken()
    clock.advance(1.0)
    await announcer.step()
    await announcer.step()
    assert index.taken() == ["heartbeat", "register", "publish 1+5"]
    assert await index.longest(blocks(range(5))) == {"w0": 5}


async def test_a_lapsed_lease_with_entries_intact_costs_only_a_registration(
    index: WatchedIndex, clock: ManualClock
) -> None:
    pool = Pool()
    announcer = announcer_of(index, pool, clock)
    pool.store(*range(5))
    await announcer.step()
    clock.advance(6.0)
    index.taken()
    await announcer.step()
    pool.store(5)
    await announcer.step()
    assert index.taken() == ["heartbeat", "register", "publish 6+1"]
    assert announcer.num_resyncs == 1


async def test_entries_that_are_not_ours_are_cleared_and_published_anew(
    index: WatchedIndex, clock: ManualClock
) -> None:
    pool = Pool()
    announcer = announcer_of(index, pool, clock)
    pool.store(1, 2)
    await announcer.step()
    await index.doubt("w0", 1)
    index.taken()
    clock.advance(1.0)
    await announcer.step()
    await announcer.step()
    assert index.taken() == ["heartbeat", "register", "clear 3", "publish 4+2"]
    assert await index.heartbeat("w0", 1, IDLE, 5.0) == Residency(5, fingerprint(blocks([1, 2])), 2)


async def test_an_index_that_never_agrees_is_not_asked_all_the_time(
    index: WatchedIndex, clock: ManualClock
) -> None:
    announcer = announcer_of(index, Pool(), clock)
    running = asyncio.create_task(announcer.run())
    for _ in range(100):
        await clock.run(0.1)
        await index.doubt("w0", 1)
    assert index.taken().count("register") <= 12
    running.cancel()
    await asyncio.wait([running])


async def test_events_that_outgrow_the_pool_are_dropped_for_a_full_report(
    index: WatchedIndex, clock: ManualClock
) -> None:
    pool = Pool()
    announcer = announcer_of(index, pool, clock)
    await announcer.step()
    index.lose = "request"
    for _ in range(MAX_BATCH_EVENTS):
        pool.store(1)
        pool.remove(1)
        await announcer.step()
    assert announcer.num_pending <= 1
    pool.store(8)
    index.lose = None
    await announcer.step()
    assert index.taken() == ["register", "register", "publish 1+1"]
    assert await index.longest([block(8)]) == {"w0": 1}


async def test_a_large_pool_is_published_in_parts_that_do_not_cost_the_lease(
    index: WatchedIndex, clock: ManualClock
) -> None:
    pool = Pool()
    pool.store(*range(2 * MAX_BATCH_EVENTS + 5))
    await announcer_of(index, pool, clock).step()
    assert index.taken() == ["register", "publish 1+1024", "publish 1025+1024", "publish 2049+5"]


async def test_a_fenced_worker_stops_by_itself(index: WatchedIndex, clock: ManualClock) -> None:
    pool = Pool()
    announcer = announcer_of(index, pool, clock, epoch=1)
    running = asyncio.create_task(announcer.run())
    await clock.run(0.1)
    await index.register(worker(epoch=2), 5.0)
    await index.publish("w0", 2, stored(1))
    await clock.run(1.5)
    assert running.done() and running.exception() is None
    assert announcer.state is AnnouncerState.FENCED
    assert await index.longest([block(1)]) == {"w0": 1}


async def test_an_unreachable_index_is_never_raised(
    index: WatchedIndex, clock: ManualClock
) -> None:
    index.lose = "request"
    announcer = announcer_of(index, Pool(), clock)
    running = asyncio.create_task(announcer.run())
    await clock.run(10.0)
    assert not running.done()
    assert announcer.num_failures == pytest.approx(20, abs=1)
    index.lose = None
    await clock.run(1.0)
    assert (await index.survey()).members["w0"].residency == EMPTY
    running.cancel()
    await asyncio.wait([running])
