"""What a decision expected, and afterwards: how far off it was, and what would have been better.

Regret is how much sooner the first token would have come on the best alternative. Of an alternative
we know, in hindsight, when what was booked on it before this prompt had really been computed; from
then on this prompt would have been next. How long it would have computed there nobody has seen: its
curve says that, for the prefix the index promised there. An alternative whose queue has not drained
when the request ends would have been later still, and is no reason for regret. Work of other
routers on it is not known, and one that this router has lost sight of is not judged.

It is regret about the first token alone: a policy that makes one prompt wait so that others find
their cache pays for that here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from router.snapshot import Snapshot
from router.ways import Candidate, Decision
from router.worker import Worker


@dataclass(frozen=True, slots=True)
class Alternative:
    """A replica that could have computed the prompt, after those booked up to `place`."""

    worker: Worker
    place: int
    alone_ms: float  # to the first token, with nothing ahead

    def ttft_ms(self, made_at: float) -> float | None:
        """In hindsight; None: later than anyone has seen yet."""
        drained_at = self.worker.drained_at(self.place)
        if drained_at is None:
            return None
        return max(0.0, drained_at - made_at) * 1000 + self.alone_ms


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one attempt. `token_ms` is 0 where decode has not measured a step yet."""

    made_at: float
    computing: str
    streaming: str
    ttft_ms: float
    token_ms: float
    alternatives: tuple[Alternative, ...]

    def regret_ms(self, ttft_ms: float) -> float | None:
        """None where there was no alternative."""
        if not self.alternatives:
            return None
        seen = [each.ttft_ms(self.made_at) for each in self.alternatives]
        best = min((ms for ms in seen if ms is not None), default=ttft_ms)
        return max(0.0, ttft_ms - best)


def forecast(
    made_at: float, snapshot: Snapshot, decision: Decision, *, pinned: bool = False
) -> Forecast:
    """Before the attempt is booked. What is pinned had no alternative."""
    chosen = decision.chosen
    assert chosen is not None
    return Forecast(
        made_at=made_at,
        computing=chosen.computing.name,
        streaming=chosen.decode.name,
        ttft_ms=chosen.terms.ttft_ms,
        token_ms=chosen.decode.joined_step_ms,
        alternatives=() if pinned else tuple(_alternatives(snapshot, chosen)),
    )


def _alternatives(snapshot: Snapshot, chosen: Candidate) -> Iterator[Alternative]:
    """One for each other replica that could have computed it, with some decode replica."""
    prompt, replicas = snapshot.prompt, snapshot.replicas
    ways = [(each, snapshot.prefills[each.name]) for each in replicas.prefills]
    ways += [(each, snapshot.decodes[each.name]) for each in replicas.decodes]
    for replica, worker in ways:
        if not replica.refused and replica.name != chosen.computing.name:
            alone_ms = prompt.compute_ms(replica) + replica.dispatch_ms
            yield Alternative(worker, worker.last_place, alone_ms)
