from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.block_hash import PUBLIC, BlockHash, Namespace, name_blocks
from kvcache.block_pool import BlockPool, OutOfBlocks, Removed, Stored
from tests.kvcache.naive_pool import NaivePool

SPACE = Namespace(bytes(32))


def chain(*tokens: int) -> list[BlockHash]:
    """The names of a prompt of one-token blocks."""
    return name_blocks(SPACE, PUBLIC, tokens, block_size=1)


def name_all(pool: BlockPool, block_ids: list[int], names: list[BlockHash]) -> list[bool]:
    parents = [None, *names[:-1]]
    return [
        pool.name(block_id, name, parent)
        for block_id, name, parent in zip(block_ids, names, parents, strict=True)
    ]


def cache(pool: BlockPool, names: list[BlockHash]) -> list[int]:
    """Compute, name and let go of a chain; what is resident of it is shared."""
    block_ids = pool.share(names)
    block_ids += pool.take(len(names) - len(block_ids))
    name_all(pool, block_ids, names)
    pool.release(reversed(block_ids))
    pool.check()
    return block_ids


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


def test_promised_blocks_are_out_of_reach_and_still_cache() -> None:
    pool = BlockPool(num_blocks=4)
    names = chain(1, 2, 3)
    cache(pool, names)
    pool.promise(3)
    assert (pool.num_available, pool.num_free, pool.num_cached, pool.num_used) == (1, 1, 3, 0)
    assert pool.match(names) == 3
    with pytest.raises(OutOfBlocks, match="need 2 blocks, 1 available"):
        pool.take(2)
    with pytest.raises(OutOfBlocks, match="need 3 blocks, 1 available"):
        pool.share(names)
    assert pool.share(names[:1]) == [0]
    with pytest.raises(OutOfBlocks, match="need 1 blocks, 0 available"):
        pool.promise(1)
    assert pool.take(2, promised=2) == [3, 2]
    pool.unpromise(1)
    assert (pool.num_available, pool.num_promised) == (1, 0)
    pool.check()


def test_a_hit_in_use_by_another_owner_costs_no_promise() -> None:
    pool = BlockPool(num_blocks=3)
    names = chain(1, 2)
    cache(pool, names)
    pool.share(names)
    pool.promise(1)
    assert pool.num_available == 0
    assert pool.share(names) == [0, 1]
    pool.check()


def test_a_promised_block_is_there_for_a_copy_on_write() -> None:
    pool = BlockPool(num_blocks=2)
    (shared,) = pool.take(1)
    pool.fork([shared])
    pool.promise(1)
    with pytest.raises(OutOfBlocks):
        pool.writable(shared)
    assert pool.writable(shared, promised=1) == (1, True)
    assert pool.num_promised == 0
    assert pool.writable(shared) == (shared, False)
    pool.check()


@dataclass
class Request:
    tokens: tuple[int, ...]
    names: list[BlockHash]
    block_ids: list[int] = field(default_factory=list)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


