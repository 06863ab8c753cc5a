import pytest

from kvcache.block_hash import BlockHash
from kvcache.block_pool import BlockPool, OutOfBlocks, Removed, Stored
from tests.kvcache.chains import cache, chain, name_all


def test_a_released_prefix_is_found_again_and_its_tail_is_evicted_first() -> None:
    pool = BlockPool(num_blocks=3)
    names = chain(1, 2)
    assert cache(pool, names) == [0, 1]
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 2, 0)
    assert pool.share(names) == [0, 1]
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 0, 2)
    pool.release([1, 0])
    assert pool.take(2) == [2, 1]  # the free one, then the tail of the cached chain
    assert pool.match(names) == 1
    pool.check()


def test_old_chains_go_whole_before_newer_ones_are_touched() -> None:
    pool = BlockPool(num_blocks=6)
    old, new = chain(1, 2, 3), chain(7, 8, 9)
    assert cache(pool, old) == [0, 1, 2]
    assert cache(pool, new) == [3, 4, 5]
    taken = pool.take(4)
    assert taken == [2, 1, 0, 5]
    assert (pool.match(old), pool.match(new)) == (0, 2)


def test_a_hit_makes_a_chain_young_again() -> None:
    pool = BlockPool(num_blocks=4)
    first, second = chain(1, 2), chain(7, 8)
    cache(pool, first)
    cache(pool, second)
    cache(pool, first)
    pool.take(2)
    assert (pool.match(first), pool.match(second)) == (2, 0)


def test_a_fork_of_two_chains_keeps_their_common_root_to_the_last() -> None:
    pool = BlockPool(num_blocks=4)
    left, right = chain(1, 2), chain(1, 3)
    cache(pool, left)
    cache(pool, right)
    pool.take(1)
    for expected in ((1, 2), (1, 1), (0, 0)):
        pool.take(1)
        assert (pool.match(left), pool.match(right)) == expected
        pool.check()


def test_a_parent_released_before_its_child_still_outlives_it() -> None:
    pool = BlockPool(num_blocks=3)
    names = chain(1, 2, 3)
    block_ids = pool.take(3)
    name_all(pool, block_ids, names)
    pool.release(block_ids)  # first-first, the wrong way round
    for expected in (2, 1, 0):
        pool.take(1)
        assert pool.match(names) == expected
        pool.check()


def test_a_reused_block_loses_its_old_name() -> None:
    pool = BlockPool(num_blocks=4)
    x, y = chain(1, 2), chain(5, 6, 7, 8)
    cache(pool, x)
    block_ids = pool.take(4)
    name_all(pool, block_ids, y)
    assert pool.match(x) == 0
    assert pool.match(y) == 4
    pool.release(reversed(block_ids))
    pool.check()
    assert pool.share(x) == []
    assert cache(pool, x) == [0, 1]  # the tail of y, never a block still named x
    assert pool.match(y) == 2


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_prompts_that_end_on_a_block_border_come_and_go(num_blocks: int) -> None:
    pool = BlockPool(num_blocks=3)
    names = chain(*range(num_blocks))
    for _ in range(3):
        cache(pool, names)
        assert pool.num_available == 3
        assert pool.num_cached == num_blocks


def test_names_alike_in_their_first_fifteen_bytes_are_different_names() -> None:
    pool = BlockPool(num_blocks=2)
    one, other = BlockHash(b"x" * 15 + b"1"), BlockHash(b"x" * 15 + b"2")
    cache(pool, [one])
    assert pool.match([other]) == 0
    assert pool.share([other]) == []


def test_only_the_run_from_the_root_is_shared() -> None:
    pool = BlockPool(num_blocks=4)
    names = chain(1, 2, 3)
    cache(pool, names)
    assert pool.share([names[0], chain(9)[0], names[2]]) == [0]
    assert pool.match([chain(9)[0], *names]) == 0


def test_taking_more_than_there_is_takes_nothing() -> None:
    pool = BlockPool(num_blocks=3)
    cache(pool, chain(1))
    pool.take(1)
    with pytest.raises(OutOfBlocks, match="need 3 blocks, 2 available"):
        pool.take(3)
    assert pool.num_available == 2
    assert pool.match(chain(1)) == 1
    pool.check()


def test_a_shared_block_is_exchanged_before_it_is_written() -> None:
    pool = BlockPool(num_blocks=2)
    (block_id,) = pool.take(1)
    pool.fork([block_id])
    assert pool.writable(block_id) == (1, True)
    assert pool.writable(0) == (0, False)  # the last owner writes in place
    with pytest.raises(OutOfBlocks, match="need 1 blocks, 0 available"):
        pool.take(1)
    pool.check()


