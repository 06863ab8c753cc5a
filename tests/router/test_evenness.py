from dataclasses import dataclass, field

import pytest

from router.evenness import WINDOW_S, Recent, compare_work


@dataclass
class Worked:
    recent: Recent = field(default_factory=Recent)
    busier: int = 0


def compared(*work_ms: float) -> list[int]:
    workers = [Worked() for _ in work_ms]
    for worker, ms in zip(workers, work_ms, strict=True):
        worker.recent.add(ms, now=10.0)
    compare_work(workers, now=20.0)
    return [each.busier for each in workers]


def test_who_has_had_less_than_the_mean_is_equal_to_who_has_had_nothing() -> None:
    assert compared(0.0, 90.0, 100.0, 101.0) == [0, 5, 7, 8]
    assert compared(100.0, 102.0, 104.0, 94.0) == [0, 0, 1, 0]
    assert compared(0.0, 0.0) == [0, 0]
    assert compared() == []


def test_work_counts_the_less_the_longer_ago_it_was() -> None:
    recent = Recent()
    assert recent.at(5.0) == 0.0
    recent.add(100.0, now=5.0)
    assert recent.at(5.0) == 100.0
    recent.add(100.0, now=5.0 + WINDOW_S)
    assert recent.at(5.0 + WINDOW_S) == pytest.approx(100.0 + 100.0 / 2.71828, abs=0.01)
    assert recent.at(5.0 + 20 * WINDOW_S) < 0.001
