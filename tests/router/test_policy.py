"""The decision is pure: every expectation here follows from its arguments alone."""

import random
from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.curves import INSTANT, LinkCurve, least_of
from router.lazily import Lazily
from router.policy import choose
from router.targets import Targets
from router.ways import Link, Pins, Prompt, Replica, Replicas, Weights
from tests.router.replicas import LIGHT, PROMPT, candidate, decode, names, prefill


def test_a_cached_prefix_wins_until_its_queue_costs_more() -> None:
    idle = prefill("idle")
    for queued, expected in [(511, "warm"), (513, "idle")]:
        warm = prefill("warm", matched_blocks=32, queued_tokens=queued)
        assert names(choose(PROMPT, Replicas([idle, warm], [decode()]))) == (expected, "d0")


def test_the_terms_of_a_pair_add_up_to_its_cost() -> None:
    slow = {("p0", "d0"): Link(LinkCurve(0.0, 1 / 1000), in_flight_bytes=7000)}  # the bottleneck
    decision = choose(
        PROMPT,
        Replicas(
            [prefill(matched_blocks=30, queued_tokens=50)],
            [decode(matched_blocks=3, waiting=2, running=10, step_ms=4.0)],
            links=slow,
        ),
    )
    terms = candidate(decision, "p0").terms
    assert terms.queue_ms == 50.0
    assert terms.compute_ms == 1000 - 480
    assert terms.link_ms == pytest.approx((60 * 100_000 + 7000) / 1000 - 520 * 29 / 30)
    assert terms.interference_ms == 0.0
    assert terms.admission_ms == pytest.approx(5.0 + (2 + 1 + 0.1 * 10) * 4.0)
    assert terms.cost_ms == pytest.approx(sum(terms.named().values()))


def test_a_busy_fleet_waits_for_work_that_is_done_and_an_idle_one_does_not() -> None:
    """The warm replica's queue is longer than what its cache would save this prompt alone."""
    warm, cold = prefill("warm", matched_blocks=32, queued_tokens=700), prefill("cold")
    idle, busy = (
        Replicas([warm, cold], [decode()], prompts_per_ms=rate, busy=busy)
        for rate, busy in ((0.0002, 0.1), (0.002, 1.6))
    )
    assert names(choose(PROMPT, idle))[0] == "cold"
    assert names(choose(PROMPT, busy))[0] == "warm"
    assert names(choose(PROMPT, busy, weights=Weights(followers=0)))[0] == "cold"


def test_followers_come_while_the_queues_last_and_wait_for_what_is_computed() -> None:
    fleet = Replicas(
        [prefill(queued_tokens=500), prefill("p1")], [decode()], prompts_per_ms=0.004, busy=1.0
    )
    decision = choose(PROMPT, fleet)
    # 0.002 prompts a ms come to each, of 250 ms; half busy, so queues of 250 ms take 500 to empty.
    followers = 0.002 * (250 + 250 / 2) / 0.5
    for name in ("p0", "p1"):
        assert candidate(decision, name).terms.followers_ms == pytest.approx(followers * 1000)
    assert candidate(decision, "p0").terms.ttft_ms == 1500
    drowned = Replicas([prefill()], [decode()], prompts_per_ms=0.001, busy=5.0)
    most = candidate(choose(PROMPT, drowned), "p0").terms.followers_ms
    assert most == pytest.approx(0.001 * 5000 / 2 / 0.1 * 1000)


def test_decode_alone_pays_for_every_sequence_it_delays() -> None:
    alone = [
        candidate(choose(PROMPT, Replicas([], [decode(running=running)])), "").terms
        for running in (0, 3)
    ]
    assert [terms.compute_ms for terms in alone] == [1000, 1000]
    assert [terms.interference_ms for terms in alone] == [1000, 4000]


