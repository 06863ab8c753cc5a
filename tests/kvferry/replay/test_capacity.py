"""Fleets whose goodput can be said beforehand, by arithmetic."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.errors import CommandError
from kvferry.replay.capacity import Capacity, Found, Split, Trial, splits
from kvferry.replay.capacity_command import capacity_command
from kvferry.replay.options import Options
from kvferry.replay.rivals import Policy
from kvferry.replay.speeds import Speeds
from kvferry.replay.steadiness import may_mislead
from kvferry.replay.targets import Targets
from kvferry.replay.trace import Trace, read_trace
from kvferry.replay.trials import Trials

# A prompt of 1,000 tokens takes 100 ms; a step takes 10 ms, and 10 ms more for each sequence.
SPEEDS = Speeds(step_base_ms=10, step_ms_per_sequence=10, step_ms_per_token=0, token_bytes=1280)
OPTIONS = Options(
    policy=Policy.ROUND_ROBIN, cache_tokens=8000, load=None, decode_tokens=80_000, speeds=SPEEDS
)


@dataclass
class Seen:
    """What was heard of a search."""

    replayed_: list[tuple[Trial, float]] = field(default_factory=list)
    got_to_: list[tuple[int, int]] = field(default_factory=list)

    def replayed(self, trial: Trial, share: float) -> None:
        self.replayed_.append((trial, share))

    def got_to(self, done: int, total: int) -> None:
        self.got_to_.append((done, total))


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
    with ThreadPoolExecutor(1) as pool:
        found = capacity_command(asked, 18.0, 6, out, picture, console, pool)
    console.file.close()
    assert [str(each.split) for each in found] == ["1+2", "2+1"]
    said = (tmp_path / "said").read_text()
    assert "the smallest fleet is 3 workers, 2+1: 100.0% of the requests in time at 18/s" in said
    written = json.loads(out.read_text())
    assert [each["rate"] >= 18 for each in written["goodput"]] == [False, True]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_fleet_may_be_large_enough(tmp_path: Path) -> None:
    """Then it says what each attains, to the last request."""
    asked = Capacity(steady(tmp_path, 1, 20), OPTIONS, Targets(100.5, 1e6, 1.0))
    seen = Seen()
    with ThreadPoolExecutor(1) as pool:
        shares = dict(Trials(asked, pool, seen).smallest(100.0, max_workers=3))
    assert set(shares) == {Split(1, 2), Split(2, 1)} and max(shares.values()) < 1.0
    assert shares == {trial.split: share for trial, share in seen.replayed_ if trial.whole}


def test_a_replay_ends_when_too_many_are_late(tmp_path: Path) -> None:
    """At 40 a second the second of 200 waits too long, and one more late would be too many."""
    capacity = Capacity(steady(tmp_path, 1, 200), OPTIONS, Targets(100.5, 1e6, 0.995))
    cut = capacity.attained(Trial(Split(1, 1), 40.0))
    whole = capacity.attained(Trial(Split(1, 1), 40.0, whole=True))
    assert (cut, whole) == (198 / 200, 1 / 200)


def test_what_a_smaller_fleet_can_do_spares_replays_and_changes_no_answer(tmp_path: Path) -> None:
    """Another decode worker brings nothing here, another prefill worker as much again."""
    asked = Capacity(steady(tmp_path, 1), OPTIONS, Targets(100.5, 1e6, 1.0))
    seen = Seen()
    wanted = [split for size in (2, 3) for split in splits(size)]
    with ThreadPoolExecutor(1) as pool:
        found = Trials(asked, pool, seen).goodput(wanted)
    alone = [asked.goodput(split) for split in wanted]
    for one, other in zip(found, alone, strict=True):
        assert one.rate == pytest.approx(other.rate, rel=2 * asked.tolerance)
        assert one.next_rate - one.rate <= asked.tolerance * one.next_rate * 1.0001
    assert [each.num_replays for each in found][1] == 2  # the same as before, and not a bit more
    assert seen.got_to_ == [(0, 3), (1, 3)]


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


def waits_ms(arrivals_s: list[float], service_ms: float) -> list[float]:
    """Of customers who are served one after the other: Lindley's recursion."""
    waits = [0.0]
    for before, now in pairwise(arrivals_s):
        waits.append(max(0.0, waits[-1] + service_ms - 1000 * (now - before)))
    return waits


