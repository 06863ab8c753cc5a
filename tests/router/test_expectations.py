"""What the router expects of workers and links, from what they have done so far."""

from dataclasses import replace

import pytest

from prefix_index.index import Load
from tests.router.fakes import IDLE
from tests.router.fleet_bench import Bench, record


def test_a_worker_that_measured_nothing_yet_is_expected_to_be_like_the_others(
    bench: Bench,
) -> None:
    """Else a worker that just restarted would look slow, or a decode group that never computed."""
    new = replace(IDLE, prefill_ms_per_token=0.0)
    bench.show(record("prefill-0", load=new), record("decode-0", load=new))
    assert bench.snapshot().replicas.prefills[0].ms_per_token == 1.0
    fast, slow = (replace(IDLE, prefill_ms_per_token=ms) for ms in (0.02, 0.04))
    bench.show(
        record("prefill-0", load=new),
        record("prefill-1", load=fast),
        record("prefill-2", load=slow),
        record("decode-0", load=new),
    )
    replicas = bench.snapshot().replicas
    assert [each.ms_per_token for each in replicas.prefills] == pytest.approx([0.03, 0.02, 0.04])
    assert replicas.decodes[0].ms_per_token == pytest.approx(0.03)


def test_prompts_that_a_worker_computed_for_other_routers_add_to_the_pace(bench: Bench) -> None:
    """What it computed before we saw it first does not, nor do our own, reported early or late."""

    def report(num_prompts: int) -> float:
        load = replace(IDLE, computed_prompts=num_prompts)
        bench.show(record("prefill-0", load=load), record("decode-0"))
        return bench.snapshot().replicas.prompts_per_ms

    report(1000)
    prefill, decode = bench.fleet.workers
    booking = bench.fleet.book(prefill, decode, 300, compute_ms=300.0)
    booking.computed_in(0.0, 300.0, 0)
    booking.close()
    ours = bench.snapshot().replicas.prompts_per_ms
    assert report(1000) == report(1001) == ours
    assert report(1004) == report(1002) == 4 * ours


def test_a_report_that_arrives_late_does_not_turn_our_own_work_into_others(bench: Bench) -> None:
    """It was made while two prompts were here, and is read when one of them is done."""
    bench.show(record("prefill-0"), record("decode-0"))
    prefill_0, decode_0 = bench.fleet.workers
    bookings = [bench.fleet.book(prefill_0, decode_0, 100, 1000) for _ in range(2)]
    bookings[0].computed()
    bench.show(record("prefill-0", load=replace(IDLE, queued_tokens=2000)), record("decode-0"))
    assert bench.snapshot().replicas.prefills[0].queued_tokens == 100
    bench.show(record("prefill-0", load=replace(IDLE, queued_tokens=2500)), record("decode-0"))
    assert bench.snapshot().replicas.prefills[0].queued_tokens == 100 + 500
    bench.show(record("prefill-0", load=replace(IDLE, queued_tokens=2400)), record("decode-0"))
    assert bench.snapshot().replicas.prefills[0].queued_tokens == 100 + 1400
    for booking in bookings:
        booking.close()
    bench.fleet.check()


def test_a_links_curve_comes_from_its_shipments_and_says_what_is_on_its_way(bench: Bench) -> None:
    bench.show(record("prefill-0"), record("decode-0"))
    prefill, decode = bench.fleet.workers
    for beside_bytes in [0, 4_000_000] * 20:
        others = bench.fleet.book(prefill, decode, 1, shipped_bytes=beside_bytes)
        ours = bench.fleet.book(prefill, decode, 1, shipped_bytes=1_000_000)
        ours.shipped_in(1_000_000, 3.0 + (1_000_000 + beside_bytes) / 1000, 0.0)
        others.close()
        ours.close()
    waiting = bench.fleet.book(prefill, decode, 1, shipped_bytes=7)
    bench.clock.advance(1.0)
    link = bench.snapshot().replicas.links["prefill-0", "decode-0"]
    assert link.curve.ms(2_000_000) == pytest.approx(2003, rel=0.05)
    assert link.in_flight_bytes == 7
    waiting.close()
    bench.fleet.check()


def test_what_a_prompt_waits_for_shrinks_as_the_one_before_it_is_computed(bench: Bench) -> None:
    bench.show(record("prefill-0"), record("decode-0"))
    prefill, decode = bench.fleet.workers

    def ahead_ms() -> float:
        return bench.snapshot().replicas.prefills[0].queue_ms

    first = bench.fleet.book(prefill, decode, 300, compute_ms=300.0)
    second = bench.fleet.book(prefill, decode, 100, compute_ms=100.0)
    bench.clock.advance(0.2)
    assert ahead_ms() == pytest.approx(200.0)
    bench.clock.advance(0.2)  # it takes longer than expected: the second has not begun
    assert ahead_ms() == pytest.approx(100.0)
    first.computed()
    bench.clock.advance(0.05)
    assert ahead_ms() == pytest.approx(50.0)
    second.close()
    first.close()
    assert ahead_ms() == 0.0
    bench.fleet.check()


