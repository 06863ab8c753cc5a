"""What a router sees through its mirror, and when it stops believing it."""

import asyncio

import pytest

from engine.clock import ManualClock
from prefix_index.index import (
    UNPROVEN,
    Changes,
    Cursor,
    IndexUnavailable,
    Residency,
    Stored,
    Survey,
    WorkerRegistered,
    fingerprint,
)
from prefix_index.memory_index import MemoryIndex
from prefix_index.mirror import Mirror
from tests.prefix_index.samples import block, blocks, removed, stored, worker

LEASE_S = 5.0


class WatchedIndex(MemoryIndex):
    """Counts what mirrors read, never waits for changes, and can be made unreachable."""

    def __init__(self, clock: ManualClock, max_changes: int = 4096) -> None:
        super().__init__(clock, max_changes=max_changes)
        self.unreachable = False
        self.swallow: type | None = None  # changes of this kind do not arrive

    async def survey(self) -> Survey:
        self._refuse()
        return await super().survey()

    async def follow(self, cursor: Cursor, wait_s: float) -> Changes:
        self._refuse()
        news = await super().follow(cursor, 0)
        swallow = self.swallow or ()
        return Changes(news.cursor, tuple(c for c in news.changes if not isinstance(c, swallow)))

    def demote(self, name: str, residency: Residency, *numbers: int) -> None:
        """Hold and claim this from now on, whatever was held and claimed before."""
        self._lives[name].residency = residency
        self._lives[name].entries = {
            block(number): Stored(block(number), None) for number in numbers
        }

    def forget_everything(self) -> None:
        self._lives.clear()
        self._changes.clear()
        self._num_changes = 0

    def _refuse(self) -> None:
        if self.unreachable:
            raise IndexUnavailable("out of reach")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def index(clock: ManualClock) -> WatchedIndex:
    return WatchedIndex(clock)


@pytest.fixture
def mirror(index: WatchedIndex, clock: ManualClock) -> Mirror:
    return Mirror(index, clock)


async def look(mirror: Mirror, clock: ManualClock) -> None:
    """A second passes: the changes are read, then the index is surveyed."""
    await mirror.step()
    clock.advance(1.0)
    await mirror.step()
    mirror.check()


async def test_it_answers_before_it_has_ever_seen_the_index(mirror: Mirror) -> None:
    assert (mirror.ready, mirror.workers()) == (False, ())
    assert mirror.longest([block(1)]) == {}
    assert mirror.age_s == float("inf")


async def test_it_starts_with_what_is_there(index: WatchedIndex, mirror: Mirror) -> None:
    await index.register(worker("w0"), LEASE_S)
    await index.register(worker("w1"), LEASE_S)
    await index.publish("w0", 1, stored(*range(5000)))
    await mirror.step()
    assert mirror.ready
    assert mirror.workers() == (worker("w0"), worker("w1"))
    assert mirror.longest(blocks(range(6000))) == {"w0": 5000, "w1": 0}


async def test_it_follows_changes_between_surveys(index: WatchedIndex, mirror: Mirror) -> None:
    await mirror.step()
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, [*stored(1, 2, 3), *removed(2)])
    await mirror.step()
    assert mirror.longest(blocks([1, 2])) == {"w0": 1}
    await index.publish("w0", 1, stored(2))
    await mirror.step()
    assert mirror.longest(blocks([1, 2, 3])) == {"w0": 3}
    await index.clear("w0", 1)
    await mirror.step()
    assert mirror.longest(blocks([1])) == {"w0": 0}
    await index.deregister("w0", 1)
    await mirror.step()
    assert mirror.longest(blocks([1])) == {}
    assert mirror.counts.reloads == 0


async def test_a_new_life_is_seen_and_its_predecessor_forgotten_in_one_moment(
    index: WatchedIndex, mirror: Mirror
) -> None:
    """Whenever the new record shows, nothing of the old life is credited to it."""
    await index.register(worker(epoch=1), LEASE_S)
    await index.publish("w0", 1, stored(1, 2))
    await mirror.step()
    await index.register(worker(epoch=2), LEASE_S)
    assert (mirror.workers()[0].epoch, mirror.longest(blocks([1, 2]))) == (1, {"w0": 2})
    await mirror.step()
    assert (mirror.workers()[0].epoch, mirror.longest(blocks([1, 2]))) == (2, {"w0": 0})


async def test_a_new_life_whose_registration_was_missed_is_found_by_the_survey(
    index: WatchedIndex, mirror: Mirror, clock: ManualClock
) -> None:
    await index.register(worker(epoch=1), LEASE_S)
    await index.publish("w0", 1, stored(1, 2))
    await mirror.step()
    index.swallow = WorkerRegistered
    await index.register(worker(epoch=2), LEASE_S)
    await index.publish("w0", 2, stored(7))
    await mirror.step()
    await mirror.step()
    assert mirror.workers()[0].epoch == 2
    assert mirror.longest(blocks([1, 2])) == {"w0": 0}
    assert mirror.longest(blocks([7])) == {"w0": 1}


async def test_a_gap_makes_it_read_that_worker_again_and_no_other(clock: ManualClock) -> None:
    index = WatchedIndex(clock, max_changes=1)
    mirror = Mirror(index, clock)
    await index.register(worker("w0"), LEASE_S)
    await index.register(worker("w1"), LEASE_S)
    await mirror.step()
    before = mirror.counts.reloads
    await index.publish("w0", 1, stored(1))
    await index.publish("w0", 1, stored(2))
    await mirror.step()
    assert mirror.longest(blocks([1, 2])) == {"w0": 2, "w1": 0}
    assert (mirror.counts.gaps, mirror.counts.reloads - before) == (1, 1)