def test_a_prompt_that_decode_holds_stays_there_and_a_cold_one_does_not() -> None:
    """A second turn: decode made most of it; prefill knows only how it began."""
    held = decode(matched_blocks=61)
    assert names(choose(PROMPT, Replicas([prefill(matched_blocks=30)], [held]))) == ("", "d0")
    assert names(choose(PROMPT, Replicas([prefill()], [decode()]))) == ("p0", "d0")
    busy = decode(matched_blocks=61, running=100)
    assert names(choose(PROMPT, Replicas([prefill(matched_blocks=30)], [busy]))) == ("p0", "d0")


def test_a_link_hides_behind_the_compute_it_overlaps() -> None:
    fast = choose(PROMPT, Replicas([prefill()], [decode()], {}, {("p0", "d0"): LIGHT}))
    assert candidate(fast, "p0").terms.link_ms == 0.0
    lone = Prompt(1000, 6_250, num_layers=1)
    shown = candidate(choose(lone, Replicas([prefill()], [decode()])), "p0").terms
    assert shown.link_ms == pytest.approx(63 * 100_000 / 500_000)


def test_blocks_that_decode_holds_are_not_shipped() -> None:
    lone = Prompt(1000, 6_250, num_layers=1)
    fleet = Replicas([prefill(matched_blocks=62)], [decode(matched_blocks=62)])
    assert candidate(choose(lone, fleet), "p0").terms.link_ms == pytest.approx(100 / 500)


def test_the_last_token_is_always_computed() -> None:
    for num_tokens, matched_blocks, block_size, uncached in (
        (64, 4, 16, 16),
        (65, 4, 16, 1),
        (63, 9, 16, 15),
        (1, 0, 16, 1),
        (64, 2, 32, 32),
        (65, 2, 32, 1),
        (127, 1, 64, 63),
    ):
        replica = decode(matched_blocks=matched_blocks, block_size=block_size)
        assert Prompt(num_tokens, 1, 1).uncached_tokens(replica) == uncached


@pytest.mark.parametrize(
    ("prefill_size", "decode_size", "matched_blocks", "lacking_tokens"),
    [(16, 16, 3, 1008 - 48), (64, 16, 3, 1008 - 48), (16, 64, 3, 1008 - 192), (64, 64, 3, 832)],
)
def test_a_link_carries_what_decode_lacks_in_blocks_of_the_smaller_size(
    prefill_size: int, decode_size: int, matched_blocks: int, lacking_tokens: int
) -> None:
    held = decode(matched_blocks=matched_blocks, block_size=decode_size)
    sent = PROMPT.shipped_bytes(prefill(block_size=prefill_size), held)
    assert sent == lacking_tokens * 6_250


def test_a_prompt_takes_as_many_blocks_of_a_worker_as_they_are_large() -> None:
    small = decode(total_blocks=62)
    assert choose(PROMPT, Replicas([], [small])).reason.endswith("the prompt needs 63")
    assert names(choose(PROMPT, Replicas([], [decode(total_blocks=16, block_size=64)]))) == (
        "",
        "d0",
    )


def test_a_full_decode_is_left_while_another_has_room() -> None:
    full, roomy = decode("full", free_blocks=10), decode("roomy", step_ms=900.0)
    assert names(choose(PROMPT, Replicas([prefill()], [full, roomy]))) == ("p0", "roomy")


def test_a_crowded_decode_is_left_for_an_idle_one() -> None:
    crowded, idle = decode("crowded", step_ms=20.0, running=20), decode("idle", step_ms=20.0)
    assert names(choose(PROMPT, Replicas([prefill()], [crowded, idle]))) == ("p0", "idle")


def test_equal_replicas_share_the_prompts_and_equal_routers_agree() -> None:
    fleet = Replicas([prefill(f"p{i}") for i in range(4)], [decode()])
    backwards = Replicas(fleet.prefills[::-1], fleet.decodes)
    counts: Counter[str] = Counter()
    for number in range(400):
        prompt = Prompt(1000, 6_250, 30, key=number.to_bytes(4, "little"))
        decision = choose(prompt, fleet)
        assert names(decision) == names(choose(prompt, backwards))
        counts[names(decision)[0]] += 1
    assert counts.keys() == {"p0", "p1", "p2", "p3"} and min(counts.values()) > 60
    assert "the prompt's hash decided" in choose(PROMPT, fleet).reason


