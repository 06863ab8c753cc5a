"""Whom the router doubts, how much, and for how long."""

from engine.clock import ManualClock
from router.doubts import Doubts, Party
from tests.router.fakes import FakeCluster


def why(doubts: Doubts, party: Party) -> str:
    return doubts.reasons().get(party, "")


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
