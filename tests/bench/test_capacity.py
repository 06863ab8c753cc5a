"""The benchmark of the capacity tool: its trace, and the arithmetic it is held against."""

import json
from pathlib import Path

import pytest

from bench.capacity import by_arithmetic, conversations, queue_of, wait_within
from kvferry.replay.capacity import Split, Trial
from kvferry.replay.trace import read_trace


def test_conversations_come_in_order_and_go_on_with_all_that_was_said(tmp_path: Path) -> None:
    lines = conversations(200, seed=1)
    assert lines == conversations(200, seed=1) != conversations(200, seed=2)
    path = tmp_path / "conversations.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(path)
    assert len(trace.arrivals) == 200
    begun = {each.names[: len(each.names) - 1] for each in trace.arrivals}
    assert len({each.names[0] for each in trace.arrivals}) == 4
    assert sum(each.names in begun for each in trace.arrivals) > 20


def test_arithmetic_of_a_queue_that_is_never_late_and_of_one_that_always_is() -> None:
    assert wait_within(rate=0.0, service_s=0.1, wait_s=0.05) == 1.0
    assert wait_within(rate=10.0, service_s=0.1, wait_s=0.05) == 0.0
    assert by_arithmetic(0.1, 0.0, 0.8) == pytest.approx(2.0)  # who comes to an idle server
    assert by_arithmetic(0.1, 0.05, 0.8) == pytest.approx(3.17, abs=0.01)


def test_a_replay_of_the_queue_is_late_as_often_as_the_formula_says() -> None:
    kept = queue_of(300, seed=1).attained(Trial(Split(1, 1), 3.0, whole=True))
    assert kept == pytest.approx(wait_within(3.0, 0.1, 0.05), abs=0.06)