def test_of_equal_costs_whoever_was_less_busy_lately_wins_and_cost_comes_first() -> None:
    fleet = Replicas([prefill("a", busier=2), prefill("b", busier=1), prefill("c")], [decode()])
    decisions = [
        choose(replace(PROMPT, key=bytes([number])), replicas)
        for replicas in (fleet, replace(fleet, prefills=fleet.prefills[:2]))
        for number in range(20)
    ]
    assert [names(each)[0] for each in decisions] == ["c"] * 20 + ["b"] * 20
    assert decisions[0].reason.endswith("as much as b to d0: it was less busy lately")
    dearer = [prefill("a", busier=9), prefill("c", queued_tokens=1)]
    assert names(choose(PROMPT, replace(fleet, prefills=dearer)))[0] == "a"


def test_a_replica_more_moves_only_the_prompts_it_takes() -> None:
    before = Replicas([prefill(f"p{i}") for i in range(3)], [decode()])
    after = Replicas([*before.prefills, prefill("p3")], [decode()])
    for number in range(200):
        prompt = Prompt(1000, 6_250, 30, key=number.to_bytes(4, "little"))
        moved = names(choose(prompt, after))
        assert moved in (names(choose(prompt, before)), ("p3", "d0"))


@pytest.mark.parametrize(
    ("replicas", "pins", "reason"),
    [
        (([prefill(refused="is draining")], [decode()]), Pins(prefill="p0"), "p0 is draining"),
        (([prefill()], [decode(refused="is draining")]), Pins(), "d0 is draining"),
        (([prefill()], [decode()]), Pins(prefill="p9"), "pinned to prefill p9"),
        (([prefill()], [decode()]), Pins(decode="d9"), "pinned to decode d9"),
        (([prefill()], [decode()]), Pins(prefill="p0", wire="nccl"), "the wire nccl"),
        (
            ([prefill(wires=("nccl",))], [decode()]),
            Pins(prefill="p0"),
            "p0 (nccl) and d0 (grpc) do not have a wire in common",
        ),
        (([], [decode(total_blocks=62)]), Pins(), "62 blocks in all, the prompt needs 63"),
        (([prefill()], []), Pins(), "no decode replica is live"),
    ],
)
def test_what_cannot_be_used_is_never_chosen_and_says_why(
    replicas: tuple[list[Replica], list[Replica]], pins: Pins, reason: str
) -> None:
    decision = choose(PROMPT, Replicas(*replicas), pins)
    assert decision.chosen is None
    assert reason in decision.reason


def test_a_pair_that_does_not_match_is_refused_and_others_are_not() -> None:
    fleet = Replicas(
        [prefill("p0"), prefill("p1")], [decode()], {("p0", "d0"): "dtype differs: bf16, fp32"}
    )
    decision = choose(PROMPT, fleet)
    assert names(decision) == ("p1", "d0")
    assert candidate(decision, "p0").refused == "dtype differs: bf16, fp32"
    assert decision.candidates[-1].prefill is fleet.prefills[0]


def test_pins_are_followed_whatever_they_cost() -> None:
    fleet = Replicas([prefill("p0"), prefill("dear", ms_per_token=99.0)], [decode()])
    assert names(choose(PROMPT, fleet, Pins(prefill="dear"))) == ("dear", "d0")
    assert names(choose(PROMPT, fleet, Pins(no_prefill=True))) == ("", "d0")


