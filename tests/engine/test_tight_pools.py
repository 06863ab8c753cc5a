"""More is asked for than the pool holds: all of it ends, and ends right."""

import pytest

from engine.request import (
    Failed,
    QueueFull,
    TooLarge,
)
from tests.engine.small_worker import SmallWorker, truth


def test_two_long_requests_in_a_pool_for_one_and_a_half_both_come_out_right() -> None:
    worker = SmallWorker(7, growth_tokens=0)
    prompts = [[seed] * 34 for seed in (1, 2)]
    requests = [worker.request(prompt, 35) for prompt in prompts]
    for request, _ in requests:
        worker.engine.add(request)
    worker.drain()
    assert [heard.text for _, heard in requests] == [truth(prompt, 35) for prompt in prompts]
    assert worker.engine.stats().preemptions == 1
    # Sent back once, the second finds the two full blocks of its prompt again.
    assert [request.num_computed_tokens for request, _ in requests] == [34, 34 + 2]


@pytest.mark.parametrize(("max_tokens", "delivered"), [(1, 1), (2, 2), (17, 17), (18, 16)])
def test_a_prompt_that_ends_on_a_blocks_edge_may_fill_the_one_block_left(
    max_tokens: int, delivered: int
) -> None:
    worker = SmallWorker(2)
    heard = worker.ask([7] * 16, max_tokens)
    assert heard.text == truth([7] * 16, delivered)
    assert heard.failure is None or heard.failure.code == "RESOURCE_EXHAUSTED"
    assert (heard.failure is None) == (delivered == max_tokens)
    assert worker.is_empty()


@pytest.mark.parametrize(("max_tokens", "waits"), [(1, False), (2, True), (17, True)])
def test_a_prompt_that_fills_the_last_free_block_waits_for_its_next_one(
    max_tokens: int, waits: bool
) -> None:
    worker = SmallWorker(3, growth_tokens=0)
    neighbour = worker.add([6] * 17, 15)
    worker.step()
    assert worker.engine.books().free_blocks == 1
    heard = worker.add([7] * 16, max_tokens)
    worker.step()
    worker.step()
    assert (heard.ended, neighbour.ended) == (not waits, False)
    worker.drain()
    assert heard.text == truth([7] * 16, max_tokens)
    assert neighbour.text == truth([6] * 17, 15)
    assert worker.is_empty()


def test_one_request_that_outgrows_the_pool_ends_alone_and_the_next_is_served() -> None:
    worker = SmallWorker(8)
    heard = worker.ask([1] * 100, max_tokens=400)
    assert heard.text == truth([1] * 100, 28)
    assert heard.failure == Failed(
        "RESOURCE_EXHAUSTED",
        "request request 0 has outgrown the pool: it needs more than 8 blocks"
        " after 28 output tokens",
    )
    assert worker.ask([2] * 100, max_tokens=20).text == truth([2] * 100, 20)
    assert worker.is_empty()


def test_ten_long_requests_in_a_pool_for_three_all_end() -> None:
    worker = SmallWorker(30, max_tokens_per_step=128)
    heards = [worker.add([i] * 40, max_tokens=110) for i in range(10)]
    worker.drain()
    assert [heard.text for heard in heards] == [truth([i] * 40, 110) for i in range(10)]
    assert worker.is_empty()


def test_a_request_the_pool_can_never_hold_is_refused_at_once() -> None:
    worker = SmallWorker(4)
    with pytest.raises(TooLarge, match="needs 5 blocks for its 64 prompt tokens, the pool has 4"):
        worker.add([1] * 64, max_tokens=2)
    assert worker.ask([1] * 64, max_tokens=1).text == truth([1] * 64, 1)


def test_a_full_queue_refuses_with_a_hint_and_keeps_nothing() -> None:
    worker = SmallWorker(max_waiting=2)
    worker.add([1])
    worker.add([2])
    with pytest.raises(QueueFull, match="2 requests are waiting, at most 2 may") as raised:
        worker.add([3], name="late")
    assert raised.value.code == "RESOURCE_EXHAUSTED"
    assert raised.value.retry_after_ms == 100
    worker.drain()
    assert worker.ask([3], name="late").ended
