"""What was expected is compared with what happened, and with what else could have been."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from prometheus_client import generate_latest

from kvferry.stats import predictions_of, regret_line
from protos import worker_pb2 as wpb
from router.forecast import forecast
from router.policy import choose
from router.snapshot import Asked
from tests.router.fakes import (
    IDLE_DECODE,
    Abort,
    FakeCluster,
    FakeWorker,
    first_tokens,
    prefill_done,
    prefill_script,
    without_pins,
)
from tests.router.fleet_bench import Bench, record


def test_regret_is_what_the_best_alternative_would_have_saved_as_its_queue_really_drained() -> None:
    bench = Bench()
    bench.show(record("prefill-0"), record("prefill-1"), record("decode-0", load=IDLE_DECODE))
    one, two, decode = bench.fleet.workers
    ahead = [bench.fleet.book(one, decode, 90, compute_ms=90.0)]
    ahead.append(bench.fleet.book(two, decode, 500, compute_ms=500.0))
    snapshot = bench.snapshot()
    decision = choose(snapshot.prompt, snapshot.replicas)
    expected = forecast(bench.clock.now(), snapshot, decision)
    assert (expected.computing, expected.streaming) == ("prefill-0", "decode-0")
    assert expected.ttft_ms == pytest.approx(90 + 64)
    bench.clock.advance(0.02)
    ahead[1].computed()  # far sooner than it was said to
    bench.clock.advance(0.28)
    assert expected.regret_ms(300.0) == pytest.approx(300 - (20 + 64))
    assert expected.regret_ms(50.0) == 0.0


def test_an_alternative_that_has_not_drained_is_no_reason_for_regret() -> None:
    bench = Bench()
    bench.show(record("prefill-0"), record("prefill-1"), record("decode-0", load=IDLE_DECODE))
    _, two, decode = bench.fleet.workers
    bench.fleet.book(two, decode, 500, compute_ms=500.0)
    snapshot = bench.snapshot()
    # Decode is an alternative, too: it would have computed 64 tokens by itself, of 50 ms each.
    decision = choose(snapshot.prompt, snapshot.replicas)
    expected = forecast(0.0, snapshot, decision)
    bench.clock.advance(9.0)
    assert expected.regret_ms(9000.0) == pytest.approx(9000 - 3200)
    assert expected.regret_ms(60.0) == 0.0
    alone = bench.fleet.snapshot(Asked(64, b"key"), lambda *_: [], {"prefill-1-life-1": "x"})
    only = forecast(0.0, alone, choose(alone.prompt, alone.replicas))
    assert [each.worker.name for each in only.alternatives] == ["decode-0"]


async def test_predictions_and_regret_are_in_the_metrics_of_who_was_asked(
    cluster: FakeCluster,
) -> None:
    async def prefill(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        worker.cluster.shipments[asked.transfer_id].set()
        firsts = first_tokens(worker, asked.work)
        firsts.first_tokens.queue_ms, firsts.first_tokens.compute_ms = 0.5, 2.0
        yield firsts
        yield prefill_done(asked.work)

    await cluster.add("prefill-0", prefill)
    await cluster.add("decode-0")
    for _ in range(12):
        await cluster.ask(**without_pins(max_tokens=4))
    await asyncio.sleep(1.0)
    snapshot = cluster.fleet.snapshot(Asked(64, b""), lambda *_: [])
    assert snapshot.replicas.prefills[0].compute_ms(64, 0) == pytest.approx(2.0, rel=0.2)
    text = generate_latest(cluster.metrics.registry).decode()
    found = {(each.worker, each.what): each for each in predictions_of(text)}
    first = found["prefill-0", "first token"]
    assert first.count == 12 and 0 < first.error_ms < 64
    assert found["decode-0", "each token"].count == 12
    assert "in the mean of 12" in regret_line(text)


async def test_a_second_attempt_is_no_prediction(cluster: FakeCluster) -> None:
    async def dies_once(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        if asked.attempt == 1 and len(worker.requests) == 1:
            raise Abort(grpc.StatusCode.UNAVAILABLE, "a hiccup")
        async for event in prefill_script(worker, asked):
            yield event

    await cluster.add("prefill-0", dies_once)
    await cluster.add("decode-0")
    for _ in range(3):
        await cluster.ask(**without_pins(max_tokens=4))
    assert [line["attempts"] for line in cluster.log()] == [2, 1, 1]
    text = generate_latest(cluster.metrics.registry).decode()
    assert sum(each.count for each in predictions_of(text) if each.what == "first token") == 2
