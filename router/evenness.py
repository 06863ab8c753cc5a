"""Who has had more than its share of the work lately: of equal ways, others come first.

Costs alone do not see it: one idle worker costs what another does, however busy it was in the last
minutes. Who computes more than the others also evicts sooner what it holds.

The less busy half count as equals, so that a worker that has just come gets no more than its share,
and routers that do not know of each other's choices do not all make the same one.
"""

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Protocol

WINDOW_S = 300.0  # what was computed so long ago counts 1/e
STEP = 0.05  # of the mean


class Recent:
    """Milliseconds of work, the older the less they count."""

    def __init__(self) -> None:
        self._ms = 0.0
        self._as_of = -math.inf

    def add(self, ms: float, now: float) -> None:
        self._ms = self.at(now) + ms
        self._as_of = max(now, self._as_of)

    def at(self, now: float) -> float:
        return self._ms * math.exp(min(0.0, (self._as_of - now) / WINDOW_S))


class Busy(Protocol):
    recent: Recent
    busier: int


def compare_work(workers: Iterable[Busy], now: float) -> None:
    """Set how many steps beyond the mean each of them has had; 0 of who has had less."""
    known = [(each, each.recent.at(now)) for each in workers]
    mean_ms = fmean(ms for _, ms in known) if known else 0.0
    for each, ms in known:
        each.busier = max(0, round((ms / mean_ms - 1) / STEP)) if mean_ms else 0
