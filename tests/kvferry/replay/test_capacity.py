"""Fleets whose goodput can be said beforehand, by arithmetic."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.errors import CommandError
from kvferry.replay.capacity import Capacity, Split, splits
from kvferry.replay.capacity_command import capacity_command
from kvferry.replay.options import Options
from kvferry.replay.rivals import Policy
from kvferry.replay.speeds import Speeds
from kvferry.replay.targets import Targets
from kvferry.replay.trace import Trace, read_trace

# A prompt of 1,000 tokens takes 100 ms; a step takes 10 ms, and 10 ms more for each sequence.
SPEEDS = Speeds(step_base_ms=10, step_ms_per_sequence=10, step_ms_per_token=0, token_bytes=1280)
OPTIONS = Options(
    policy=Policy.ROUND_ROBIN, cache_tokens=8000, load=None, decode_tokens=80_000, speeds=SPEEDS
)


def steady(folder: Path, output_tokens: int, count: int = 24) -> Trace:
    """Equally far apart, and no two alike."""
    lines = [
        {"t": at, "prompt_token_ids": [at] * 1000, "max_tokens": output_tokens}
        for at in range(count)
    ]
    path = folder / "steady.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return read_trace(path)


@pytest.mark.parametrize("num_prefill", [1, 3])
def test_prefill_that_takes_100_ms_serves_ten_a_second_each(
    tmp_path: Path, num_prefill: int
) -> None:
    """Whoever comes sooner waits: the last of 24 by 23 times what it came too soon."""
    capacity = Capacity(steady(tmp_path, 1), OPTIONS, Targets(100.5, 1e6, 1.0), tolerance=0.005)
    found = capacity.goodput(Split(num_prefill, 1))
    assert found.rate == pytest.approx(10 * num_prefill, rel=0.01)
    assert found.rate <= 10 * num_prefill * 1.0002 <= found.next_rate * 1.001
    assert found.attained == 1.0


def test_decode_that_streams_for_200_ms_serves_five_a_second(tmp_path: Path) -> None:
    """Ten steps of 20 ms alone; two at once would take 30 ms a step."""
    capacity = Capacity(steady(tmp_path, 11), OPTIONS, Targets(1e6, 20.1, 1.0), tolerance=0.005)
    assert capacity.goodput(Split(3, 1)).rate == pytest.approx(5.0, rel=0.01)


def test_a_target_below_what_one_request_takes_is_never_kept(tmp_path: Path) -> None:
    capacity = Capacity(steady(tmp_path, 2, count=4), OPTIONS, Targets(99.0, 1e6, 1.0))
    found = capacity.goodput(Split(1, 1))
    assert (found.rate, found.attained) == (0.0, 0.0)


def test_the_smallest_fleet_for_a_load_has_as_many_of_each_as_it_needs(tmp_path: Path) -> None:
    """18 prompts a second need two prefill workers; one decode worker would do for anything."""
    asked = Capacity(steady(tmp_path, 1), OPTIONS, Targets(100.5, 1e6, 1.0))
    out, picture = tmp_path / "capacity.json", tmp_path / "capacity.png"
    console = Console(file=(tmp_path / "said").open("w"), width=150)
    found = capacity_command(asked, 18.0, 6, out, picture, console)
    console.file.close()
    assert [str(each.split) for each in found] == ["1+2", "2+1"]
    said = (tmp_path / "said").read_text()
    assert "the smallest fleet is 3 workers, 2+1: 100.0% of the requests in time at 18/s" in said
    written = json.loads(out.read_text())
    assert [each["rate"] >= 18 for each in written["goodput"]] == [False, True]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_fleet_may_be_large_enough(tmp_path: Path) -> None:
    asked = Capacity(steady(tmp_path, 1, 20), OPTIONS, Targets(100.5, 1e6, 1.0))
    shares = dict(asked.smallest(100.0, max_workers=3))
    assert set(shares) == {Split(1, 2), Split(2, 1)} and max(shares.values()) < 1.0


def test_reuse_raises_goodput(tmp_path: Path) -> None:
    """All prompts alike: but for the first, one block of 16 tokens is computed of each."""
    trace = steady(tmp_path, 1, count=20)
    alike = replace(
        trace,
        arrivals=tuple(replace(each, names=trace.arrivals[0].names) for each in trace.arrivals),
    )
    targets = Targets(150.0, 1e6, 0.9)
    rates = [Capacity(each, OPTIONS, targets).goodput(Split(1, 1)).rate for each in (trace, alike)]
    assert rates[1] > 4 * rates[0]


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (Targets(0.0, 50.0), "--ttft 0: must be above 0"),
        (Targets(1.0, -50.0), "--per-token -0.05: must be above 0"),
        (Targets(1.0, 50.0, 1.5), "--share 1.5: must be above 0 and at most 1"),
    ],
)
def test_targets_nobody_could_keep_are_refused(targets: Targets, sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        targets.check()


def test_a_fleet_has_one_of_each_at_least() -> None:
    assert [str(split) for split in splits(4)] == ["1+3", "2+2", "3+1"]
    assert list(splits(1)) == []