def test_four_samples_of_a_prompt_copy_its_open_block_three_times() -> None:
    pool = BlockPool(num_blocks=8)
    full, partial = pool.take(2)
    for _ in range(3):
        pool.fork([full, partial])
    written = [pool.writable(partial) for _ in range(4)]
    assert written == [(2, True), (3, True), (4, True), (1, False)]
    for block_id, _ in written:
        pool.release([block_id, full])
    assert pool.num_free == 8
    pool.check()


def test_a_named_block_is_never_written_in_place_even_by_its_only_owner() -> None:
    pool = BlockPool(num_blocks=2)
    (block_id,) = pool.take(1)
    name_all(pool, [block_id], chain(1))
    assert pool.writable(block_id) == (1, True)
    assert pool.match(chain(1)) == 1
    assert (pool.num_cached, pool.num_used) == (1, 1)


def test_a_write_without_room_changes_nothing() -> None:
    pool = BlockPool(num_blocks=1)
    (block_id,) = pool.take(1)
    pool.fork([block_id])
    with pytest.raises(OutOfBlocks):
        pool.writable(block_id)
    pool.release([block_id, block_id])
    assert pool.num_free == 1
    pool.check()


def test_the_first_block_of_a_name_keeps_it() -> None:
    pool = BlockPool(num_blocks=2)
    first, second = pool.take(2)
    (name,) = chain(1)
    assert pool.name(first, name, None)
    assert not pool.name(second, name, None)
    assert pool.name(first, name, None)
    assert pool.share([name]) == [first]
    pool.release([second])
    assert pool.num_free == 1


def test_a_name_whose_parent_is_not_resident_is_not_taken() -> None:
    pool = BlockPool(num_blocks=2)
    names = chain(1, 2)
    (block_id,) = pool.take(1)
    assert not pool.name(block_id, names[1], names[0])
    assert pool.resident() == []
    assert pool.drain_events() == []


def test_a_cached_parent_of_blocks_in_use_can_be_taken_and_leaves_no_hole() -> None:
    pool = BlockPool(num_blocks=4)
    names = chain(1, 2, 3)
    first = pool.take(1)
    second = pool.take(3)  # computes the same prompt at the same time, and gets further
    assert name_all(pool, first, names[:1]) == [True]
    assert name_all(pool, second, names) == [False, True, True]
    pool.release(first)
    assert pool.match(names) == 3
    assert pool.num_available == 1
    assert pool.take(1) == first
    assert pool.match(names) == 0  # gone from the index; the blocks stay with their owner
    assert pool.num_used == 4
    pool.check()
    pool.release(reversed(second))
    assert pool.num_free == 3


@pytest.mark.parametrize("misuse", ["release", "fork", "name", "writable"])
def test_a_block_nobody_owns_cannot_be_used(misuse: str) -> None:
    pool = BlockPool(num_blocks=1)
    with pytest.raises(AssertionError, match="block 0"):
        match misuse:
            case "release":
                pool.release([0])
            case "fork":
                pool.fork([0])
            case "name":
                pool.name(0, chain(1)[0], None)
            case "writable":
                pool.writable(0)


def test_flush_forgets_what_nobody_uses() -> None:
    pool = BlockPool(num_blocks=5)
    idle, used = chain(1, 2), chain(1, 3)
    cache(pool, idle)
    cache(pool, used)
    held = pool.share(used)
    assert pool.flush() == 1
    pool.check()
    assert (pool.match(idle), pool.match(used)) == (1, 2)
    pool.release(reversed(held))
    assert pool.flush() == 2
    assert (pool.num_free, pool.resident()) == (5, [])
    pool.check()


def test_events_tell_what_changed_and_a_change_undone_is_none() -> None:
    pool = BlockPool(num_blocks=2)
    a, b = chain(1, 2)
    cache(pool, [a, b])
    assert pool.drain_events() == [Stored(a, None, 0), Stored(b, a, 1)]
    assert pool.drain_events() == []
    taken = pool.take(2)
    assert pool.num_events == 2
    assert pool.drain_events() == [Removed(b), Removed(a)]
    name_all(pool, taken[:1], [a])
    pool.release(taken)
    pool.take(2)
    assert pool.drain_events() == []


def test_what_is_resident_can_be_told_anew() -> None:
    pool = BlockPool(num_blocks=3)
    names = chain(1, 2, 3)
    cache(pool, names)
    assert pool.resident() == names
    assert pool.resident_blocks() == [
        Stored(names[0], None, 0),
        Stored(names[1], names[0], 1),
        Stored(names[2], names[1], 2),
    ]


def test_a_long_life_without_evictions_keeps_the_books_small() -> None:
    pool = BlockPool(num_blocks=4)
    for _ in range(1_000):
        cache(pool, chain(1, 2))
    assert len(pool._leaves) <= 8
    assert len(pool.drain_events()) == 2
