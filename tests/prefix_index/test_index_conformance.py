"""What every prefix index promises, over each implementation and each server."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from prefix_index.index import (
    EMPTY,
    UNPROVEN,
    Cursor,
    EntriesCleared,
    EntriesPublished,
    IndexUnavailable,
    OutOfStep,
    PrefixIndex,
    Residency,
    StaleEpoch,
    Stored,
    Tier,
    WorkerGone,
    WorkerRegistered,
    fingerprint,
)
from tests.prefix_index.samples import IDLE, block, blocks, removed, stored, worker

LEASE_S = 5.0
START = Cursor((0, 0))


async def test_epochs_of_a_name_only_grow(index: PrefixIndex) -> None:
    first = await index.next_epoch("w0")
    assert await index.next_epoch("w0") == first + 1
    assert await index.next_epoch("w0") == first + 2
    assert await index.next_epoch("w1") > 0


async def test_a_registered_worker_is_listed_with_its_whole_record(index: PrefixIndex) -> None:
    await index.register(worker("w1"), LEASE_S)
    await index.register(worker("w0"), LEASE_S)
    assert await index.workers() == [worker("w0"), worker("w1")]


async def test_a_worker_holds_nothing_at_first(index: PrefixIndex) -> None:
    assert await index.register(worker(), LEASE_S) == EMPTY
    assert await index.longest(blocks([1, 2])) == {"w0": 0}


async def test_only_the_run_from_the_first_block_on_counts(index: PrefixIndex) -> None:
    for name in ("w0", "w1", "w2"):
        await index.register(worker(name), LEASE_S)
    await index.publish("w0", 1, stored(1, 2, 3, 5))
    await index.publish("w1", 1, stored(2, 3, 4))
    assert await index.longest(blocks([1, 2, 3, 4, 5])) == {"w0": 3, "w1": 0, "w2": 0}
    assert await index.longest(blocks([2, 3])) == {"w0": 2, "w1": 2, "w2": 0}
    assert await index.longest([]) == {"w0": 0, "w1": 0, "w2": 0}


async def test_a_long_prefix_is_found_to_its_end(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(*range(300)))
    assert await index.longest(blocks(range(512))) == {"w0": 300}
    assert await index.longest(blocks(range(300))) == {"w0": 300}


async def test_a_removed_block_ends_the_prefix(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1, 2, 3))
    await index.publish("w0", 1, removed(2))
    assert await index.longest(blocks([1, 2, 3])) == {"w0": 1}
    await index.publish("w0", 1, [*stored(2), *removed(3), *stored(3)])
    assert await index.longest(blocks([1, 2, 3])) == {"w0": 3}


async def test_removing_an_absent_block_does_not_stop_the_rest(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, [*stored(1), *removed(99), *stored(2)])
    assert await index.longest(blocks([1, 2])) == {"w0": 2}


async def test_a_repeated_publish_changes_nothing(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1, 2), sequence=1)
    await index.publish("w0", 1, removed(1), sequence=3)
    await index.publish("w0", 1, stored(1, 2), sequence=1)
    assert await index.longest(blocks([2])) == {"w0": 1}
    assert await index.longest(blocks([1])) == {"w0": 0}


async def test_a_publish_that_overlaps_applies_only_its_new_part(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, [*stored(1), *removed(1)], sequence=1)
    await index.publish("w0", 1, [*stored(1), *removed(1), *stored(2)], sequence=1)
    assert await index.heartbeat("w0", 1, IDLE, LEASE_S) == Residency(
        sequence=3, fingerprint=fingerprint(blocks([2])), num_blocks=1
    )


async def test_what_a_caller_thinks_it_knows_is_checked(index: PrefixIndex) -> None:
    """Right or wrong, out of date or repeated: the fingerprint is that of what is there."""
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1, 2), 1, known=EMPTY)
    await index.publish("w0", 1, stored(1, 2), 1, known=EMPTY)  # its answer was lost
    held = (await index.survey()).members["w0"].residency
    assert held == Residency(2, fingerprint(blocks([1, 2])), 2)
    wrong = Residency(2, fingerprint(blocks([9])), 1)
    await index.publish("w0", 1, [*stored(2, 3), *removed(9)], 3, known=wrong)
    held = (await index.survey()).members["w0"].residency
    assert held == Residency(5, fingerprint(blocks([1, 2, 3])), 3)
    await index.publish("w0", 1, [*removed(1), *stored(4)], 6, known=held)
    held = (await index.survey()).members["w0"].residency
    assert held == Residency(7, fingerprint(blocks([2, 3, 4])), 3)


async def test_a_missing_event_is_refused(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1), sequence=1)
    with pytest.raises(OutOfStep, match="event 4 came after event 1: 2 missing"):
        await index.publish("w0", 1, stored(4), sequence=4)
    assert await index.longest(blocks([4])) == {"w0": 0}


async def test_a_heartbeat_tells_what_the_index_holds(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, [*stored(1, 2, 3, 3), *removed(2, 2)])
    await index.publish("w0", 1, [*stored(1), *removed(9)])
    assert await index.heartbeat("w0", 1, IDLE, LEASE_S) == Residency(
        sequence=8, fingerprint=fingerprint(blocks([3, 1])), num_blocks=2
    )


async def test_a_heartbeat_reports_the_load(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    busy = replace(IDLE, running=7, queued_tokens=900, draining=True)
    await index.heartbeat("w0", 1, busy, LEASE_S)
    assert [record.load for record in await index.workers()] == [busy]


async def test_a_heartbeat_of_an_unknown_worker_says_so(index: PrefixIndex) -> None:
    assert await index.heartbeat("w0", 1, IDLE, LEASE_S) is None


async def test_publishing_without_registration_is_refused(index: PrefixIndex) -> None:
    with pytest.raises(OutOfStep, match="w0: epoch 1 is not registered"):
        await index.publish("w0", 1, stored(1))
    with pytest.raises(OutOfStep, match="w0: epoch 1 is not registered"):
        await index.clear("w0", 1)


async def test_a_lapsed_lease_hides_the_worker_and_its_blocks(index: PrefixIndex) -> None:
    await index.register(worker("w0"), lease_s=0.05)
    await index.register(worker("w1"), LEASE_S)
    await index.publish("w0", 1, stored(1))
    await asyncio.sleep(0.1)
    assert [record.name for record in await index.workers()] == ["w1"]
    assert await index.longest(blocks([1])) == {"w1": 0}
    assert (await index.survey()).expired == {"w0"}
    assert await index.heartbeat("w0", 1, IDLE, LEASE_S) is None


async def test_a_worker_that_was_only_slow_finds_its_blocks_again(index: PrefixIndex) -> None:
    await index.register(worker(), lease_s=0.05)
    await index.publish("w0", 1, stored(1, 2))
    await asyncio.sleep(0.1)
    assert await index.register(worker(), LEASE_S) == Residency(
        sequence=2, fingerprint=fingerprint(blocks([1, 2])), num_blocks=2
    )
    assert await index.longest(blocks([1, 2])) == {"w0": 2}


async def test_a_new_life_is_credited_with_nothing_of_the_old_one(index: PrefixIndex) -> None:
    """Same name, same address, the event sequence starts at 0 again."""
    await index.register(worker(epoch=1), LEASE_S)
    await index.publish("w0", 1, stored(1, 2, 3))
    assert await index.register(worker(epoch=2), LEASE_S) == EMPTY
    assert await index.longest(blocks([1, 2, 3])) == {"w0": 0}
    await index.publish("w0", 2, stored(1), sequence=1)
    assert await index.longest(blocks([1, 2, 3])) == {"w0": 1}
    assert [record.instance for record in await index.workers()] == ["w0-2"]


async def test_an_old_life_is_refused_whatever_it_does(index: PrefixIndex) -> None:
    await index.register(worker(epoch=1), LEASE_S)
    await index.register(worker(epoch=2), LEASE_S)
    await index.publish("w0", 2, stored(1))
    attempts: list[Callable[[], Awaitable[object]]] = [
        lambda: index.publish("w0", 1, stored(9)),
        lambda: index.clear("w0", 1),
        lambda: index.heartbeat("w0", 1, IDLE, LEASE_S),
        lambda: index.register(worker(epoch=1), LEASE_S),
    ]
    for attempt in attempts:
        with pytest.raises(StaleEpoch, match="w0: epoch 1 has been followed by epoch 2"):
            await attempt()
    await index.deregister("w0", 1)
    assert await index.longest(blocks([1])) == {"w0": 1}
    assert await index.longest(blocks([9])) == {"w0": 0}


async def test_asking_for_an_epoch_fences_the_life_before(index: PrefixIndex) -> None:
    first = await index.next_epoch("w0")
    await index.register(worker(epoch=first), LEASE_S)
    await index.next_epoch("w0")
    with pytest.raises(StaleEpoch):
        await index.publish("w0", first, stored(1))


async def test_a_cleared_worker_holds_nothing_and_others_keep_theirs(index: PrefixIndex) -> None:
    for name in ("w0", "w1"):
        await index.register(worker(name), LEASE_S)
        await index.publish(name, 1, stored(1, 2))
    assert await index.clear("w0", 1) == 2
    assert await index.clear("w0", 1) == 0
    assert await index.longest(blocks([1, 2])) == {"w0": 0, "w1": 2}
    assert await index.heartbeat("w0", 1, IDLE, LEASE_S) == replace(EMPTY, sequence=4)


async def test_a_clear_from_the_past_is_refused(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1, 2))
    with pytest.raises(OutOfStep, match="w0: clear 2 came after event 2"):
        await index.clear("w0", 1, sequence=2)
    assert await index.clear("w0", 1, sequence=3) == 2
    await index.publish("w0", 1, stored(5), sequence=4)
    assert await index.longest(blocks([5])) == {"w0": 1}


async def test_a_deregistered_worker_leaves_nothing(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1))
    await index.deregister("w0", 1)
    assert await index.workers() == []
    assert await index.holdings("w0") is None
    survey = await index.survey()
    assert (dict(survey.members), survey.expired) == ({}, frozenset())
    assert await index.register(worker(), LEASE_S) == EMPTY


async def test_a_survey_tells_each_worker_s_residency(index: PrefixIndex) -> None:
    await index.register(worker("w0"), LEASE_S)
    await index.register(worker("w1"), LEASE_S)
    await index.publish("w1", 1, stored(1, 2))
    members = (await index.survey()).members
    assert members["w0"].residency == EMPTY
    assert members["w1"].residency == Residency(2, fingerprint(blocks([1, 2])), 2)
    assert members["w1"].record == worker("w1")


async def test_holdings_are_all_of_one_worker(index: PrefixIndex) -> None:
    await index.register(worker("w0"), LEASE_S)
    await index.register(worker("w1"), LEASE_S)
    await index.publish("w0", 1, stored(*range(2500)))
    await index.publish("w1", 1, stored(7))
    holdings = await index.holdings("w0")
    assert holdings is not None
    assert (holdings.epoch, holdings.sequence, holdings.settled) == (1, 2500, 2500)
    assert {entry.name for entry in holdings.entries} == set(blocks(range(2500)))


async def test_an_entry_has_a_tier_and_a_depth(index: PrefixIndex) -> None:
    await index.register(worker("w0"), LEASE_S)
    near = Stored(block(1), None, 0, Tier.DEVICE)
    far, farther = (Stored(block(n), None, depth, Tier.HOST) for n, depth in ((2, 1), (3, 70_000)))
    await index.publish("w0", 1, [near, Stored(block(2), None, 1), farther])
    await index.publish("w0", 1, [far])  # it has moved
    holdings = await index.holdings("w0")
    assert holdings is not None
    assert sorted(holdings.entries, key=lambda entry: entry.name) == [near, far, farther]
    assert await index.longest(blocks([1, 2, 3])) == {"w0": 3}
    assert (await index.survey()).members["w0"].residency == Residency(
        4, fingerprint(blocks([1, 2, 3])), 3
    )
    *_, moved = (await index.follow(START, wait_s=0.01)).changes
    assert moved == EntriesPublished("w0", 1, 4, (far,))


async def test_followers_see_every_change_in_order(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, [*stored(1), *removed(2)])
    await index.clear("w0", 1)
    await index.deregister("w0", 1)
    assert (await index.follow(START, wait_s=0.01)).changes == (
        WorkerRegistered(worker(), EMPTY),
        EntriesPublished("w0", 1, 1, (*stored(1), *removed(2))),
        EntriesCleared("w0", 1, 3),
        WorkerGone("w0", 1),
    )


async def test_following_goes_on_where_it_left_off(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    first = await index.follow(START, wait_s=0.01)
    assert first.cursor == (await index.survey()).cursor
    assert (await index.follow(first.cursor, wait_s=0.01)).changes == ()
    await index.publish("w0", 1, stored(1))
    second = await index.follow(first.cursor, wait_s=0.01)
    assert second.changes == (EntriesPublished("w0", 1, 1, tuple(stored(1))),)
    assert second.cursor > first.cursor


async def test_a_waiting_follower_is_woken(open_index: Callable[[], PrefixIndex]) -> None:
    worker_side, router_side = open_index(), open_index()
    waiting = asyncio.create_task(router_side.follow(START, wait_s=5.0))
    await asyncio.sleep(0.05)
    await worker_side.register(worker(), LEASE_S)
    async with asyncio.timeout(1.0):
        assert (await waiting).changes == (WorkerRegistered(worker(), EMPTY),)


async def test_two_who_publish_at_once_overwrite_nothing(
    open_index: Callable[[], PrefixIndex],
) -> None:
    await open_index().register(worker(), LEASE_S)

    async def publish_all(numbers: range) -> None:
        index = open_index()
        for number in numbers:
            while True:
                try:
                    await index.publish("w0", 1, stored(number))
                    break
                except IndexUnavailable:
                    await asyncio.sleep(0)

    await asyncio.gather(publish_all(range(20)), publish_all(range(20, 40)))
    assert await open_index().heartbeat("w0", 1, IDLE, LEASE_S) == Residency(
        sequence=40, fingerprint=fingerprint(blocks(range(40))), num_blocks=40
    )


async def test_a_doubted_worker_learns_of_it_and_mends_it(index: PrefixIndex) -> None:
    await index.register(worker(), LEASE_S)
    await index.publish("w0", 1, stored(1))
    await index.doubt("w0", 1)
    assert await index.heartbeat("w0", 1, IDLE, LEASE_S) == Residency(1, UNPROVEN, 1)
    await index.publish("w0", 1, stored(2))
    assert await index.heartbeat("w0", 1, IDLE, LEASE_S) == Residency(2, UNPROVEN, 2)
    await index.clear("w0", 1)
    await index.publish("w0", 1, stored(1))
    assert await index.heartbeat("w0", 1, IDLE, LEASE_S) == Residency(
        4, fingerprint(blocks([1])), 1
    )


async def test_a_name_may_be_any_text(index: PrefixIndex) -> None:
    names = ["a:1", "a", "präfix w\N{GRINNING FACE}", "x" * 200]
    for name in names:
        await index.register(worker(name), LEASE_S)
        await index.publish(name, 1, stored(1))
    assert await index.longest([block(1)]) == dict.fromkeys(names, 1)
