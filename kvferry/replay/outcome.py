"""What became of the requests of one replay."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from router.hit_rate import KINDS, HitRate, total


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the decision log: everything in it follows from trace, options and seed."""

    request: int
    attempt: int
    at_s: float
    candidate: str
    cost_ms: float
    promised_blocks: int

    def line(self) -> str:
        return (
            f"{self.request}\t{self.attempt}\t{self.at_s!r}\t{self.candidate}"
            f"\t{self.cost_ms!r}\t{self.promised_blocks}"
        )


@dataclass(frozen=True, slots=True)
class Served:
    """One request. Times are since it arrived."""

    request: int
    prefill: str  # empty: decode computed it
    decode: str
    attempts: int
    predicted_ms: float  # of the time to the first token
    ttft_ms: float
    total_ms: float
    hit_rate: HitRate


@dataclass(frozen=True, slots=True)
class Outcome:
    policy: str
    served: tuple[Served, ...]
    decisions: tuple[Decision, ...]
    work_ms: Mapping[str, float]  # computing, by replica
    duration_s: float
    load: float

    @property
    def hit_rate(self) -> HitRate:
        return total(each.hit_rate for each in self.served)

    @property
    def imbalance(self) -> float:
        """The busiest prefill replica's work over the mean; 1 is even."""
        mean = fmean(self.work_ms.values())
        return max(self.work_ms.values()) / mean if mean else 1.0

    def ttft_ms(self, share: float | None = None) -> float:
        """The time within which that share of the requests had a first token; None: the mean."""
        times = [each.ttft_ms for each in self.served]
        return fmean(times) if share is None else quantile(times, share)

    @property
    def prediction_error_ms(self) -> float:
        """How far from the time to the first token its prediction was, in the mean."""
        return fmean(abs(each.predicted_ms - each.ttft_ms) for each in self.served)

    @property
    def digest(self) -> str:
        """Equal exactly for equal decision logs."""
        text = "\n".join(each.line() for each in self.decisions)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def summary(self) -> dict[str, object]:
        rate = self.hit_rate
        attempts = Counter(each.attempts for each in self.served)
        return {
            "policy": self.policy,
            "requests": len(self.served),
            "retried": sum(count for tries, count in attempts.items() if tries > 1),
            "load": self.load,
            "duration_s": self.duration_s,
            "hit_rate": rate.rate(rate.delivered),
            "tokens": dict(zip(KINDS, rate.chain(), strict=True)),
            "lost": {loss.value: count for loss, count in rate.lost.items()},
            "imbalance": self.imbalance,
            "ttft_ms": {
                "mean": self.ttft_ms(),
                **{f"p{share}": self.ttft_ms(share / 100) for share in (50, 90, 99)},
            },
            "prediction_error_ms": self.prediction_error_ms,
            "work_ms": dict(self.work_ms),
            "decisions": self.digest,
        }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]
