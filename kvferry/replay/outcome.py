"""What became of the requests of one replay."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from kvferry.replay.figures import Figures, imbalance, quantile, spread_of
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
    output_tokens: int
    hit_rate: HitRate
    regret_ms: float | None = None  # see `router.forecast`; None: there was no alternative

    @property
    def tpot_ms(self) -> float:
        """For each token after the first."""
        return (self.total_ms - self.ttft_ms) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Failed:
    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    policy: str
    served: tuple[Served, ...]
    failed: tuple[Failed, ...]
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
        return imbalance(self.work_ms.values())

    def ttft_ms(self, share: float | None = None) -> float:
        """The time within which that share of the requests had a first token; None: the mean."""
        times = [each.ttft_ms for each in self.served]
        return fmean(times) if times and share is None else quantile(times, share or 0.0)

    @property
    def prediction_error_ms(self) -> float:
        """How far from the time to the first token its prediction was, in the mean."""
        return fmean([abs(each.predicted_ms - each.ttft_ms) for each in self.served] or [0.0])

    @property
    def figures(self) -> Figures:
        milliseconds = max(1e-9, 1000 * self.duration_s)
        return Figures(
            name=self.policy,
            hit_rate=self.hit_rate,
            ttft_ms=[each.ttft_ms for each in self.served],
            tpot_ms=[each.tpot_ms for each in self.served if each.output_tokens > 1],
            work={name: 100 * ms / milliseconds for name, ms in self.work_ms.items()},
            work_unit="computing, % of the time",
            failed=Counter(each.reason for each in self.failed),
        )

    @property
    def regret_ms(self) -> float:
        """How much sooner the first token would have come from the best alternative, in the mean
        over the requests that had one.
        """
        known = [each.regret_ms for each in self.served if each.regret_ms is not None]
        return fmean(known) if known else 0.0

    @property
    def prediction_ratio(self) -> float:
        """What happened over what was predicted, in the median."""
        return quantile([each.ttft_ms / max(1e-3, each.predicted_ms) for each in self.served], 0.5)

    @property
    def digest(self) -> str:
        """Equal exactly for equal decision logs."""
        text = "\n".join(each.line() for each in self.decisions)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def summary(self) -> dict[str, object]:
        rate, figures = self.hit_rate, self.figures
        attempts = Counter(each.attempts for each in self.served)
        return {
            "policy": self.policy,
            "requests": len(self.served),
            "failed": dict(Counter(each.reason for each in self.failed)),
            "retried": sum(count for tries, count in attempts.items() if tries > 1),
            "load": self.load,
            "duration_s": self.duration_s,
            "hit_rate": rate.rate(rate.delivered),
            "fetched": rate.rate(rate.fetched),
            "tokens": dict(zip(KINDS, rate.chain(), strict=True)),
            "lost": {loss.value: count for loss, count in rate.lost.items()},
            "imbalance": self.imbalance,
            "ttft_ms": spread_of(figures.ttft_ms),
            "tpot_ms": spread_of(figures.tpot_ms),
            "prediction_error_ms": self.prediction_error_ms,
            "prediction_ratio": self.prediction_ratio,
            "regret_ms": self.regret_ms,
            "work_ms": dict(self.work_ms),
            "decisions": self.digest,
        }
