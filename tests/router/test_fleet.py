"""Who is live, who fits, what is booked, whom we doubt."""

import asyncio
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.clock import ManualClock
from kvcache.block_hash import PUBLIC, BlockHash, Namespace, name_blocks
from prefix_index.index import Load, Manifest, Role, WorkerRecord
from prefix_index.prefix_table import Run
from prefix_index.quarantine import Quarantine
from router.doubts import Doubts, Party
from router.fleet import Fleet
from router.journal import journal
from router.policy import choose
from router.snapshot import Asked, Snapshot
from tests.router.fakes import IDLE, MANIFEST, MODEL, PROMPT, SOURCE, FakeCluster


class FakeMirror:
    def __init__(self) -> None:
        self.records: list[WorkerRecord] = []
        self.reads = 0
        self.held: dict[str, int] = {}
        self.in_host: dict[str, int] = {}
        self.held_under: dict[tuple[bytes, ...], dict[str, int]] = {}  # where names matter
        self.asked: list[Sequence[bytes]] = []

    @property
    def version(self) -> int:
        """Another one each time: tests change `records` as they like."""
        self.reads += 1
        return self.reads

    def workers(self) -> list[WorkerRecord]:
        return self.records

    def runs(self, names: Sequence[bytes]) -> Mapping[str, Run]:
        self.asked.append(names)
        held = self.held_under.get(tuple(names), self.held)
        return {
            worker: Run(num_blocks, min(num_blocks, self.in_host.get(worker, 0)))
            for worker, num_blocks in held.items()
        }


class FakeChannel:
    def __init__(self) -> None:
        self.closed = False

    async def close(self, grace: float | None) -> None:
        self.closed = True


class Leg:
    def __init__(self) -> None:
        self.reason = ""

    def lose(self, reason: str) -> None:
        self.reason = reason


class Bench:
    """A fleet whose mirror, clock and channels are in the test's hands."""

    def __init__(self) -> None:
        self.mirror = FakeMirror()
        self.clock = ManualClock()
        self.channels: list[FakeChannel] = []
        self.lines = io.StringIO()
        self.fleet = Fleet(
            self.mirror, MODEL.unfit, self.connect, self.clock, journal(self.lines), doubt_s=2.0
        )

    def connect(self, address: str) -> Any:
        self.channels.append(FakeChannel())
        return self.channels[-1]

    def show(self, *records: WorkerRecord) -> None:
        self.mirror.records = list(records)
        self.fleet.refresh()

    def snapshot(self, **options: Any) -> Snapshot:
        return self.fleet.snapshot(Asked(len(PROMPT), b"key"), names, **options)


def why(doubts: Doubts, party: Party) -> str:
    return doubts.reasons().get(party, "")


def names(namespace: Namespace, block_size: int) -> list[BlockHash]:
    return name_blocks(namespace, PUBLIC, PROMPT, block_size)


def record(
    name: str, *, epoch: int = 1, load: Load = IDLE, manifest: Manifest = MANIFEST
) -> WorkerRecord:
    role = Role(name.partition("-")[0])
    address = "127.0.0.1:1"
    return WorkerRecord(
        name,
        role,
        f"{name}-life-{epoch}",
        epoch,
        address,
        "",
        (address,),
        ((0, 3),),
        manifest,
        load,
    )


@pytest.fixture
def bench() -> Bench:
    return Bench()


def refusals(snapshot: Snapshot) -> dict[str, str]:
    replicas = [*snapshot.replicas.prefills, *snapshot.replicas.decodes]
    return {each.name: each.refused for each in replicas}


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