async def test_changes_that_never_arrive_are_noticed_within_two_surveys(
    index: WatchedIndex, mirror: Mirror, clock: ManualClock
) -> None:
    await index.register(worker(), LEASE_S)
    await mirror.step()
    index.swallow = object
    await index.publish("w0", 1, stored(1))
    await look(mirror, clock)
    await look(mirror, clock)
    assert mirror.longest([block(1)]) == {"w0": 1}


async def test_an_index_that_lost_its_last_writes_is_followed_back(
    index: WatchedIndex, mirror: Mirror, clock: ManualClock
) -> None:
    """A failover to a replica that had not seen the last events."""
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1))
    before = (await index.survey()).members["w0"].residency
    await index.publish("w0", 1, stored(2))
    await look(mirror, clock)
    assert mirror.longest(blocks([1, 2])) == {"w0": 2}
    index.demote("w0", before, 1)
    await look(mirror, clock)
    assert mirror.longest(blocks([1, 2])) == {"w0": 1}


async def test_a_worker_whose_entries_contradict_their_fingerprint_is_not_believed(
    index: WatchedIndex, mirror: Mirror
) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1, 2))
    claimed = (await index.survey()).members["w0"].residency
    index.demote("w0", claimed, 1, 9)
    await mirror.step()
    assert mirror.longest(blocks([1, 2])) == {"w0": 0}
    assert mirror.counts.doubts == 1
    answered = await index.heartbeat("w0", 1, worker().load, LEASE_S)
    assert answered is not None and answered.fingerprint == UNPROVEN


async def test_other_blocks_than_the_index_has_are_noticed_at_the_next_survey(
    index: WatchedIndex, mirror: Mirror, clock: ManualClock
) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1, 2))
    await mirror.step()
    await index.publish("w0", 1, stored(3))
    await mirror.step()
    other = Residency(3, fingerprint(blocks([1, 4])), 2)
    index.demote("w0", other, 1, 4)
    await look(mirror, clock)
    assert mirror.longest(blocks([1, 4])) == {"w0": 2}
    assert mirror.counts.doubts == 0


async def test_a_stream_that_begins_anew_is_followed_from_its_beginning(
    index: WatchedIndex, mirror: Mirror, clock: ManualClock
) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1))
    await look(mirror, clock)
    index.forget_everything()
    await look(mirror, clock)
    reloads = mirror.counts.reloads
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(5))
    await mirror.step()
    assert mirror.longest([block(5)]) == {"w0": 1}
    assert mirror.counts.reloads == reloads


async def test_a_lapsed_lease_removes_the_worker_at_the_next_survey(
    index: WatchedIndex, mirror: Mirror, clock: ManualClock
) -> None:
    await index.register(worker("w0"), LEASE_S)
    await index.register(worker("w1"), 3600.0)
    await mirror.step()
    for _ in range(4):
        await look(mirror, clock)
        assert mirror.workers() == (worker("w0"), worker("w1"))
    await look(mirror, clock)
    assert mirror.workers() == (worker("w1"),)


async def test_leases_that_nobody_could_renew_are_not_held_against_the_workers(
    index: WatchedIndex, mirror: Mirror, clock: ManualClock
) -> None:
    """Redis hung for longer than a lease, and is asked before the workers are back."""
    await index.register(worker("w0"), LEASE_S)
    await index.register(worker("w1"), LEASE_S)
    await mirror.step()
    clock.advance(30.0)
    await look(mirror, clock)
    assert mirror.workers() == (worker("w0"), worker("w1"))
    await index.register(worker("w0"), 3600.0)
    for _ in range(5):
        await look(mirror, clock)
    assert mirror.workers() == (worker("w0"),)


async def test_workers_survive_a_wiped_store_for_a_while(
    index: WatchedIndex, mirror: Mirror, clock: ManualClock
) -> None:
    """They are alive, only unknown; requests must go on reaching them."""
    await index.register(worker("w0"), LEASE_S)
    await index.publish("w0", 1, stored(1))
    await index.register(worker("w1"), LEASE_S)
    await mirror.step()
    index.forget_everything()
    for _ in range(4):
        await look(mirror, clock)
        assert mirror.longest([block(1)]) == {"w0": 1, "w1": 0}
    await index.register(worker("w0"), LEASE_S)
    await look(mirror, clock)
    await look(mirror, clock)
    assert mirror.longest([block(1)]) == {"w0": 0}


async def test_an_unreachable_index_leaves_the_answers_as_they_are(
    index: WatchedIndex, mirror: Mirror, clock: ManualClock
) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1, 2))
    running = asyncio.create_task(mirror.run())
    await clock.run(0.5)
    index.unreachable = True
    await clock.run(60.0)
    assert not running.done()
    assert mirror.longest(blocks([1, 2])) == {"w0": 2}
    assert mirror.age_s == pytest.approx(60.0, abs=1.1)
    index.unreachable = False
    await index.register(worker(), LEASE_S)
    await clock.run(1.0)
    assert mirror.age_s <= 1.0
    running.cancel()
    await asyncio.wait([running])
    assert mirror.counts.failures == pytest.approx(120, abs=3)


async def test_two_mirrors_of_one_index_agree(index: WatchedIndex, clock: ManualClock) -> None:
    mirrors = [Mirror(index, clock), Mirror(index, clock)]
    await index.register(worker("w0"), LEASE_S)
    await mirrors[0].step()
    await index.publish("w0", 1, stored(1, 2))
    await index.register(worker("w1"), LEASE_S)
    await mirrors[0].step()
    await mirrors[1].step()
    assert mirrors[0].workers() == mirrors[1].workers() == (worker("w0"), worker("w1"))
    names = blocks([1, 2])
    assert mirrors[0].longest(names) == mirrors[1].longest(names) == {"w0": 2, "w1": 0}
