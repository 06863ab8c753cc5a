"""What decode workers leave alone, the router leaves alone, too."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from prefix_index.index import Load
from prefix_index.quarantine import Quarantine
from protos import worker_pb2 as wpb
from router.errors import (
    Unavailable,
)
from router.policy import choose
from router.snapshot import Snapshot
from tests.router.fakes import (
    IDLE,
    IDLE_DECODE,
    Abort,
    FakeCluster,
    FakeWorker,
    decode_script,
    ids_of,
    never,
    usage_of,
    without_pins,
)
from tests.router.fleet_bench import Bench, record
from tests.router.test_faults import ALL, SLOWER, UNAVAILABLE


def chosen_pairs(snapshot: Snapshot) -> dict[str, tuple[str, ...]]:
    """The wires of each pair that may be used, by its prefill worker."""
    decision = choose(snapshot.prompt, snapshot.replicas)
    usable = [each for each in decision.candidates if each.prefill and not each.refused]
    return {each.prefill.name: each.wires for each in usable if each.prefill}


def in_quarantine(*prefills: str) -> Load:
    reason = "9 of the last 90 cells came damaged"
    held = (Quarantine(name, 1, "", 1.0, 59.0, reason) for name in prefills)
    return replace(IDLE_DECODE, quarantines=tuple(held))


async def test_with_its_prefill_workers_in_quarantine_decode_serves_alone(
    cluster: FakeCluster,
) -> None:
    prefills = [await cluster.add(f"prefill-{number}") for number in range(2)]
    await cluster.add("decode-0", load=in_quarantine("prefill-0", "prefill-1"))
    events = await cluster.ask(**without_pins())
    assert ids_of(events) == ALL
    assert (usage_of(events).journey.attempts, usage_of(events).journey.prefill) == (1, "")
    with pytest.raises(Unavailable, match=r"is in quarantine .*: 9 of the last 90 cells"):
        await cluster.ask()  # pinned to prefill-0
    await cluster.add("decode-1", load=in_quarantine("prefill-0"))
    events = await cluster.ask(**without_pins())
    journey = usage_of(events).journey
    assert (journey.prefill, journey.decode) == ("prefill-1", "decode-1")
    assert [len(each.requests) for each in prefills] == [0, 1]
    await cluster.check()


async def test_the_router_counts_what_is_left_alone(cluster: FakeCluster) -> None:
    await cluster.add("decode-0", load=in_quarantine("prefill-0", "prefill-1"))
    cluster.fleet.refresh()
    shown = generate_latest(cluster.metrics.registry).decode()
    assert 'kvferry_quarantines{subject="worker"} 2.0' in shown
    assert 'kvferry_quarantines{subject="wire"} 0.0' in shown


async def test_a_refusal_for_quarantine_costs_an_attempt_and_no_request(
    cluster: FakeCluster,
) -> None:
    """Until the router has heard of it."""

    async def refuse_one(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        if asked.source.worker == "prefill-0":
            raise Abort(UNAVAILABLE, "decode-0 takes nothing from prefill-0")
        async for event in decode_script(worker, asked):
            yield event

    async def compute_on(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        yield wpb.PrefillEvent(admitted=wpb.PrefillAdmitted())
        await never()

    await cluster.add("prefill-0", compute_on)
    await cluster.add("prefill-1", load=SLOWER)
    await cluster.add("decode-0", refuse_one)
    events = await cluster.ask(**without_pins())
    assert ids_of(events) == ALL
    journey = usage_of(events).journey
    assert (journey.attempts, journey.prefill) == (2, "prefill-1")
    await cluster.check()


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
