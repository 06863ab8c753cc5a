"""Who is live, who fits, what is booked, whom we doubt."""

import asyncio
import io
from dataclasses import replace

import pytest

from prefix_index.index import Role
from router.journal import journal
from router.policy import choose
from tests.router.fakes import IDLE, MANIFEST, SOURCE
from tests.router.fleet_bench import Bench, Leg, names, record, refusals


def test_matched_blocks_come_from_the_mirror_under_the_workers_own_namespace(bench: Bench) -> None:
    bench.show(record("prefill-0"), record("prefill-1"), record("decode-0"))
    bench.mirror.held = {"prefill-1": 3, "decode-0": 1}
    snapshot = bench.snapshot()
    assert [each.matched_blocks for each in snapshot.replicas.prefills] == [0, 3]
    assert snapshot.replicas.decodes[0].matched_blocks == 1
    assert snapshot.available_tokens == 48
    (asked,) = bench.mirror.asked
    assert asked == names(SOURCE.namespace("int64"), 16)
    assert (snapshot.replicas.decodes[0].block_size, snapshot.prompt.num_layers) == (16, 4)
    assert snapshot.prompt.token_bytes == 4 * 2 * 3 * 4 * 8


def test_a_prompt_is_named_once_for_each_size_of_block_in_the_fleet(bench: Bench) -> None:
    large = replace(MANIFEST, block_size=64, kv_layout="token-major")
    bench.show(
        record("prefill-0", manifest=large),
        record("prefill-1"),
        record("prefill-2", manifest=large),
        record("decode-0"),
    )
    snapshot = bench.snapshot()
    space = SOURCE.namespace("int64")
    assert sorted(bench.mirror.asked, key=len) == sorted(
        [names(space, 16), names(space, 64)], key=len
    )
    assert set(refusals(snapshot).values()) == {""}
    assert snapshot.replicas.refused_pairs == {}
    decision = choose(snapshot.prompt, snapshot.replicas)
    assert not any(each.refused for each in decision.candidates)


def test_each_worker_is_credited_with_its_own_blocks_only(bench: Bench) -> None:
    large = replace(MANIFEST, block_size=64)
    bench.show(record("prefill-0", manifest=large), record("prefill-1"), record("decode-0"))
    space = SOURCE.namespace("int64")
    bench.mirror.held_under = {
        tuple(names(space, 16)): {"prefill-1": 3, "decode-0": 1},
        tuple(names(space, 64)): {"prefill-0": 1},
    }
    snapshot = bench.snapshot()
    matched = {each.name: each.matched_tokens for each in snapshot.replicas.prefills}
    assert matched == {"prefill-0": 64, "prefill-1": 48}
    assert snapshot.replicas.prefills[0].matched_blocks == 1


def test_a_worker_with_another_model_is_shown_and_never_used(bench: Bench) -> None:
    flipped = replace(MANIFEST, namespace="00" * 32)
    bigger = replace(MANIFEST, vocab_size=600)
    bench.show(
        record("prefill-0", manifest=flipped),
        record("prefill-1", manifest=bigger),
        record("decode-0"),
    )
    reasons = refusals(bench.snapshot())
    assert "its namespace is 0000000000000000, checksum's is" in reasons["prefill-0"]
    assert "its vocabulary has 600 tokens, checksum's has 512" in reasons["prefill-1"]
    assert reasons["decode-0"] == ""
    assert bench.lines.getvalue().count('"worker.unfit"') == 2
    assert len(bench.mirror.asked) == 1


@pytest.mark.parametrize(("field", "value"), [("num_layers", 5), ("max_context", 512)])
def test_a_pair_that_cannot_work_together_is_refused_with_both_values(
    bench: Bench, field: str, value: int
) -> None:
    other = replace(MANIFEST, **{field: value})  # type: ignore[arg-type]
    bench.show(record("prefill-0", manifest=other), record("prefill-1"), record("decode-0"))
    snapshot = bench.snapshot()
    decision = choose(snapshot.prompt, snapshot.replicas)
    why = {each.prefill.name: each.refused for each in decision.candidates if each.prefill}
    assert why["prefill-1"] == ""
    assert why["prefill-0"].startswith("prefill-0 and decode-0: ")
    assert f"{field} differs: {value} here" in why["prefill-0"]


def test_without_a_usable_decode_it_says_what_is_missing(bench: Bench) -> None:
    assert bench.fleet.whats_missing() == "no decode replica is live"
    bench.show(record("prefill-0"))
    assert bench.fleet.whats_missing() == "no decode replica is live"
    draining = replace(IDLE, draining=True)
    bench.show(record("decode-0", load=draining))
    assert bench.fleet.whats_missing() == "decode-0 is draining"
    bench.show(record("decode-0", load=draining), record("decode-1"))
    assert bench.fleet.whats_missing() == ""
    bench.fleet.doubts.add("decode-1-life-1", "a hiccup")
    assert bench.fleet.whats_missing() == ""  # a doubt is no reason to be taken out of service


