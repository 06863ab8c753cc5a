from typing import Any

import pytest

from engine.request import Choice, Request, TooLarge
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig, Step
from engine.stop_rules import StopRules
from kvcache.block_hash import Namespace, hash_block, name_blocks
from kvcache.block_pool import BlockPool, OutOfBlocks
from kvcache.spec import CacheSpec

SPACE = Namespace(b"scheduler".ljust(32))
BLOCK = 4


class Bench:
    """A scheduler of blocks of 4 tokens, and a model that always says 7."""

    def __init__(self, num_blocks: int = 32, **config: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            SchedulerConfig(**{"growth_tokens": 0, **config}),
            self.pool,
            CacheSpec.full(1, 1, 4, BLOCK, "float32"),
            lambda request, parent, tokens: hash_block(SPACE, request.tenant, parent, tokens),
        )
        self.num_requests = 0

    def choice(self, prompt: list[int], max_tokens: int = 8, n: int = 1, **fields: Any) -> Choice:
        self.num_requests += 1
        params = SamplingParams(max_tokens, n=n)
        request = Request(
            str(self.num_requests), self.num_requests, prompt, params, lambda output: None, **fields
        )
        request.arrival = self.num_requests
        names = name_blocks(SPACE, request.tenant, prompt, BLOCK)
        request.names = names
        choice = Choice(request, 0, StopRules(params, (), None), names=list(names))
        request.choices = [choice]
        return choice

    def queue(self, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Choice:
        choice = self.choice(prompt, max_tokens, **fields)
        self.scheduler.refuse_impossible(choice.request)
        self.scheduler.queue(choice)
        return choice

    def step(self) -> Step:
        step = self.scheduler.next_step()
        self.scheduler.check()
        for choice in step.outgrown:
            self.scheduler.drop(choice)
        for part in step.slices:
            self.scheduler.advance(part)
            if part.wants_logits:
                part.choice.output.append(7)
                if len(part.choice.output) == part.choice.request.max_tokens:
                    self.scheduler.drop(part.choice)
        self.scheduler.check()
        return step

    def run(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.scheduler.running and not self.scheduler.waiting:
                return
            self.step()
        raise AssertionError("the scheduler did not drain")


def sizes(step: Step) -> list[tuple[str, int]]:
    return [(s.choice.request.request_id, s.stop - s.start) for s in step.slices]


def test_a_long_prompt_is_chunked_and_does_not_delay_a_running_request() -> None:
    bench = Bench(max_tokens_per_step=4)
    bench.queue([1], max_tokens=3)
    assert sizes(bench.step()) == [("1", 1)]
    bench.queue(list(range(9)), max_tokens=1)
    steps = [bench.step() for _ in range(3)]
    assert [sizes(step) for step in steps] == [
        [("1", 1), ("2", 3)],
        [("1", 1), ("2", 3)],
        [("2", 3)],
    ]
    assert [[s.wants_logits for s in step.slices] for step in steps] == [
        [True, False],
        [True, False],
        [True],
    ]


def test_a_request_may_ask_for_smaller_chunks_than_the_step_has_room_for() -> None:
    bench = Bench(max_tokens_per_step=100)
    bench.queue(list(range(20)), max_tokens=1, max_chunk_tokens=8)
    bench.queue(list(range(50, 70)), max_tokens=1)
    assert sizes(bench.step()) == [("1", 8), ("2", 20)]
    assert sizes(bench.step()) == [("1", 8)]
    assert sizes(bench.step()) == [("1", 4)]


def test_the_queue_is_served_in_order_and_a_small_request_does_not_overtake() -> None:
    bench = Bench(num_blocks=4)
    bench.queue([1] * 8, max_tokens=4)
    bench.step()
    bench.queue([2] * 12, max_tokens=1)
    bench.queue([3], max_tokens=1)
    assert sizes(bench.step()) == [("1", 1)]
    bench.run()


def test_seats_are_taken_for_all_choices_of_a_request_at_once() -> None:
    bench = Bench(max_running=3)
    bench.queue([1], n=2)
    bench.queue([2], n=2)
    bench.queue([3])
    assert sizes(bench.step()) == [("1", 1)]
    assert bench.scheduler.num_seats_free == 2  # its first choice has forked off; one seat is left
    with pytest.raises(TooLarge, match="asks for 4 choices, at most 3 can run"):
        bench.queue([4], n=4)


def test_a_request_that_can_never_start_is_refused_and_one_that_just_can_is_not() -> None:
    bench = Bench(num_blocks=2)
    with pytest.raises(TooLarge, match="needs 3 blocks for its 8 prompt tokens, the pool has 2"):
        bench.queue(list(range(8)), max_tokens=2)
    with pytest.raises(TooLarge, match="needs 3 blocks for its 9 prompt tokens, the pool has 2"):
        bench.queue(list(range(9)), max_tokens=1)
    bench.queue(list(range(8)), max_tokens=1)
    bench.queue(list(range(7)), max_tokens=100)
    bench.queue(list(range(8)), max_tokens=100, hold=True)


def test_the_newest_gives_way_and_comes_back_before_those_who_came_later() -> None:
    bench = Bench(num_blocks=4)
    for _ in range(2):
        bench.queue([bench.num_requests] * 7, max_tokens=6)
    bench.step()
    late = bench.queue([9], max_tokens=1)
    bench.step()
    assert [choice.request.request_id for choice in bench.scheduler.running] == ["1", "2"]
    bench.step()  # both want a third block, none is left
    assert [choice.request.request_id for choice in bench.scheduler.running] == ["1"]
    assert [choice.request.request_id for choice in bench.scheduler.waiting] == ["2", "3"]
    assert bench.scheduler.num_preemptions == 1
    bench.run()
    assert late.output == [7]
    assert bench.pool.num_used == 0


def test_a_preempted_request_finds_its_blocks_again_when_they_are_still_there() -> None:
    bench = Bench(num_blocks=6, max_tokens_per_step=100)
    first = bench.queue(list(range(7)), max_tokens=3)
    second = bench.queue(list(range(100, 110)), max_tokens=3)
    bench.step()
    bench.scheduler._preempt_newest(than=first)
    bench.scheduler.check()
    assert second.num_computed == 0
    assert sizes(bench.step()) == [("1", 1), ("2", 3)]  # 11 tokens, 8 of them in named blocks
    bench.run()


def test_pinned_blocks_are_taken_at_once_and_never_given_up() -> None:
    bench = Bench(num_blocks=5, max_tokens_per_step=4)
    old = bench.queue([1, 2, 3], max_tokens=12)
    bench.step()
    pinned = bench.queue(list(range(50, 62)), hold=True)
    bench.step()
    assert len(pinned.block_table) == 3
    bench.step()
    bench.scheduler.hold(pinned)
    table = list(pinned.block_table)
    for _ in range(10):
        bench.step()
    assert pinned.block_table == table
    assert len(old.output) == 6  # three prompt tokens and five of these fill its two blocks
    bench.scheduler.drop(pinned)
    bench.run()
    assert len(old.output) == 12


def test_a_cached_prefix_is_counted_when_blocks_are_given_not_when_it_was_first_tried() -> None:
    bench = Bench(num_blocks=4)
    bench.queue(list(range(8)), max_tokens=1)
    bench.run()
    big = bench.queue([9] * 8, max_tokens=9)
    bench.step()
    waits = bench.queue([*range(8), 1, 1], max_tokens=1)
    assert bench.pool.match(waits.names) == 2
    bench.step()
    assert (bench.pool.match(waits.names), waits.block_table) == (1, [])
    bench.run()
    assert big.output == [7] * 9
    assert (waits.request.num_cached_tokens, waits.request.num_computed_tokens) == (0, 10)


def test_a_fully_cached_prompt_still_has_its_last_block_computed() -> None:
    bench = Bench()
    for num_tokens, cached in [(7, 4), (8, 4), (9, 8), (1, 0), (4, 0)]:
        prompt = [num_tokens] * num_tokens
        bench.queue(prompt, max_tokens=1)
        bench.run()
        again = bench.queue(prompt, max_tokens=1)
        assert sizes(bench.step())[0][1] == num_tokens - cached
        assert again.request.num_cached_tokens == cached


def test_forks_share_every_block_until_one_writes() -> None:
    bench = Bench()
    parent = bench.queue([1, 2, 3, 4, 5, 6], n=2)
    bench.step()
    child = Choice(parent.request, 1, parent.rules, output=[7])
    bench.scheduler.fork(parent, child)
    bench.scheduler.check()
    assert bench.pool.num_used == 2
    tail = parent.block_table[1]
    step = bench.step()
    assert [part.copy for part in step.slices] == [(tail, parent.block_table[1]), None]
    assert child.block_table[1] == tail
    assert parent.block_table[0] == child.block_table[0]
    assert bench.pool.num_used == 3


def test_a_newcomer_waits_when_it_would_take_what_the_running_need_next() -> None:
    bench = Bench(num_blocks=5, growth_tokens=8)
    bench.queue([1] * 4, max_tokens=100)
    bench.step()
    bench.queue([2] * 8, max_tokens=100)
    assert sizes(bench.step()) == [("1", 1)]  # 2 blocks are free beyond the 2 that 1 may need
    bench.scheduler.drop(bench.scheduler.running[0])
    assert sizes(bench.step()) == [("2", 8)]


def test_a_choice_that_outgrows_the_pool_is_reported_with_the_pool_full() -> None:
    bench = Bench(num_blocks=2)
    choice = bench.queue([1, 2, 3], max_tokens=100)
    reported: list[Choice] = []
    while not reported:
        reported = bench.step().outgrown
    assert reported == [choice]
    assert len(choice.output) == 5  # 3 + 5 tokens fill the pool's 8 slots


def test_the_last_token_needs_no_slot() -> None:
    bench = Bench(num_blocks=2)
    choice = bench.queue([1, 2, 3], max_tokens=6)
    bench.run()
    assert len(choice.output) == 6


def test_a_reservation_holds_the_whole_prompt_and_leaves_those_before_it_theirs() -> None:
    bench = Bench(num_blocks=4, max_running=2)
    bench.queue(list(range(8)), max_tokens=1)
    bench.run()
    reserved = bench.choice(list(range(10)))
    bench.scheduler.reserve(reserved)
    assert (len(reserved.block_table), reserved.num_promised) == (2, 1)
    bench.scheduler.check()
    with pytest.raises(OutOfBlocks, match="need 2 blocks, 1 available"):
        bench.scheduler.reserve(bench.choice([5] * 8))
    bench.queue([6] * 4)
    with pytest.raises(OutOfBlocks, match="2 choices wait for 1 free seats"):
        bench.scheduler.reserve(bench.choice([5]))
    bench.scheduler.bind(reserved)
    assert (len(reserved.block_table), reserved.num_promised) == (3, 0)
    bench.scheduler.check()
    bench.scheduler.adopt(reserved)
    reserved.output.append(7)
    assert bench.pool.match(reserved.names) == 2
    assert sizes(bench.step()) == [("2", 1), ("4", 4)]


def test_a_prompt_that_is_all_here_is_reserved_whole() -> None:
    bench = Bench()
    bench.queue(list(range(8)), max_tokens=2)
    bench.run()
    reserved = bench.choice(list(range(8)))
    bench.scheduler.reserve(reserved)
    assert (len(reserved.block_table), reserved.num_promised) == (2, 1)  # for its next token
