"""Ranks as threads: the same tokens from any tensor-parallel size, and an end for everyone."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine import follower
from engine.request import EngineStopped, Failed
from engine.runner import Runner
from engine.step_plan import StepPlan
from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from model.checksum import ChecksumModel
from model.checksum_reference import checksum_continuation
from model.comm import ThreadComm
from tests.engine.small_worker import CONFIG, SmallWorker


@contextmanager
def group(tp: int, num_blocks: int = 40, **engine: Any) -> Iterator[SmallWorker]:
    """Rank 0, with the others following on threads of their own."""
    heads = HeadMap.even(CONFIG.num_query_heads, CONFIG.num_kv_heads, tp)
    comms = ThreadComm.group(tp, timeout_s=20)
    ended: list[int] = []

    models = [ChecksumModel(CONFIG, heads, comm, 16) for comm in comms[1:]]
    stores = [KvStore(m.spec, heads.kv[rank], num_blocks) for rank, m in enumerate(models, 1)]

    def follow(comm: ThreadComm) -> None:
        model, store = models[comm.rank - 1], stores[comm.rank - 1]
        store.poison()
        follower.run(model, store, comm)
        ended.append(comm.rank)

    threads = [threading.Thread(target=follow, args=(comm,)) for comm in comms[1:]]
    for thread in threads:
        thread.start()
    worker = SmallWorker(num_blocks, comm=comms[0], **engine)
    worker.other_stores = stores
    worker.engine.start()
    try:
        yield worker
    finally:
        assert worker.engine.stop()
        for thread in threads:
            thread.join(20)
    assert sorted(ended) == list(range(1, tp))


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 9])
def test_any_number_of_ranks_gives_the_same_tokens(tp: int) -> None:
    rng = random.Random(tp)
    with group(tp, num_blocks=16, max_tokens_per_step=40, growth_tokens=0) as worker:
        asked = []
        for _ in range(15):
            prompt = [rng.randrange(512) for _ in range(rng.randrange(1, 50))]
            asked.append((prompt, worker.add(prompt, 25, n=rng.choice([1, 2]))))
        for prompt, heard in asked:
            heard.wait()
            expected = checksum_continuation(CONFIG, prompt, 25)
            assert heard.tokens == {choice: expected for choice in range(heard.num_choices)}
        worker.engine.check()
        assert worker.is_empty()
        assert worker.engine.stats().preemptions > 0


def test_idle_ranks_hear_that_rank_0_lives_and_leave_when_told() -> None:
    with group(3, idle_beat_s=0.02) as worker:
        threading.Event().wait(0.2)
        heard = worker.add([1] * 20, 1)
        heard.wait()
        assert heard.text == checksum_continuation(CONFIG, [1] * 20, 1)


def test_stopping_ends_what_runs_with_unavailable_and_keeps_nothing() -> None:
    with group(2) as worker:
        prompts = [[i] * 20 for i in range(3)]
        running = [worker.add(prompt, max_tokens=5000) for prompt in prompts]
        while worker.engine.stats().generated_tokens < 10:
            threading.Event().wait(0.01)
        assert worker.engine.stop()
        for prompt, heard in zip(prompts, running, strict=True):
            assert heard.failure is not None
            assert heard.failure.code == "UNAVAILABLE"
            assert heard.text == checksum_continuation(CONFIG, prompt, 500)[: len(heard.text)]
        with pytest.raises(EngineStopped):
            worker.add([1])
        worker.engine.check()
        assert worker.is_empty()


def test_a_rank_that_fails_takes_the_engine_down_and_no_request_hangs() -> None:
    deaths: list[Exception] = []
    comms = ThreadComm.group(2, timeout_s=20)
    heads = HeadMap.even(CONFIG.num_query_heads, CONFIG.num_kv_heads, 2)
    worker = SmallWorker(comm=comms[0], on_death=deaths.append, lost_rank=lambda: "rank 1 fell")

    def follow() -> None:
        model = ChecksumModel(CONFIG, heads, comms[1], 16)
        store = KvStore(model.spec, heads.kv[1], 64)
        runner = Runner(model, store)
        for _ in range(3):
            runner.run(StepPlan.decode(comms[1].broadcast_ints(None)))
        comms[1].abort()

    thread = threading.Thread(target=follow)
    thread.start()
    heards = [worker.add([i] * 20, 50) for i in range(3)]
    worker.engine.start()
    for number, heard in enumerate(heards):
        heard.wait()
        assert heard.failure == Failed("UNAVAILABLE", "the engine has ended: rank 1 fell")
        assert 2 <= len(heard.text) <= 3  # rank 1 may fall before rank 0 has left the third step
        assert heard.text == checksum_continuation(CONFIG, [number] * 20, 3)[: len(heard.text)]
    thread.join()
    assert [str(death) for death in deaths] == ["rank 1 fell"]
    with pytest.raises(EngineStopped):
        worker.add([1])


def test_a_model_that_raises_fails_every_request_with_internal() -> None:
    deaths: list[Exception] = []
    worker = SmallWorker(on_death=deaths.append)
    heards = [worker.add([i] * 20, 50) for i in range(3)]

    def broken(*_: object) -> None:
        raise RuntimeError("the device is on fire")

    worker.model.forward = broken  # type: ignore[method-assign, assignment]
    worker.engine.start()
    for heard in heards:
        heard.wait()
        reason = "the engine has ended: the device is on fire"
        assert heard.failure == Failed("INTERNAL", reason)
    assert worker.engine.death is deaths[0]
    worker.engine.check()
    assert worker.engine.stop()


def test_a_rank_lost_while_a_step_hangs_fails_every_request_at_once() -> None:
    deaths: list[Exception] = []
    comms = ThreadComm.group(2, timeout_s=3)
    worker = SmallWorker(comm=comms[0], on_death=deaths.append)
    heard = worker.add([1] * 20, 50)
    worker.engine.start()  # and waits for rank 1, which never comes
    worker.engine.lose("rank 1 is gone")
    heard.wait(1.0)
    assert heard.failure == Failed("UNAVAILABLE", "the engine has ended: rank 1 is gone")
    comms[1].abort()
    assert worker.engine.stop()
    assert len(deaths) == 1
