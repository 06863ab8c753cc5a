"""A steady pace reads the same from the first minute on, and an old one is forgotten."""

import pytest

from engine.clock import ManualClock
from router.pace import Pace


@pytest.mark.parametrize("seconds", [20, 200])
def test_a_steady_pace_reads_the_same_at_any_time(seconds: int) -> None:
    clock = ManualClock()
    pace = Pace(clock)
    for _ in range(seconds * 10):
        clock.advance(0.1)
        pace.note(50.0)
    assert pace.prompts_per_ms == pytest.approx(0.01, rel=0.01)
    assert pace.busy == pytest.approx(0.5, rel=0.01)


def test_what_has_not_happened_for_long_counts_no_more() -> None:
    clock = ManualClock()
    pace = Pace(clock, window_s=60)
    assert (pace.prompts_per_ms, pace.busy) == (0.0, 0.0)
    for _ in range(100):
        clock.advance(1.0)
        pace.note(1000.0)
    before = pace.busy
    clock.advance(600)
    assert pace.busy < before / 10_000


def test_prompts_of_other_routers_count_as_long_as_ours() -> None:
    pace = Pace(ManualClock())
    pace.note_others(5)  # nothing is known of their length
    assert (pace.prompts_per_ms, pace.busy) == (0.0, 0.0)
    for work_ms in (100.0, 300.0):
        pace.note(work_ms)
    alone = pace.prompts_per_ms, pace.busy
    pace.note_others(2)
    assert (pace.prompts_per_ms, pace.busy) == (2 * alone[0], 2 * alone[1])
