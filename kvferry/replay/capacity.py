"""How much load a fleet can take within its targets, and how small a fleet may be for a load.

Goodput is the highest mean rate of requests at which a share of them keeps both targets: the first
token in time, and the others as fast as asked. It is found by replays of the same trace at other
rates: doubled or halved until one rate keeps the targets and another one does not, then bisected.
A rate beyond what a fleet can do in the long run may pass where a trace is so short that its queues
have no time to grow: `Found.num_requests` says how long it was.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvferry.replay.options import Options
from kvferry.replay.simulation import replay
from kvferry.replay.speeds import zero_hit_ms
from kvferry.replay.targets import Targets
from kvferry.replay.trace import Trace

MAX_DOUBLINGS = 8
MAX_HALVINGS = 8

Watch = Callable[["Split", float, float], None]  # after each replay: the rate and what was attained


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
class Found:
    """`rate` was kept, with `attained`; `next_rate` was not. A rate of 0: not even one by one."""

    split: Split
    rate: float
    attained: float
    next_rate: float
    num_requests: int
    num_replays: int


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
    watch: Watch = lambda _split, _rate, _attained: None

    def attained(self, split: Split, rate: float) -> float:
        options = replace(
            self.options,
            num_replicas=split.num_prefill,
            num_decodes=split.num_decode,
            load=None,
        )
        outcome = replay(self.trace.at_rate(rate), options)
        share = self.targets.attained(outcome.served, len(self.trace.arrivals))
        self.watch(split, rate, share)
        return share

    def goodput(self, split: Split) -> Found:
        """Raises CommandError where the trace does not fit."""
        tried: dict[float, float] = {}

        def keeps(rate: float) -> bool:
            tried[rate] = self.attained(split, rate)
            return tried[rate] >= self.targets.share

        low, high = self._bracket(split, keeps)
        while low and high - low > self.tolerance * high:
            middle = (low + high) / 2
            low, high = (middle, high) if keeps(middle) else (low, middle)
        attained = tried.get(low, 0.0)
        return Found(split, low, attained, high, len(self.trace.arrivals), len(tried))

    def _bracket(self, split: Split, keeps: Callable[[float], bool]) -> tuple[float, float]:
        """A rate that is kept, or 0, and a higher one that is not."""
        mean_ms = zero_hit_ms(self.trace, self.options.speeds) / len(self.trace.arrivals)
        rate = 1000 * split.num_prefill / mean_ms  # what prefill can do without any reuse
        if keeps(rate):
            for _ in range(MAX_DOUBLINGS):
                if not keeps(2 * rate):
                    break
                rate *= 2
            return rate, 2 * rate
        for _ in range(MAX_HALVINGS):
            if keeps(rate / 2):
                return rate / 2, rate
            rate /= 2
        return 0.0, rate

    def smallest(self, rate: float, max_workers: int) -> list[tuple[Split, float]]:
        """The splits of the fewest workers of which one at least keeps `rate`, or else of
        `max_workers`, each with what it attained at that rate.
        """
        shares: list[tuple[Split, float]] = []
        for num_workers in range(2, max_workers + 1):
            shares = [(split, self.attained(split, rate)) for split in splits(num_workers)]
            if any(share >= self.targets.share for _, share in shares):
                break
        return shares
