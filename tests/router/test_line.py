"""Who is served next when not everybody can be: by shares, whatever anybody sends."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.clock import ManualClock
from router.errors import Overloaded
from router.line import Line, Place
from router.shares import Shares


def take_first(line: Line, places: list[Place]) -> Place:
    (first,) = [each for each in places if line.is_first(each)]
    assert first.first.is_set()
    line.shares.serve(first.tenant, first.tokens)
    line.leave(first)
    places.remove(first)
    return first


def joined(line: Line, *tenants: str, tokens: float = 100.0, priority: int = 0) -> list[Place]:
    return [line.join(tenant, priority, tokens, compute_ms=tokens) for tenant in tenants]


def test_a_flood_of_one_tenant_does_not_make_another_wait_for_it() -> None:
    line = Line(ManualClock(), max_waiting=50)
    places = joined(line, *["flood"] * 40) + joined(line, "small", "small")
    assert [take_first(line, places).tenant for _ in range(4)] == [
        "flood",
        "small",
        "flood",
        "small",
    ]


def test_tokens_count_and_not_requests() -> None:
    line = Line(ManualClock(), max_waiting=100)
    places = joined(line, *["long"] * 10, tokens=400) + joined(line, *["short"] * 40, tokens=100)
    served = Counter(take_first(line, places).tenant for _ in range(25))
    assert served == {"long": 5, "short": 20}


def test_a_weight_of_three_gets_three_times_as_much() -> None:
    line = Line(ManualClock(), max_waiting=100, weights={"gold": 3.0})
    places = joined(line, *["gold"] * 40, *["plain"] * 40)
    served = Counter(take_first(line, places).tenant for _ in range(40))
    assert served == {"gold": 30, "plain": 10}


def test_a_tenant_that_was_alone_owes_nothing_and_one_that_was_away_has_saved_nothing() -> None:
    shares = Shares()
    for _ in range(1000):
        shares.serve("busy", 100)
    shares.serve("new", 100)
    assert shares.start("new") == pytest.approx(shares.start("busy"), abs=100)
    order = []
    for _ in range(10):
        tenant = min(("busy", "new"), key=shares.start)
        shares.serve(tenant, 100)
        order.append(tenant)
    assert Counter(order) == {"busy": 5, "new": 5}


def test_what_an_answer_cost_counts_as_well() -> None:
    shares = Shares()
    for tenant in ("terse", "chatty"):
        shares.serve(tenant, 100)
    shares.add("chatty", 500)
    order = []
    for _ in range(7):
        tenant = min(("terse", "chatty"), key=shares.start)
        shares.serve(tenant, 100)
        order.append(tenant)
    assert Counter(order) == {"terse": 6, "chatty": 1}


def test_a_priority_orders_its_own_tenants_requests_and_takes_nothing_from_others() -> None:
    line = Line(ManualClock())
    late = joined(line, "a", "b")
    urgent = joined(line, "a", priority=-5)
    places = late + urgent
    order = [take_first(line, places) for _ in range(3)]
    assert order.index(urgent[0]) < order.index(late[0])
    assert [each.tenant for each in order] in (["b", "a", "a"], ["a", "b", "a"])


def test_a_full_line_pushes_out_the_last_of_who_crowds_it_and_nobody_else() -> None:
    line = Line(ManualClock(), max_waiting=4)
    flood = joined(line, "flood", "flood", "flood", "flood")
    assert "4 requests are waiting" in line.why_full("flood")
    with pytest.raises(Overloaded, match="the limit is 4"):
        line.join("flood", 0, 1, 1)
    joined(line, "small")
    assert [each.pushed for each in flood] == [False, False, False, True]
    joined(line, "small")
    assert [each.pushed for each in flood] == [False, False, True, True]
    assert line.why_full("small") != ""  # two and two: nobody crowds
    assert line.tenants() == {"flood": 2, "small": 2}


def test_a_place_costs_what_is_before_it_by_share() -> None:
    line = Line(ManualClock())
    joined(line, *["flood"] * 50)
    assert line.ahead_ms("flood", 0, 100, None) == 5000
    assert line.ahead_ms("flood", -1, 100, None) == 0
    assert line.ahead_ms("small", 0, 100, None) == 100
    mine = joined(line, "small", "small")
    assert line.ahead_ms("small", 0, 100, mine[1]) == 100 + 200


async def test_who_becomes_first_is_told() -> None:
    line = Line(ManualClock())
    one, two = joined(line, "a", "a")
    await line.turn(one, 0.5)
    await line.turn(two, 0.01)
    assert line.is_first(one) and not line.is_first(two)
    line.leave(one)
    await line.turn(two, 0.5)
    assert line.is_first(two)
    line.leave(two)
    line.leave(two)
    line.check()


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), weights=st.lists(st.floats(0.5, 8), min_size=2, max_size=4))
def test_backlogged_tenants_are_served_by_weight_whatever_their_requests_cost(
    seed: int, weights: list[float]
) -> None:
    """No two differ, in tokens over weight, by more than each one's largest request."""
    rng = random.Random(seed)
    names = [f"t{number}" for number in range(len(weights))]
    shares = Shares(dict(zip(names, weights, strict=True)))
    served = dict.fromkeys(names, 0.0)
    for _ in range(300):
        tenant = min(names, key=shares.start)
        tokens = rng.uniform(1, 1000)
        shares.serve(tenant, tokens)
        served[tenant] += tokens / shares.weight(tenant)
        spread = max(served.values()) - min(served.values())
        assert spread <= 1000 / min(weights) * 2