def test_what_is_booked_counts_until_it_is_returned(bench: Bench) -> None:
    bench.show(record("prefill-0"), record("decode-0"))
    prefill, decode = bench.fleet.workers
    booking = bench.fleet.book(prefill, decode, 300, compute_ms=280.0)
    snapshot = bench.snapshot()
    assert snapshot.replicas.prefills[0].queued_tokens == 300
    assert snapshot.replicas.prefills[0].queue_ms == 280.0
    assert snapshot.replicas.decodes[0].running == 1
    with pytest.raises(AssertionError, match="prefill-0: 300 tokens booked"):
        bench.fleet.check()
    booking.computed()
    booking.computed()
    assert bench.snapshot().replicas.prefills[0].queued_tokens == 0
    booking.close()
    bench.fleet.check()


def test_a_reported_queue_is_not_counted_twice(bench: Bench) -> None:
    """The worker's report holds our own bookings and other routers' work."""
    bench.show(record("prefill-0"), record("decode-0"))
    prefill, decode = bench.fleet.workers
    booking = bench.fleet.book(prefill, decode, 300)
    busy = replace(IDLE, queued_tokens=500)
    bench.show(record("prefill-0", load=busy), record("decode-0"))
    assert bench.snapshot().replicas.prefills[0].queued_tokens == 500
    booking.close()
    assert bench.snapshot().replicas.prefills[0].queued_tokens == 200


def test_what_was_sent_to_a_worker_is_expected_there_until_the_mirror_has_told_it(
    bench: Bench,
) -> None:
    """However late, and whether or not the worker still holds it by then."""
    bench.show(record("prefill-0"), record("prefill-1"), record("decode-0"))
    prefill, *_ = bench.fleet.workers
    named = names(SOURCE.namespace("int64"), 16)

    def seen() -> list[tuple[int, int]]:
        bench.fleet.news.listen()
        prefills = bench.snapshot().replicas.prefills
        return [(each.matched_blocks, each.expected_blocks) for each in prefills]

    bench.fleet.sightings.note(named, prefill.record.instance)
    assert seen() == [(0, 4), (0, 0)]
    bench.fleet.sightings.settle(named, prefill.record.instance)
    bench.clock.advance(60.0)
    assert seen() == [(0, 4), (0, 0)]
    bench.mirror.held = {"prefill-0": 4}
    assert seen() == [(4, 4), (0, 0)]
    bench.mirror.held = {}
    assert seen() == [(0, 0), (0, 0)]


async def test_a_later_life_takes_the_place_of_the_one_before(bench: Bench) -> None:
    bench.show(record("decode-0"))
    (first,) = bench.fleet.workers
    leg = Leg()
    first.legs.add(leg)
    bench.fleet.doubts.add("decode-0-life-1", "died")
    bench.show(record("decode-0", epoch=2))
    assert leg.reason == "decode-0 was replaced by its life of epoch 2"
    assert refusals(bench.snapshot()) == {"decode-0": ""}
    await bench.fleet.close_leaving()
    assert [channel.closed for channel in bench.channels] == [True, False]
    await bench.fleet.close()
    assert all(channel.closed for channel in bench.channels)


async def test_a_lease_that_lapses_ends_the_legs(bench: Bench) -> None:
    bench.show(record("decode-0"))
    (worker,) = bench.fleet.workers
    leg = Leg()
    worker.legs.add(leg)
    bench.show()
    assert leg.reason == "decode-0 left or let its lease lapse"


async def test_run_follows_the_mirror(bench: Bench) -> None:
    following = asyncio.create_task(bench.fleet.run())
    await bench.clock.run(0.25)
    bench.mirror.records = [record("decode-0")]
    await bench.clock.run(0.25)
    assert bench.fleet.num_live(Role.DECODE) == 1
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def test_closed_streams_and_endless_values_cost_the_log_only() -> None:
    stream = io.StringIO()
    log = journal(stream)
    log.info("event", value="x" * 5000, forged="a\r\nb\x1b[0m\u2028\ud800", data=b"\xff")
    (line,) = stream.getvalue().splitlines()
    assert line.isascii() and len(line) < 1500 and "(5000 characters)" in line
    stream.close()
    log.info("event")  # does not raise


def test_what_a_worker_holds_in_host_memory_is_told_apart() -> None:
    bench = Bench()
    bench.show(record("prefill-0"), record("decode-0"))
    bench.mirror.held, bench.mirror.in_host = {"prefill-0": 3}, {"prefill-0": 2}
    replica = bench.snapshot().replicas.prefills[0]
    assert (replica.matched_blocks, replica.host_blocks) == (3, 2)
