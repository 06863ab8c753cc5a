"""A pool beside a naive one, through any history."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.block_hash import BlockHash
from kvcache.block_pool import BlockPool, OutOfBlocks, Stored
from tests.kvcache.chains import chain
from tests.kvcache.naive_pool import NaivePool


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
