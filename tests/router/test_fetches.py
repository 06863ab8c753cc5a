"""When a prefix is fetched from who holds it, and when it is not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.curves import LinkCurve
from router.lazily import Lazily
from router.policy import choose
from router.ways import Link, Pins, Replicas, Weights
from tests.router.replicas import PROMPT, candidate, decode, names, prefill

FETCHED = Link(LinkCurve(2.0, 1e-5))


def test_a_prefix_that_waits_elsewhere_is_fetched_where_that_costs_less_than_computing() -> None:
    """480 tokens of 6,250 bytes: 2 ms and 30 more, instead of 480 of computing."""
    warm, cold = prefill("warm", matched_blocks=30, queued_tokens=700), prefill("cold")
    ways = {("warm", "cold"): FETCHED, ("cold", "warm"): FETCHED}
    decision = choose(PROMPT, Replicas([warm, cold], [decode()], fetches=ways))
    assert str(decision.chosen) == "cold to d0 with blocks of warm"
    assert decision.chosen is not None and decision.chosen.fetch is not None
    fetch, terms = decision.chosen.fetch, decision.chosen.terms
    assert (fetch.holder.name, fetch.num_blocks, fetch.num_tokens) == ("warm", 30, 480)
    assert terms.fetch_ms == pytest.approx(32)
    assert (terms.compute_ms, fetch.saved_ms) == (520, 480)
    assert terms.ttft_ms == pytest.approx(32 + 520)
    assert terms.cost_ms == pytest.approx(sum(terms.named().values()))
    listed = [str(each) for each in decision.candidates]
    assert sorted(listed) == [
        "cold to d0",
        "cold to d0 with blocks of warm",
        "d0",
        "warm to d0",
    ]
    alone = choose(PROMPT, Replicas([warm, cold], [decode()], fetches=ways), Pins(), NO_FETCH)
    assert str(alone.chosen) == "cold to d0"


NO_FETCH = Weights(fetches=False)


@pytest.mark.parametrize(
    ("holder", "ways"),
    [
        ({}, {}),  # a way that failed lately is none
        ({}, {("warm", "cold"): Link(LinkCurve(2.0, 1e-3))}),
        ({"refused": "is draining"}, {("warm", "cold"): FETCHED}),
        ({"naming": "another model"}, {("warm", "cold"): FETCHED}),
        ({"block_size": 32, "matched_blocks": 15}, {("warm", "cold"): FETCHED}),
    ],
)
def test_what_cannot_be_fetched_sooner_than_computed_is_computed(
    holder: dict[str, object], ways: dict[tuple[str, str], Link]
) -> None:
    known: dict[str, object] = {"matched_blocks": 30, "queued_tokens": 5000}
    warm = prefill("warm", **(known | holder))
    decision = choose(PROMPT, Replicas([warm, prefill("cold")], [decode()], fetches=ways))
    assert str(decision.chosen) == "cold to d0"
    assert not any(each.fetch for each in decision.candidates)


def test_ways_to_fetch_are_looked_for_only_where_the_fastest_of_them_would_do() -> None:
    """They take 3 s at least, and all of the prompt 1 s; a queue of 2.5 s hides enough of them."""
    seen: list[tuple[str, str]] = []

    def way(pair: tuple[str, str]) -> Link:
        seen.append(pair)
        return Link(slow)

    slow = LinkCurve(0.0, 1e-3)
    warm = prefill("warm", matched_blocks=30, queued_tokens=5000)
    quick, idle = prefill("quick", queued_tokens=2500), prefill("idle")
    fleet = Replicas([warm, quick, idle], [decode()], fetches=Lazily(list, way), fastest_fetch=slow)
    assert str(choose(PROMPT, fleet).chosen) == "idle to d0"
    assert seen == [("warm", "quick")]


def test_a_fetch_hides_behind_the_queue_and_brings_only_what_is_lacking() -> None:
    """Also from a decode worker: what it holds need not be computed by prefill again."""
    held, busy = decode(matched_blocks=62), prefill("busy", matched_blocks=12, queued_tokens=20)
    decision = choose(
        PROMPT, Replicas([busy], [held], fetches={("d0", "busy"): FETCHED}), Pins(prefill="busy")
    )
    assert decision.chosen is not None and decision.chosen.fetch is not None
    assert decision.chosen.fetch.num_tokens == (62 - 12) * 16
    assert decision.chosen.terms.fetch_ms == pytest.approx(2 + 800 * 6_250 * 1e-5 - 20)
    assert decision.chosen.terms.compute_ms == 8


@given(
    st.lists(
        st.tuples(st.integers(0, 62), st.integers(0, 2000), st.integers(0, 3)),
        min_size=2,
        max_size=5,
    )
)
def test_whatever_may_be_fetched_the_chosen_way_is_the_cheapest_of_all(
    fleet: list[tuple[int, int, int]],
) -> None:
    prefills = [
        prefill(f"p{at}", matched_blocks=blocks, queued_tokens=queue)
        for at, (blocks, queue, _) in enumerate(fleet)
    ]
    ways = {
        (f"p{here}", f"p{there}"): Link(LinkCurve(1.0 + each[2], 1e-5))
        for here, each in enumerate(fleet)
        for there in range(len(fleet))
    }
    decision = choose(PROMPT, Replicas(prefills, [decode()], fetches=ways))
    assert decision.chosen is not None
    costs = [each.terms.cost_ms for each in decision.candidates if not each.refused]
    assert decision.chosen.terms.cost_ms == pytest.approx(min(costs), abs=0.2)


def test_blocks_in_host_memory_cost_their_way_back_and_still_beat_computing() -> None:
    """3 MB at 100 kB a ms: 30 ms, of which a queue of 20 hides as much."""
    slowly = Weights(host_bytes_per_ms=1e5)
    here, beside = prefill("here", matched_blocks=30), prefill("beside", matched_blocks=30)
    swapped = replace(beside, host_blocks=30)
    fleet = Replicas([swapped, here, prefill("cold")], [decode()])
    decision = choose(PROMPT, fleet, weights=slowly)
    assert names(decision) == ("here", "d0")
    assert candidate(decision, "beside").terms.fetch_ms == pytest.approx(30)
    busy = replace(swapped, queued_tokens=20)
    decision = choose(PROMPT, Replicas([busy, prefill("cold")], [decode()]), weights=slowly)
    assert names(decision) == ("beside", "d0")
    assert candidate(decision, "beside").terms.fetch_ms == pytest.approx(10)
    alone = choose(PROMPT, Replicas([], [decode(matched_blocks=30, host_blocks=30)]), None, slowly)
    assert candidate(alone, "").terms.fetch_ms == pytest.approx(30)
