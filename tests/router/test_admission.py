"""Serve, wait or refuse: pure, and each with the figures that made it so."""

import pytest

from router.admission import Action, LineView, Verdict, admit, options
from router.policy import choose
from router.targets import Targets
from router.ways import Decision, Pins, Prompt, Replica, Replicas
from tests.router.replicas import decode, prefill

BAR_MS = 1000.0


def prompt(**fields: object) -> Prompt:
    return Prompt(1000, 6_250, 30, key=b"p", **fields)  # type: ignore[arg-type]


def busy(name: str, queue_ms: float, **fields: object) -> Replica:
    return prefill(name, queued_ms=queue_ms, measured=True, **fields)


def decided(
    asked: Prompt, *prefills: Replica, line: LineView | None = None, pins: Pins | None = None
) -> tuple[Decision, Verdict]:
    slow = decode(ms_per_token=50.0, queued_ms=2000.0, measured=True, joined_step_ms=20.0)
    decision = choose(asked, Replicas(list(prefills), [slow]), pins, bar_ms=BAR_MS)
    return decision, admit(asked, decision, line or LineView(), pins)


def test_a_worker_under_its_bar_serves_and_waiting_would_cost_no_less() -> None:
    decision, verdict = decided(prompt(), busy("p0", 900.0), busy("p1", 1100.0))
    assert verdict.action is Action.SERVE and decision.chosen is not None
    assert decision.chosen.computing.name == "p0"
    waiting, rejecting = options(prompt(), decision, LineView(), verdict)
    assert waiting.cost_ms >= decision.chosen.terms.cost_ms
    assert waiting.refused == "a worker is under its bar" and rejecting.refused != ""


def test_when_every_worker_is_over_its_bar_the_request_waits() -> None:
    line = LineView(ahead_ms=900.0, patience_ms=30_000)
    decision, verdict = decided(prompt(), busy("p0", 1100.0), busy("p1", 1200.0), line=line)
    assert verdict.action is Action.WAIT and decision.chosen is None
    refused = {each.computing.name: each.refused for each in decision.candidates}
    assert refused["p0"] == "p0 has 1100 ms of work ahead, its bar is 1000 ms"
    waiting, rejecting = options(prompt(), decision, line, verdict)
    assert waiting.terms["line"] == 450.0  # two prefill workers share it
    assert waiting.terms["queue"] == 1100.0 and waiting.refused == ""
    assert rejecting.cost_ms == 30_000


def test_what_would_wait_longer_than_anyone_should_is_refused_with_the_time_to_come_back() -> None:
    _, verdict = decided(prompt(), busy("p0", 5000.0), line=LineView(patience_ms=4000.0))
    assert verdict.action is Action.REJECT and not verdict.hopeless
    assert verdict.retry_after_ms == pytest.approx(5000 + 1000 - 4000)
    assert "6000 ms" in verdict.reason and "4000 ms are left" in verdict.reason


def test_who_comes_later_stays_behind_those_in_line_unless_it_is_pinned() -> None:
    behind = LineView(ahead_ms=100.0, patience_ms=30_000, first=False)
    assert decided(prompt(), busy("p0", 0.0), line=behind)[1].action is Action.WAIT
    pins = Pins(prefill="p0")
    assert decided(prompt(), busy("p0", 9999.0), line=behind, pins=pins)[1].action is Action.SERVE


def test_a_full_line_refuses_with_its_size() -> None:
    full = LineView(patience_ms=30_000, first=False, full="128 requests are waiting")
    _, verdict = decided(prompt(), busy("p0", 5000.0), line=full)
    assert (verdict.action, verdict.reason) == (Action.REJECT, "128 requests are waiting")
    assert verdict.retry_after_ms == 3000.0


def test_a_deadline_that_a_queue_spoils_is_worth_trying_again_later() -> None:
    """The queue is 800 ms, the prompt 1000: 1500 are not enough now, and will be in 300 ms."""
    _, verdict = decided(prompt(left_ms=1500.0), busy("p0", 800.0))
    assert verdict.action is Action.REJECT and not verdict.hopeless
    assert verdict.retry_after_ms == pytest.approx(300.0)
    assert "p0 would take 1800 ms to the first token, 1500 ms are left" in verdict.reason


def test_a_deadline_that_no_idle_worker_could_keep_is_refused_for_good() -> None:
    _, verdict = decided(prompt(left_ms=500.0), busy("p0", 0.0))
    assert verdict.action is Action.REJECT and verdict.hopeless


def test_nothing_is_refused_for_a_speed_that_nobody_has_measured() -> None:
    guess = prefill("p0", queued_ms=0.0)
    assert decided(prompt(left_ms=500.0), guess)[1].action is Action.SERVE


def test_a_dearer_way_that_is_in_time_is_taken_before_a_cheaper_one_that_is_not() -> None:
    warm = busy("warm", 900.0, matched_blocks=60)
    cold = busy("cold", 0.0, prompt_ms=30.0)
    assert decided(prompt(), warm, cold)[0].chosen.computing.name == "warm"  # type: ignore[union-attr]
    decision, _ = decided(prompt(left_ms=100.0), busy("warm", 900.0, matched_blocks=60))
    assert decision.chosen is None
    quick = busy("quick", 0.0, ms_per_token=0.01, dispatch_ms=2000.0)
    asked = prompt(left_ms=1200.0)
    assert decided(asked, quick, cold)[0].chosen.computing.name == "cold"  # type: ignore[union-attr]


def test_a_target_that_would_be_missed_makes_a_way_dearer_and_strictly_unusable() -> None:
    warm = busy("warm", 900.0, matched_blocks=60)  # 900 + 40
    cold = busy("cold", 0.0)  # 1000
    for targets, expected in (
        (Targets(), "warm"),
        (Targets(ttft_ms=920), "warm"),  # 20 ms late and 80 ms late
        (Targets(token_ms=5), "warm"),
    ):
        chosen = decided(prompt(targets=targets, output_tokens=10), warm, cold)[0].chosen
        assert chosen is not None and chosen.computing.name == expected
        late_ms = chosen.terms.lateness_ms
        assert late_ms == pytest.approx(
            2 * (20 if targets.ttft_ms else 0) + 2 * 10 * (15 if targets.token_ms else 0)
        )
    strict = prompt(targets=Targets(token_ms=5, strict=True))
    _, verdict = decided(strict, warm, cold)
    assert verdict.action is Action.REJECT
    assert "d0 would take 20.0 ms for each token, the target is 5 ms" in verdict.reason


def test_without_a_worker_that_could_ever_serve_it_nobody_is_said_to() -> None:
    _, verdict = decided(prompt(), pins=Pins(prefill="p9"))
    assert verdict.action is Action.NOBODY and "pinned to prefill p9" in verdict.reason
