"""What a trace made of a cluster, simulated or live: what tables and plots are drawn from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from router.hit_rate import HitRate


@dataclass(frozen=True, slots=True)
class Figures:
    """Times are of the requests that were served. `work` is by replica, in `work_unit`."""

    name: str
    hit_rate: HitRate
    ttft_ms: Sequence[float]
    tpot_ms: Sequence[float]  # of answers with more than one token
    work: Mapping[str, float]
    work_unit: str
    failed: Mapping[str, int] = field(default_factory=dict)  # by code or reason

    @property
    def delivered(self) -> float:
        return self.hit_rate.rate(self.hit_rate.delivered)

    @property
    def imbalance(self) -> float:
        """The busiest prefill replica's work over the mean; 1 is even."""
        return imbalance(self.work.values())


def imbalance(work: Iterable[float]) -> float:
    shares = list(work)
    mean = fmean(shares) if shares else 0.0
    return max(shares) / mean if mean else 1.0


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Mean and the usual quantiles."""
    mean = fmean(values) if values else 0.0
    return {"mean": mean, **{f"p{at}": quantile(values, at / 100) for at in (50, 90, 99)}}
