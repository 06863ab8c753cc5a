"""Whether a request is served now, waits at the router, or is refused: pure, like the policy.

Waiting and refusing are candidates beside the ways to serve it, with costs in milliseconds:

    wait      what is ahead in the line, shared by those who compute, then the best way there is
    reject    what the request can wait at most: being told so at once is better than any longer

A way that is usable is cheaper than waiting for it, so `wait` is left for when every worker is over
its bar, or others were in line before. What cannot be served within its deadline, strict targets
or the router's patience is refused, with the time after which it could be, as far as the curves
say. Nothing is refused for a prediction that no measurement stands behind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from router.ways import Candidate, Decision, Pins, Prompt

LEAST_RETRY_MS = 100.0
MOST_RETRY_MS = 60_000.0


class Action(Enum):
    SERVE = "serve"
    WAIT = "wait"
    REJECT = "reject"
    NOBODY = "nobody"  # no worker can, and no waiting in line changes that


@dataclass(frozen=True, slots=True)
class LineView:
    """The line as one request sees it. `first`: nobody is before it."""

    ahead_ms: float = 0.0  # of computing, in all
    patience_ms: float = inf  # how long it may still wait
    first: bool = True
    full: str = ""  # why it gets no place


@dataclass(frozen=True, slots=True)
class Option:
    """One way not to serve the request now."""

    action: Action
    terms: Mapping[str, float]
    refused: str = ""

    @property
    def cost_ms(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """`hopeless`: not even an idle worker could do it. `retry_after_ms` is 0 for "at any time".

    A request that is served has the decision's reason.
    """

    action: Action
    reason: str = ""
    retry_after_ms: float = 0.0
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class _Prospect:
    """The best that waiting can lead to."""

    cost_ms: float = inf
    ttft_ms: float = inf
    terms: dict[str, float] = field(default_factory=dict)


def admit(prompt: Prompt, decision: Decision, line: LineView, pins: Pins | None = None) -> Verdict:
    """`decision` is the policy's, made with the workers' bars."""
    pinned = pins is not None and bool(pins.prefill or pins.decode)
    if decision.chosen is not None and (line.first or pinned):
        return Verdict(Action.SERVE)
    if decision.chosen is not None or decision.barred is not None:
        return _wait_or_reject(_prospect(decision, line), line, _patience_ms(prompt, line))
    if decision.late:
        return _too_late(prompt, decision.late)
    return Verdict(Action.NOBODY, decision.reason)


def options(
    prompt: Prompt, decision: Decision, line: LineView, verdict: Verdict
) -> tuple[Option, Option]:
    """What waiting and refusing would cost, for an explanation."""
    serves = verdict.action is Action.SERVE
    prospect = _prospect(decision, line)
    if prospect.cost_ms == inf:
        why_not = "no worker could take it after any wait"
    else:
        why_not = line.full or ("a worker is under its bar" if serves else "")
    patience = {"patience": min(_patience_ms(prompt, line), MOST_RETRY_MS)}
    refused = "there is a way to serve it" if serves else ""
    return Option(Action.WAIT, prospect.terms, why_not), Option(Action.REJECT, patience, refused)


def _patience_ms(prompt: Prompt, line: LineView) -> float:
    return max(0.0, min(line.patience_ms, prompt.left_ms))


def _prospect(decision: Decision, line: LineView) -> _Prospect:
    best = decision.chosen or decision.barred
    if best is None:
        return _Prospect()
    ahead_ms = line.ahead_ms / max(1, decision.num_computing)
    terms = {"line": ahead_ms, **best.terms.named()}
    return _Prospect(ahead_ms + best.terms.cost_ms, ahead_ms + best.terms.ttft_ms, terms)


def _wait_or_reject(prospect: _Prospect, line: LineView, patience_ms: float) -> Verdict:
    over_ms = prospect.ttft_ms - patience_ms
    if line.full:
        retry_ms = _bounded(prospect.ttft_ms / 2)
        return Verdict(Action.REJECT, line.full, retry_ms)
    if over_ms > 0:
        reason = (
            f"every worker is over its bar: the first token would take {prospect.ttft_ms:.0f} ms,"
            f" {patience_ms:.0f} ms are left"
        )
        return Verdict(Action.REJECT, reason, _bounded(over_ms))
    reason = f"waits at the router, {prospect.ttft_ms:.0f} ms to the first token"
    return Verdict(Action.WAIT, reason)


def _too_late(prompt: Prompt, late_ways: Sequence[Candidate]) -> Verdict:
    """Refused for its own targets: worth repeating when the queue is what makes it late."""
    reasons = list(dict.fromkeys(each.refused for each in late_ways))
    reason = "the request cannot be served in time: " + "; ".join(reasons[:3])
    over_ms = [each.terms.ttft_ms - prompt.left_ms for each in late_ways]
    in_time = [
        over for each, over in zip(late_ways, over_ms, strict=True) if over <= each.terms.queue_ms
    ]
    if not in_time:
        return Verdict(Action.REJECT, reason, hopeless=True)
    return Verdict(Action.REJECT, reason, _bounded(min(in_time)))


def _bounded(ms: float) -> float:
    return max(LEAST_RETRY_MS, min(MOST_RETRY_MS, ms))