@pytest.mark.parametrize(
    ("here", "there", "wire"),
    [("host-a", "host-a", "shm"), ("host-a", "host-b", "tcp"), ("", "", "tcp")],
)
def test_memory_is_shared_only_on_one_host(here: str, there: str, wire: str) -> None:
    wires = ("shm", "tcp", "gloo", "grpc")
    fleet = Replicas([prefill(wires=wires, host=here)], [decode(wires=wires, host=there)])
    chosen = choose(PROMPT, fleet).chosen
    assert chosen is not None and chosen.wire == wire


def test_the_wire_is_the_first_that_both_offer() -> None:
    fleet = Replicas([prefill(wires=("nccl", "gloo", "grpc"))], [decode(wires=("grpc", "gloo"))])
    chosen = choose(PROMPT, fleet).chosen
    assert chosen is not None and chosen.wire == "gloo"
    pinned = choose(PROMPT, fleet, Pins(wire="grpc")).chosen
    assert pinned is not None and pinned.wire == "grpc"


@given(
    speeds=st.lists(st.floats(0.01, 50), min_size=1, max_size=4),
    queues=st.lists(st.integers(0, 5000), min_size=4, max_size=4),
    matched=st.lists(st.integers(0, 80), min_size=5, max_size=5),
    running=st.integers(0, 64),
    num_tokens=st.integers(1, 1200),
    interference=st.floats(0, 4),
)
def test_the_cheapest_usable_candidate_is_chosen(
    speeds: list[float],
    queues: list[int],
    matched: list[int],
    running: int,
    num_tokens: int,
    interference: float,
) -> None:
    prefills = [
        prefill(f"p{i}", ms_per_token=speed, queued_tokens=queues[i], matched_blocks=matched[i])
        for i, speed in enumerate(speeds)
    ]
    fleet = Replicas(prefills, [decode(running=running, matched_blocks=matched[4])])
    decision = choose(
        Prompt(num_tokens, 6_250, 30), fleet, weights=Weights(interference=interference)
    )
    assert decision.chosen is decision.candidates[0]
    assert len(decision.candidates) == len(prefills) + 1
    costs = [each.terms.cost_ms for each in decision.candidates]
    assert all(value >= 0 for each in decision.candidates for value in each.terms.named().values())
    assert costs[0] <= min(costs) + 0.1


def test_a_session_stays_where_it_was_while_that_costs_little() -> None:
    stay = Prompt(1000, 6_250, 30, key=b"p", session=("p1", "d0"))
    for queue_ms, expected in [(9.0, "p1"), (11.0, "p0")]:
        fleet = Replicas([prefill("p0"), prefill("p1", queued_ms=queue_ms)], [decode()])
        decision = choose(stay, fleet)
        assert names(decision) == (expected, "d0")
        assert candidate(decision, "p0").terms.session_ms == 10.0
        assert candidate(decision, "p1").terms.session_ms == 0.0
    lone = Prompt(1000, 6_250, 30, key=b"p", session=("", "d1"))
    fleet = Replicas([prefill()], [decode("d0"), decode("d1")])
    assert names(choose(lone, fleet)) == ("p0", "d1")


def test_shipping_to_another_node_costs_a_little_and_to_another_zone_more() -> None:
    here = {"node": "n1", "zone": "z1"}
    for there, expected_ms in (
        (here, 0.0),
        ({"node": "n2", "zone": "z1"}, 1.0),
        ({"node": "n2", "zone": "z2"}, 10.0),
        ({}, 0.0),
    ):
        fleet = Replicas([prefill(**here)], [decode(**there)])
        assert candidate(choose(PROMPT, fleet), "p0").terms.distance_ms == expected_ms
    far, near = decode("far", zone="z2"), decode("near", zone="z1", waiting=1, step_ms=4.0)
    assert names(choose(PROMPT, Replicas([prefill(**here)], [far, near]))) == ("p0", "near")
    held = decode("far", zone="z2", matched_blocks=63)  # nothing is shipped
    terms = candidate(choose(PROMPT, Replicas([prefill(**here)], [held])), "p0").terms
    assert terms.distance_ms == 0.0


