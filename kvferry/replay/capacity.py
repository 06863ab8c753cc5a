"""How much load a fleet can take within its targets, and how small a fleet may be for a load.

Goodput is the highest mean rate of requests at which a share of them keeps both targets: the first
token in time, and the others as fast as asked. It is found by replays of the same trace at other
rates: first where fleets one worker smaller say that it should be, then doubled or halved until one
rate keeps the targets and another one does not, then bisected.

A replay ends as soon as too many requests have missed: then what it attained is an upper bound.
What a rate beyond a fleet's capacity may hide in a short trace says `steadiness`.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeVar

from kvferry.replay.options import Options
from kvferry.replay.outcome import Failed, Served
from kvferry.replay.simulation import replay
from kvferry.replay.speeds import zero_hit_ms
from kvferry.replay.targets import Targets
from kvferry.replay.trace import Trace

T = TypeVar("T")
HIGHEST, LOWEST = 64.0, 1 / 16  # rates that are tried, by the first one
ROUNDING_MS = 1e-6
UP, DOWN = 1.25, 2.0  # the first step where nothing is known on that side; then its squares


@dataclass(frozen=True, slots=True)
class Split:
    """Of a fleet into prefill and decode workers."""

    num_prefill: int
    num_decode: int

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    def __str__(self) -> str:
        return f"{self.num_prefill}+{self.num_decode}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A replay that is wanted. `whole`: to the end, even where it has missed."""

    split: Split
    rate: float
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """`rate` was kept, with `attained`; `next_rate` was not. A rate of 0: not even a small part of
    what prefill can do, as where so many come at once that some must wait.
    """

    split: Split
    rate: float
    attained: float
    next_rate: float
    num_requests: int
    num_replays: int


# Asks for one replay after the other, is told which share of the requests each kept, and returns.
Search = Generator[Trial, float, T]


def splits(num_workers: int) -> Iterator[Split]:
    """All that serve: at least one of each."""
    for num_prefill in range(1, num_workers):
        yield Split(num_prefill, num_workers - num_prefill)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of fleets whose workers are as `options` say, but for their number."""

    trace: Trace
    options: Options
    targets: Targets
    tolerance: float = 0.02  # of the rate

    def attained(self, trial: Trial) -> float:
        """The share of the requests that keeps the targets, or of which that much is sure: then it
        is below what is asked. Raises CommandError where the trace does not fit.
        """
        num_requests = len(self.trace.arrivals)
        num_missed = 0

        def lost(end: Served | Failed) -> bool:
            nonlocal num_missed
            num_missed += not (
                isinstance(end, Served) and self.targets.kept(end.ttft_ms, end.tpot_ms)
            )
            return not trial.whole and kept() < self.targets.share

        def kept() -> float:
            return (num_requests - num_missed) / num_requests

        options = replace(
            self.options,
            num_replicas=trial.split.num_prefill,
            num_decodes=trial.split.num_decode,
            load=None,
        )
        replay(self.trace.at_rate(trial.rate), options, enough=lost)
        return kept()

    def best_share(self) -> float:
        """Of the requests that keep the targets where each is served alone, one after the other,
        and everything stays cached: no fleet and no rate attains more.
        """
        size, speeds = self.trace.block_tokens, self.options.speeds
        seen: set[bytes] = set()
        num_kept = 0
        for each in self.trace.arrivals:
            shared = sum(1 for _ in takewhile(seen.__contains__, each.names))
            seen.update(each.names)
            cached_tokens = min(shared, (each.num_tokens - 1) // size) * size
            step_ms = speeds.step_ms(1, each.num_tokens) if each.output_tokens > 1 else 0.0
            ttft_ms = speeds.prefill_ms(each.num_tokens, cached_tokens)
            num_kept += self.targets.kept(ttft_ms - ROUNDING_MS, step_ms - ROUNDING_MS)
        return num_kept / len(self.trace.arrivals)

    def goodput(self, split: Split) -> Found:
        """Found here and now, one replay after the other. Raises CommandError."""
        return drive(self.search(split), self.attained)

    def search(self, split: Split, known: Mapping[Split, float] | None = None) -> Search[Found]:
        """`known` is the goodput of other splits, by which the first rates are chosen."""
        tried: dict[float, float] = {}
        low, high = 0.0, math.inf

        def probe(rate: float) -> Search[None]:
            nonlocal low, high
            if not low < rate < high:
                return
            tried[rate] = yield Trial(split, rate)
            low, high = (rate, high) if tried[rate] >= self.targets.share else (low, rate)

        first = self._first_rates(split, known or {})
        if self.best_share() < self.targets.share:
            return Found(split, 0.0, 0.0, min(first), len(self.trace.arrivals), 0)
        for rate in first:
            yield from probe(rate)
        step = UP if known else DOWN
        while math.isinf(high) and low < HIGHEST * first[0]:
            yield from probe(min(low * step, HIGHEST * first[0]))
            step *= step
        step = DOWN
        while not low and high > LOWEST * first[0]:
            yield from probe(max(high / step, LOWEST * first[0]))
            step *= step
        while low and high - low > self.tolerance * high:
            yield from probe((low + high) / 2)
        attained = tried.get(low, 0.0)
        return Found(split, low, attained, high, len(self.trace.arrivals), len(tried))

    def _first_rates(self, split: Split, known: Mapping[Split, float]) -> Sequence[float]:
        """That of the best fleet with one worker less, should the other be of no use; and what the
        more of those would do that do so much more. Nothing known: what prefill can do without any
        reuse.
        """
        fewer = known.get(Split(split.num_prefill - 1, split.num_decode), 0.0)
        slower = known.get(Split(split.num_prefill, split.num_decode - 1), 0.0)
        least = max(fewer, slower)
        if not least:
            mean_ms = zero_hit_ms(self.trace, self.options.speeds) / len(self.trace.arrivals)
            return [1000 * split.num_prefill / mean_ms]
        scaled = max(
            fewer * split.num_prefill / max(1, split.num_prefill - 1),
            slower * split.num_decode / max(1, split.num_decode - 1),
        )
        # Just so much above that the step below is the last one, should it be kept.
        return [least / (1 - self.tolerance), least, scaled]

    def once(self, trial: Trial) -> Search[tuple[Split, float]]:
        """What one split attains at one rate."""
        return trial.split, (yield trial)


def drive(search: Search[T], attained: Callable[[Trial], float]) -> T:
    """Run a search to its end."""
    try:
        trial = next(search)
        while True:
            trial = search.send(attained(trial))
    except StopIteration as end:
        found: T = end.value
        return found