def test_goodput_of_random_arrivals_is_what_arithmetic_says(tmp_path: Path) -> None:
    """An M/D/1 queue: prompts of 100 ms that come at random, of which most may wait 50 ms."""
    share, wait_ms = 0.8, 50.0
    rng, at_s = random.Random(4), list[float]()
    for _ in range(60):
        at_s.append((at_s[-1] if at_s else 0.0) + rng.expovariate(1.0))
    trace = steady(tmp_path, 1, len(at_s))
    trace = replace(
        trace,
        arrivals=tuple(
            replace(each, at_s=at - at_s[0]) for each, at in zip(trace.arrivals, at_s, strict=True)
        ),
    )

    def kept(rate: float) -> float:
        moved = [each.at_s for each in trace.at_rate(rate).arrivals]
        return sum(wait <= wait_ms for wait in waits_ms(moved, 100.0)) / len(moved)

    # A link's milliseconds and the clock's rounding are less than half of one.
    asked = Capacity(trace, OPTIONS, Targets(100.5 + wait_ms, 1e6, share), tolerance=0.01)
    found = asked.goodput(Split(1, 1))
    assert kept(found.rate * 0.98) >= share > kept(found.next_rate * 1.02)
    assert found.next_rate <= found.rate / 0.99 * 1.0001


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ((24, 1, 0.99, 8000), ["24 requests allow 0.24 to miss at --share 0.99", "use 500"]),
        ((24, 1, 1.0, 8000), ["the trace lasts 2.4 s, in which a rate 83% too high", "use 400"]),
        ((24, 100, 1.0, 8000), ["the usual answer 1.98 s at least", "use 198 requests"]),
        ((1000, 1, 0.99, 8000), []),
    ],
)
def test_a_trace_too_short_for_its_answer_is_said_with_numbers(
    tmp_path: Path, trace: tuple[int, int, float, int], said: list[str]
) -> None:
    count, output_tokens, share, cache_tokens = trace
    options = replace(OPTIONS, cache_tokens=cache_tokens)
    asked = Capacity(steady(tmp_path, output_tokens, count), options, Targets(2000, 1e6, share))
    found = Found(Split(1, 1), 10.0, 1.0, 10.1, count, 9)
    sentences = list(may_mislead(asked, [found]))
    assert bool(sentences) == bool(said)
    for part in said:
        assert any(part in sentence for sentence in sentences), sentences


def test_a_cache_that_never_fills_is_said(tmp_path: Path) -> None:
    trace = steady(tmp_path, 1, 1000)
    twice = replace(trace, arrivals=(*trace.arrivals, trace.arrivals[-1]))
    roomy = replace(OPTIONS, cache_tokens=2_000_000)
    found = Found(Split(1, 1), 10.0, 1.0, 10.1, 1001, 9)
    (sentence,) = may_mislead(Capacity(twice, roomy, Targets(2000, 1e6)), [found])
    assert "992,000 distinct tokens never fill 1 x 2,000,000 tokens of cache" in sentence


def test_targets_that_no_fleet_keeps_are_refused_before_anything_is_replayed(
    tmp_path: Path,
) -> None:
    asked = Capacity(steady(tmp_path, 1), OPTIONS, Targets(99.0, 1e6, 0.9))
    with ThreadPoolExecutor(1) as pool, pytest.raises(CommandError, match=r"only 0\.0% could"):
        out = tmp_path / "out.json"
        capacity_command(asked, None, 3, out, out.with_suffix(".png"), Console(), pool)
    assert not out.exists()


@pytest.mark.parametrize(
    ("rate", "sentence"),
    [(inf, "--rate inf: must be a finite"), (None, "requests come at one time")],
)
def test_what_has_no_rate_is_refused(tmp_path: Path, rate: float | None, sentence: str) -> None:
    asked = Capacity(steady(tmp_path, 1, count=1), OPTIONS, Targets(1e6, 1e6, 0.9))
    with ThreadPoolExecutor(1) as pool, pytest.raises(CommandError, match=sentence):
        out = tmp_path / "out.json"
        capacity_command(asked, rate, 3, out, out.with_suffix(".png"), Console(), pool)


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