def test_hindsight_knows_when_a_place_in_the_queue_came_up(bench: Bench) -> None:
    bench.show(record("prefill-0"), record("decode-0"))
    prefill, decode = bench.fleet.workers
    assert prefill.drained_at(prefill.last_place) == 0.0
    one, two, three = (bench.fleet.book(prefill, decode, 100, compute_ms=100.0) for _ in range(3))
    bench.clock.advance(1.0)
    two.computed()  # it failed: it had not come up
    assert [prefill.drained_at(each.place) for each in (one, two, three)] == [None, None, None]
    bench.clock.advance(1.0)
    one.computed()
    assert [prefill.drained_at(each.place) for each in (one, two, three)] == [2.0, 2.0, None]
    bench.clock.advance(1.0)
    three.computed()
    assert prefill.drained_at(prefill.last_place) == 3.0


def test_a_curve_is_fitted_to_what_workers_say_they_took(bench: Bench) -> None:
    """The report says 1 ms a token; prompts take 20 ms, and 3 for each token."""
    bench.show(record("prefill-0"), record("decode-0"))
    prefill, decode = bench.fleet.workers
    for number in range(60):
        tokens, cached = 100 + 37 * (number % 11), 16 * (number % 5)
        booking = bench.fleet.book(prefill, decode, tokens - cached, tokens)
        bench.clock.advance(1.0)
        booking.computed_in(400.0, 20.0 + 3.0 * (tokens - cached), cached)
        booking.close()
    replica = bench.snapshot().replicas.prefills[0]
    assert replica.compute_ms(200, 0) == pytest.approx(620.0, rel=0.03)
    assert replica.compute_ms(16, 100) == pytest.approx(68.0, rel=0.1)
    booking = bench.fleet.book(prefill, decode, 100)
    booking.computed_in(0.0, 0.0, 0)  # a worker that does not say teaches nothing
    booking.close()
    assert bench.snapshot().replicas.prefills[0] == replica
    new = replace(IDLE, prefill_ms_per_token=0.0)
    bench.show(record("prefill-0"), record("prefill-1", load=new), record("decode-0", load=new))
    assert bench.snapshot().replicas.prefills[1].compute_ms(200, 0) == replica.compute_ms(200, 0)


def test_a_hiccup_in_its_warm_up_does_not_keep_a_worker_from_being_asked_at_all(
    bench: Bench,
) -> None:
    """It reports a hundred times what the other was found to take, and is taken for four times."""
    bench.show(record("prefill-0"), record("decode-0"))
    prefill, decode = bench.fleet.workers
    for tokens in (100, 1000, 200, 3000, 500) * 5:
        booking = bench.fleet.book(prefill, decode, tokens)
        booking.computed_in(0.0, 10.0 + tokens, 0)
        booking.close()
    load = replace(IDLE, prefill_ms_per_token=100.0)
    bench.show(record("prefill-0"), record("prefill-1", load=load), record("decode-0"))
    usual, hiccup = bench.snapshot().replicas.prefills
    assert usual.compute_ms(1000, 0) == pytest.approx(1010, rel=0.05)
    assert hiccup.compute_ms(1000, 0) == pytest.approx(4 * usual.compute_ms(1000, 0), rel=0.01)
    new = next(each for each in bench.fleet.workers if each.name == "prefill-1")
    booking = bench.fleet.book(new, decode, 100)
    booking.computed_in(0.0, 110.0, 0)
    booking.close()
    bench.clock.advance(1.0)
    found = bench.snapshot().replicas.prefills[1].compute_ms(1000, 0)
    assert found == pytest.approx(1010, rel=0.5)


def test_a_decode_steps_curve_is_fitted_to_what_reports_say_of_steps(bench: Bench) -> None:
    def load(sequences: float, context: float) -> Load:
        step_ms = 10 + 0.5 * sequences + 0.001 * context
        busy = replace(IDLE, running=4, context_tokens=900, decode_step_ms=step_ms)
        return replace(busy, step_sequences=sequences, step_context_tokens=context)

    for number in range(60):
        sequences = 1 + number % 16
        bench.show(record("decode-0", load=load(sequences, sequences * (100 + 50 * (number % 7)))))
    bench.clock.advance(1.0)
    replica = bench.snapshot().replicas.decodes[0]
    assert replica.joined_step_ms == pytest.approx(10 + 0.5 * 5 + 0.001 * (900 + 64), rel=0.05)
