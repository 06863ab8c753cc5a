"""What is cached is not computed again, and counted as such."""

import pytest

from kvcache.block_hash import tenant_key
from kvcache.block_pool import Removed, Stored
from tests.engine.small_worker import SmallWorker, truth


@pytest.mark.parametrize(
    ("num_tokens", "cached"),
    [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32), (49, 48)],
)
def test_a_repeat_computes_all_but_the_full_blocks_before_its_last_token(
    num_tokens: int, cached: int
) -> None:
    worker = SmallWorker()
    prompt = [num_tokens] * num_tokens
    assert worker.ask(prompt).num_cached == 0
    before = worker.engine.stats().computed_tokens
    for _ in range(3):
        again = worker.ask(prompt, max_tokens=1, max_chunk_tokens=16)
        assert again.num_cached == cached == (num_tokens - 1) // 16 * 16
        assert again.text == truth(prompt, 1)
    assert worker.engine.stats().computed_tokens - before == 3 * (num_tokens - cached)
    assert worker.engine.stats().cached_tokens == 3 * cached
    assert worker.engine.load().computed_prompts == 4, "chunks are no prompts of their own"
    assert worker.is_empty()


def test_a_shared_prefix_leaves_exactly_the_rest_to_compute() -> None:
    worker = SmallWorker()
    worker.ask([1] * 16)
    request, heard = worker.request([1] * 16 + [2] * 13, 1)
    worker.engine.add(request)
    worker.drain()
    assert (heard.num_cached, request.num_computed_tokens) == (16, 13)


def test_a_request_sent_back_to_the_queue_leaves_exactly_the_rest_to_compute_again() -> None:
    worker = SmallWorker(5, growth_tokens=0)
    worker.ask([1] * 16)
    older = worker.add([9] * 30, 30)  # of four blocks in the end
    worker.step()
    request, heard = worker.request([1] * 16 + [2] * 13, 6)
    worker.engine.add(request)
    worker.step()
    assert request.num_computed_tokens == 13
    worker.drain()
    assert worker.engine.stats().preemptions == 1
    assert request.num_computed_tokens == 13 + 13
    assert older.text == truth([9] * 30, 30)
    assert heard.text == truth([1] * 16 + [2] * 13, 6)


def test_a_prompt_whose_blocks_another_took_is_computed_anew() -> None:
    worker = SmallWorker(4)
    assert worker.ask([5] * 32, 1).text == truth([5] * 32, 1)
    assert worker.ask([6] * 64, 1).text == truth([6] * 64, 1)  # all four blocks
    again = worker.ask([5] * 32, 20)
    assert (again.num_cached, again.text) == (0, truth([5] * 32, 20))
    assert worker.is_empty()


def test_a_cached_prefix_evicted_while_its_request_waits_is_counted_anew() -> None:
    worker = SmallWorker(8, growth_tokens=0)
    worker.ask([3] * 32, 1)
    grows = worker.add([8] * 96, 20)  # six blocks now, the cached two when it needs them
    worker.step()
    prompt = [3] * 32 + [4] * 17
    request, waits = worker.request(prompt, 9)
    worker.engine.add(request)
    assert worker.engine.match(request.names) == 2
    worker.step()
    assert (worker.engine.match(request.names), waits.outputs) == (1, [])
    worker.drain()
    assert grows.text == truth([8] * 96, 20)
    assert (waits.num_cached, request.num_computed_tokens) == (0, 49)
    assert waits.text == truth(prompt, 9)


def test_output_blocks_are_cached_like_prompt_blocks() -> None:
    worker = SmallWorker()
    prompt = [3] * 20
    output = worker.ask(prompt, max_tokens=30).text
    follow_up = worker.ask([*prompt, *output, 5], max_tokens=2)
    assert follow_up.num_cached == 48  # of 20 + 29 computed tokens
    assert follow_up.text == truth([*prompt, *output, 5], 2)


def test_one_tenants_blocks_are_not_found_by_another() -> None:
    worker = SmallWorker()
    worker.ask([3] * 40, tenant=tenant_key("a"))
    assert worker.ask([3] * 40, tenant=tenant_key("b")).num_cached == 0
    assert worker.ask([3] * 40, tenant=tenant_key("a")).num_cached == 32


def test_what_becomes_cached_and_what_is_evicted_is_told() -> None:
    worker = SmallWorker(3)
    request, _ = worker.request([1] * 33, 1)
    worker.engine.add(request)
    worker.drain()
    first, second = request.names
    assert worker.engine.drain_events() == [Stored(first, None, 0), Stored(second, first, 1)]
    assert worker.engine.resident() == [first, second]
    assert worker.engine.match(request.names) == 2
    worker.ask([2] * 20, 1)
    assert worker.engine.drain_events()[0] == Removed(second)
    assert worker.engine.flush_cache() == 2
    assert worker.engine.resident() == []