class AnyHistory(RuleBasedStateMachine):
    """Requests over a tiny pool and a tiny alphabet, beside the naive pool and a remote index."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=7)
        self.naive = NaivePool(num_blocks=7)
        self.requests: list[Request] = []
        self.promises: list[int] = []
        self.remote: dict[BlockHash, BlockHash | None] = {}

    @rule(tokens=PROMPTS, look_up=st.booleans(), num_named=st.integers(0, 5))
    def start(self, tokens: list[int], look_up: bool, num_named: int) -> None:
        request = Request(tuple(tokens), chain(*tokens))
        if look_up:
            matched = self.pool.match(request.names)
            if self.naive.num_cached_of(request.names[:matched]) > self.available():
                with pytest.raises(OutOfBlocks):
                    self.pool.share(request.names)
                return
            request.block_ids = self.pool.share(request.names)
            assert request.block_ids == self.naive.share(request.names)
            assert len(request.block_ids) == matched
        missing = len(tokens) - len(request.block_ids)
        if missing > self.available():
            with pytest.raises(OutOfBlocks):
                self.pool.take(missing)
            self.pool.release(reversed(request.block_ids))
            self.naive.release(reversed(request.block_ids))
            return
        taken = self.pool.take(missing)
        assert taken == self.naive.take(missing)
        request.block_ids += taken
        self.requests.append(request)
        self.name(request, num_named)

    def available(self) -> int:
        return self.naive.available() - sum(self.promises)

    @rule(count=st.integers(0, 7))
    def promise(self, count: int) -> None:
        if count > self.available():
            with pytest.raises(OutOfBlocks):
                self.pool.promise(count)
            return
        self.pool.promise(count)
        self.promises.append(count)

    @precondition(lambda self: self.promises)
    @rule(choice=st.integers(0, 99))
    def unpromise(self, choice: int) -> None:
        self.pool.unpromise(self.promises.pop(choice % len(self.promises)))

    @precondition(lambda self: self.promises)
    @rule(choice=st.integers(0, 99), tokens=PROMPTS, num_named=st.integers(0, 5))
    def bind(self, choice: int, tokens: list[int], num_named: int) -> None:
        """Of what was promised, some; never fails. The rest is given up."""
        promised = self.promises.pop(choice % len(self.promises))
        request = Request(tuple(tokens), chain(*tokens))
        count = min(promised, len(tokens))
        request.block_ids = self.pool.take(count, promised=count)
        self.pool.unpromise(promised - count)
        assert request.block_ids == self.naive.take(count)
        if request.block_ids:
            self.requests.append(request)
            self.name(request, num_named)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 99))
    def name_all(self, choice: int) -> None:
        self.name(self.requests[choice % len(self.requests)], 5)

    def name(self, request: Request, count: int) -> None:
        parents = [None, *request.names]
        for block_id, name, parent in list(
            zip(request.block_ids, request.names, parents, strict=False)
        )[:count]:
            if self.naive.name_of(block_id) in (None, name):
                borne = self.pool.name(block_id, name, parent)
                self.naive.name(block_id, name, parent)
                assert borne == (self.naive.name_of(block_id) == name)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 99))
    def fork(self, choice: int) -> None:
        request = self.requests[choice % len(self.requests)]
        self.pool.fork(request.block_ids)
        for block_id in request.block_ids:
            self.naive.owners[block_id] += 1
        self.requests.append(Request(request.tokens, request.names, list(request.block_ids)))

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 99))
    def write_last(self, choice: int) -> None:
        request = self.requests[choice % len(self.requests)]
        block_id = request.block_ids[-1]
        alone = self.naive.owners[block_id] == 1 and self.naive.name_of(block_id) is None
        if not alone and not self.available():
            with pytest.raises(OutOfBlocks):
                self.pool.writable(block_id)
            return
        fresh, must_copy = self.pool.writable(block_id)
        assert (fresh, must_copy) == self.naive.writable(block_id)
        assert must_copy != alone
        request.block_ids[-1] = fresh

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 99), forwards=st.booleans())
    def finish(self, choice: int, forwards: bool) -> None:
        request = self.requests.pop(choice % len(self.requests))
        block_ids = request.block_ids if forwards else request.block_ids[::-1]
        self.pool.release(block_ids)
        self.naive.release(block_ids)

    @rule()
    def publish(self) -> None:
        for event in self.pool.drain_events():
            if isinstance(event, Stored):
                assert event.name not in self.remote
                assert event.parent is None or event.parent in self.remote
                self.remote[event.name] = event.parent
            else:
                assert event.name not in self.remote.values(), "removed before its child"
                del self.remote[event.name]
        assert self.remote == {n: e.parent for n, e in self.naive.names.items()}

    @rule()
    def flush(self) -> None:
        cached = len(self.naive.cached())
        assert self.pool.flush() == cached
        assert self.pool.num_cached == 0
        while self.naive.cached():
            self.naive.forget(next(iter(self.naive.cached())))
        assert set(self.pool._free) == set(self.naive.free)
        self.naive.free = list(self.pool._free)  # the order in which a flush frees is its own

    @precondition(lambda self: self.naive.names)
    @rule(number=st.integers(0, 40))
    def disown(self, number: int) -> None:
        name = sorted(self.naive.names)[number % len(self.naive.names)]
        block_id, before = self.naive.names[name].block_id, len(self.naive.names)
        assert self.pool.disown(name, (block_id + 1) % 7) == 0
        num_gone = self.pool.disown(name, block_id)
        self.naive.forget(name)
        assert num_gone == before - len(self.naive.names)
        assert set(self.pool._free) == set(self.naive.free)
        self.naive.free = list(self.pool._free)  # so is that of this one

    @invariant()
    def the_books_balance_and_equal_the_naive_ones(self) -> None:
        self.pool.check()
        assert set(self.pool.resident()) == set(self.naive.names)
        assert list(self.pool._free) == self.naive.free
        assert self.pool.num_cached == len(self.naive.cached())
        assert self.pool.num_available == self.available() >= 0
        assert self.pool.num_promised == sum(self.promises)
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == 7

    @invariant()
    def residency_has_no_holes(self) -> None:
        resident = set(self.pool.resident())
        for entry in self.pool.resident_blocks():
            assert entry.parent is None or entry.parent in resident


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