@given(
    queues=st.lists(st.integers(0, 3000), min_size=6, max_size=6),
    matched=st.lists(st.integers(0, 62), min_size=6, max_size=6),
    steps=st.lists(st.floats(0, 50), min_size=3, max_size=3),
    unusable=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6),
    slow_links=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6),
    untried_ms=st.sampled_from([0.0, 1e-5, 1e-3]),
    targets=st.sampled_from([Targets(), Targets(500, 10), Targets(500, 20, 0, True)]),
    bar_ms=st.sampled_from([inf, 1000.0, 100.0]),
    session=st.sampled_from([None, ("p1", "d2"), ("", "d0")]),
)
def test_the_search_finds_what_the_list_of_all_begins_with(
    queues: list[int],
    matched: list[int],
    steps: list[float],
    unusable: set[tuple[int, int]],
    slow_links: set[tuple[int, int]],
    untried_ms: float,
    targets: Targets,
    bar_ms: float,
    session: tuple[str, str] | None,
) -> None:
    prefills = [
        prefill(f"p{i}", queued_tokens=queues[i], matched_blocks=matched[i], measured=True)
        for i in range(3)
    ]
    decodes = [
        decode(f"d{i}", matched_blocks=matched[3 + i], joined_step_ms=steps[i], running=i)
        for i in range(3)
    ]
    slow, untried = LinkCurve(40.0, 1e-4), LinkCurve(0.0, untried_ms)
    fleet = Replicas(
        prefills,
        decodes,
        {(f"p{i}", f"d{j}"): "they differ" for i, j in unusable},
        {(f"p{i}", f"d{j}"): Link(slow) for i, j in slow_links},
        untried=Link(untried),
        fastest=least_of([slow, untried]),
    )
    asked = Prompt(
        1000, 6_250, 30, key=b"12345678", output_tokens=9, targets=targets, session=session
    )
    decision = choose(asked, fleet, bar_ms=bar_ms)
    blind = choose(asked, replace(fleet, fastest=INSTANT), bar_ms=bar_ms)
    assert str(blind.chosen) == str(decision.chosen)
    listed = decision.list_all()
    usable = [each for each in listed if not each.refused]
    assert (decision.chosen is None) == (not usable)
    if decision.chosen is not None:
        assert decision.chosen.terms.cost_ms <= usable[0].terms.cost_ms + 0.3
        assert any(str(each) == str(decision.chosen) for each in usable)
        assert decision.candidates[0] is decision.chosen
        assert len(decision.candidates) == len(listed) == 12
    elif decision.barred is not None:
        least = min(each.terms.cost_ms for each in listed if each.barred)
        assert decision.barred.terms.cost_ms <= least + 0.3
    else:
        assert bool(decision.late) == any(each.late for each in listed)


def test_of_a_thousand_pairs_over_slow_links_few_are_looked_at() -> None:
    """Queues differ, and no compute hides what would have to be shipped."""
    rng, seen = random.Random(1), []

    def link(pair: tuple[str, str]) -> Link | None:
        seen.append(pair)
        return None

    prefills = [prefill(f"p{at}", queued_tokens=rng.randrange(30_000)) for at in range(32)]
    slowly = {"ms_per_token": 100.0, "step_ms": 15.0}
    decodes = [decode(f"d{at}", running=rng.randrange(32), **slowly) for at in range(31)]
    holder = decode("d31", running=31, matched_blocks=40, **slowly)
    slow = LinkCurve(0.0, 1e-3)
    fleet = Replicas(
        prefills, [*decodes, holder], links=Lazily(list, link), untried=Link(slow), fastest=slow
    )
    chosen = choose(PROMPT, fleet).chosen
    assert chosen is not None and chosen.prefill is not None
    assert chosen.prefill.queue_ms == min(each.queue_ms for each in prefills)
    assert chosen.decode is holder
    assert len(seen) <= 3
