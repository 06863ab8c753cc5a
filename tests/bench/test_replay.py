"""The promises about a real trace are asked of a small one: that each is, whatever comes out."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.replay import MORE, RUNS, bars, more_bars, run
from kvferry.replay.outcome import Outcome
from tests.kvferry.replay.traces import write_conversations


def test_every_run_ends_and_every_promise_has_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.replay.silence", lambda: None)  # for ever, in this process
    path = write_conversations(tmp_path / "t.jsonl", sessions=4)
    found: dict[str, dict[str, Outcome]] = {"80 %": {}, "110 %": {}}
    for load, policy, options in {*RUNS, *MORE}:
        outcome = run(path, policy, replace(options, num_replicas=2))
        assert len(outcome.served) == 20
        found[load][outcome.policy] = outcome
    usual, crowded = found["80 %"], found["110 %"]
    assert len(bars(usual, crowded)) == 6
    assert len(more_bars(usual)) == 8
    assert {len(usual), len(crowded)} == {12, 2}
