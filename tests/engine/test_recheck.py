"""Cached blocks that have changed: found before they are shared, on any rank; computed again."""

import threading
import time
from random import Random

import pytest

from engine.request import Failed
from kvcache.block_pool import Removed
from kvcache.kv_store import KvStore
from model.checksum_reference import checksum_continuation
from tests.engine.small_worker import CONFIG, SmallWorker
from tests.engine.test_tensor_parallel import group

PROMPT = [(i * 5 + 3) % 256 for i in range(70)]  # four full blocks and a tail
RIGHT = checksum_continuation(CONFIG, PROMPT, 8)


def damage(worker: SmallWorker, number: int, store: KvStore | None = None) -> int:
    """Flip a bit in the prompt's cached block of that number; returns the block."""
    request, _ = worker.request(PROMPT)
    worker.engine._preparing.prepare(request)
    block = worker.pool.find(request.names)[number]
    (store or worker.store).layer(1)[block, 0, 0, 3, 0] ^= 1 << 20
    return block


def digested(worker: SmallWorker) -> None:
    """As happens by itself while an engine idles."""
    worker.store.recheck(list(worker.pool.named()))


@pytest.mark.parametrize("number", range(4))
def test_a_block_that_changed_is_dropped_with_all_that_follow_and_computed_again(
    number: int,
) -> None:
    worker = SmallWorker(recheck_share=1.0)
    assert worker.ask(PROMPT).text == RIGHT
    digested(worker)
    damage(worker, number)
    heard = worker.ask(PROMPT)
    assert heard.text == RIGHT
    assert heard.num_cached == 16 * number
    stats = worker.engine.stats()
    assert (stats.rechecked_blocks, stats.rotten_blocks) == (4, 1)
    assert stats.disowned_blocks == 3 - number
    assert worker.ask(PROMPT).num_cached == 64


def test_what_is_dropped_is_told_to_the_index() -> None:
    worker = SmallWorker(recheck_share=0.0)
    worker.ask(PROMPT)
    digested(worker)
    names = worker.engine.resident()
    worker.engine.drain_events()
    damage(worker, 1)
    worker.engine.suspect(names)
    assert worker.step()
    assert worker.engine.drain_events() == [
        Removed(name) for name in (names[3], names[2], names[1])
    ]
    assert worker.engine.resident() == names[:1]


def test_without_damage_nothing_is_found_and_all_is_shared() -> None:
    worker = SmallWorker(recheck_share=1.0)
    for cached in (0, 64, 64, 64):
        heard = worker.ask(PROMPT)
        assert (heard.text, heard.num_cached) == (RIGHT, cached)
    stats = worker.engine.stats()
    assert (stats.rechecked_blocks, stats.rotten_blocks) == (12, 0)


@pytest.mark.parametrize(("tp", "rank"), [(2, 0), (2, 1), (3, 2), (4, 3)])
def test_what_one_rank_finds_is_dropped_for_all(tp: int, rank: int) -> None:
    with group(tp, recheck_share=1.0, quiet_s=0.001, idle_beat_s=0.01) as worker:
        stores = [worker.store, *worker.other_stores]
        for _ in range(2):
            heard = worker.add(PROMPT)
            heard.wait()
            assert heard.text == RIGHT
        damage(worker, 2, stores[rank])
        heard = worker.add(PROMPT)
        heard.wait()
        assert (heard.text, heard.num_cached) == (RIGHT, 32)
        assert worker.engine.stats().rotten_blocks == 1


def test_who_runs_on_a_block_that_changed_computes_it_again_and_goes_on() -> None:
    worker = SmallWorker(recheck_share=1.0)
    long = worker.add(PROMPT, max_tokens=40)
    worker.step()
    worker.step()
    digested(worker)
    damage(worker, 1)
    heard = worker.ask(PROMPT)
    assert heard.text == RIGHT
    # what came of the damaged block between is no more right than the block was; nothing did here
    assert long.text == checksum_continuation(CONFIG, PROMPT, 40)
    assert worker.is_empty()


def test_who_is_being_read_by_somebody_else_fails_rather_than_go_on() -> None:
    worker = SmallWorker(recheck_share=1.0, max_tokens_per_step=16)
    worker.ask(PROMPT[:20], 1)
    digested(worker)
    request, heard = worker.request(PROMPT, hold=True)
    worker.engine.add(request)
    worker.step()
    damage(worker, 0)
    other = worker.add(PROMPT)
    worker.drain()
    assert other.text == RIGHT
    failure = heard.failure
    assert isinstance(failure, Failed) and failure.code == "DATA_LOSS"
    assert "is not what it was" in failure.reason
    worker.engine.release_held(request)
    worker.drain()
    assert worker.is_empty()


def test_at_a_low_rate_damage_is_found_within_the_expected_number_of_reuses() -> None:
    """1 in 4: of 40 damaged blocks each takes 4 reuses on average, 3.5 of them before."""
    num_reuses = []
    for seed in range(40):
        worker = SmallWorker(recheck_share=0.25, random=Random(seed))
        worker.ask(PROMPT, 1)
        digested(worker)
        damage(worker, seed % 4)
        count = 0
        while worker.engine.stats().rotten_blocks == 0:
            worker.ask(PROMPT, 1)
            count += 1
        num_reuses.append(count)
        assert worker.ask(PROMPT).text == RIGHT
    assert 2.5 <= sum(num_reuses) / 40 <= 5.5
    assert max(num_reuses) < 30


def test_an_idle_engine_gives_digests_to_what_was_computed_here() -> None:
    with group(2, recheck_share=1 / 64, quiet_s=0.001, idle_beat_s=0.01) as worker:
        heard = worker.add(PROMPT)
        heard.wait()
        for store in (worker.store, *worker.other_stores):
            deadline = time.monotonic() + 5
            while store.kept.unknown(list(worker.pool.named())):
                assert time.monotonic() < deadline
                threading.Event().wait(0.005)
        assert worker.engine.stats().rechecked_blocks == 0


def test_whoever_waits_for_a_check_hears_of_its_end_even_when_the_engine_stops() -> None:
    worker = SmallWorker(recheck_share=1.0)
    worker.ask(PROMPT)
    request, _ = worker.request(PROMPT)
    worker.engine._preparing.prepare(request)
    waiting = worker.engine.sample_reuse(request.names)
    assert waiting is not None and not waiting.done()
    worker.step()
    assert waiting.done()
    waiting = worker.engine.sample_reuse(request.names)
    worker.engine.lose("rank 1 is gone")
    assert waiting is not None and waiting.done()
    assert worker.engine.sample_reuse(request.names) is None


def test_no_share_means_no_checks() -> None:
    worker = SmallWorker(recheck_share=0.0)
    for _ in range(3):
        worker.ask(PROMPT)
    assert worker.engine.stats().rechecked_blocks == 0