def test_doubt_grows_with_each_failure_and_ends_with_one_success() -> None:
    clock = ManualClock()
    doubts = Doubts(clock, 2.0)
    assert why(doubts, "a") == ""
    doubts.add("a", "killed")
    clock.advance(1.9)
    assert why(doubts, "a") == "failed 1.9 s ago: killed"
    clock.advance(0.2)
    assert why(doubts, "a") == ""
    for pause in (4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        doubts.add("a", "again")
        clock.advance(pause - 0.1)
        assert why(doubts, "a") != ""
        clock.advance(0.2)
        assert why(doubts, "a") == ""
    doubts.clear("a")
    doubts.add("a", "once")
    clock.advance(2.1)
    assert why(doubts, "a") == ""


def test_a_pairs_doubt_is_the_pairs_alone_and_ends_with_either_life() -> None:
    doubts = Doubts(ManualClock(), 2.0)
    doubts.add(("p", "d"), "link cut")
    assert why(doubts, ("p", "d")) == "failed 0.0 s ago: link cut"
    assert why(doubts, "p") == why(doubts, "d") == why(doubts, ("p", "e")) == ""
    doubts.forget("d")
    assert why(doubts, ("p", "d")) == ""


async def test_those_in_doubt_serve_where_nobody_else_is_left(cluster: FakeCluster) -> None:
    _, decode = await cluster.add_pair()
    cluster.fleet.refresh()
    cluster.fleet.doubts.add(decode.record.instance, "a hiccup")
    assert len(await cluster.ask()) > 3
    assert why(cluster.fleet.doubts, decode.record.instance) == ""


def test_closed_streams_and_endless_values_cost_the_log_only() -> None:
    stream = io.StringIO()
    log = journal(stream)
    log.info("event", value="x" * 5000, forged="a\r\nb\x1b[0m\u2028\ud800", data=b"\xff")
    (line,) = stream.getvalue().splitlines()
    assert line.isascii() and len(line) < 1500 and "(5000 characters)" in line
    stream.close()
    log.info("event")  # does not raise


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


def test_what_a_worker_holds_in_host_memory_is_told_apart() -> None:
    bench = Bench()
    bench.show(record("prefill-0"), record("decode-0"))
    bench.mirror.held, bench.mirror.in_host = {"prefill-0": 3}, {"prefill-0": 2}
    replica = bench.snapshot().replicas.prefills[0]
    assert (replica.matched_blocks, replica.host_blocks) == (3, 2)


def chosen_pairs(snapshot: Snapshot) -> dict[str, tuple[str, ...]]:
    """The wires of each pair that may be used, by its prefill worker."""
    decision = choose(snapshot.prompt, snapshot.replicas)
    usable = [each for each in decision.candidates if each.prefill and not each.refused]
    return {each.prefill.name: each.wires for each in usable if each.prefill}


def test_a_wire_that_decode_has_in_quarantine_is_not_used_by_that_pair(bench: Bench) -> None:
    held = Quarantine("prefill-0", 1, "grpc", 1.0, 59.0, "9 of the last 90 cells came damaged")
    load = replace(IDLE, quarantines=(held,))
    bench.show(record("prefill-0"), record("prefill-1"), record("decode-0", load=load))
    both = ("grpc", "gloo")
    assert chosen_pairs(bench.snapshot()) == {"prefill-0": ("gloo",), "prefill-1": both}
    bench.show(record("prefill-0", epoch=2), record("prefill-1"), record("decode-0", load=load))
    assert chosen_pairs(bench.snapshot()) == {"prefill-0": both, "prefill-1": both}


@pytest.mark.parametrize("wires", [("",), ("grpc", "gloo")])
def test_a_worker_in_quarantine_is_left_to_the_decode_workers_that_have_nothing_against_it(
    bench: Bench, wires: tuple[str, ...]
) -> None:
    held = [Quarantine("prefill-0", 1, wire, 1.0, 59.0, "9 of 90 came damaged") for wire in wires]
    load = replace(IDLE, quarantines=tuple(held))
    bench.show(record("prefill-0"), record("prefill-1"), record("decode-0", load=load))
    for trusting in (False, True):
        snapshot = bench.snapshot(trusting=trusting)
        assert list(chosen_pairs(snapshot)) == ["prefill-1"]
        why = snapshot.replicas.refused_pairs["prefill-0", "decode-0"]
        assert "is in quarantine (since 1 s, for 59 s more): 9 of 90 came damaged" in why
    bench.show(*bench.mirror.records, record("decode-1"))
    pairs = bench.snapshot().replicas.refused_pairs
    assert list(pairs) == [("prefill-0", "decode-0")]


def test_what_decode_leaves_alone_is_logged_once_and_when_it_is_over(bench: Bench) -> None:
    held = Quarantine("prefill-0", 1, "grpc", 1.0, 59.0, "9 of the last 90 cells came damaged")
    bench.show(record("decode-0"))
    for for_s in (1.0, 2.0):
        quarantines = (replace(held, for_s=for_s),)
        bench.show(record("decode-0", load=replace(IDLE, quarantines=quarantines)))
    assert bench.lines.getvalue().count("worker.quarantine") == 1
    assert "9 of the last 90 cells came damaged" in bench.lines.getvalue()
    bench.show(record("decode-0"))
    assert bench.lines.getvalue().count("worker.quarantine_over") == 1


@pytest.mark.parametrize("wire", ["", "call"])
def test_nothing_is_fetched_from_who_is_in_quarantine_for_it(bench: Bench, wire: str) -> None:
    held = Quarantine("prefill-0", 1, wire, 1.0, 59.0, "9 of the last 90 cells came damaged")
    load = replace(IDLE, quarantines=(held,))
    shown = record("prefill-0"), record("prefill-1", load=load), record("decode-0")
    bench.show(*shown)
    ways = bench.snapshot().replicas.fetches
    assert ways.get(("prefill-0", "prefill-1")) is None
    assert ways.get(("decode-0", "prefill-1")) is not None
    assert ways.get(("prefill-1", "prefill-0")) is not None
    assert set(chosen_pairs(bench.snapshot())) == {"prefill-0", "prefill-1"}
    bench.show(record("prefill-0", epoch=2), *shown[1:])
    assert bench.snapshot().replicas.fetches.get(("prefill-0", "prefill-1")) is not None
