"""Searches for capacity, several replays at a time: whatever waits for none is run at once."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import groupby
from typing import Any, Protocol, TypeVar, cast

from kvferry.replay.capacity import Capacity, Found, Search, Split, Trial, splits
from kvferry.replay.command import silence

T = TypeVar("T")


class Watch(Protocol):
    """Hears how a search gets on."""

    def replayed(self, trial: Trial, share: float) -> None: ...

    def got_to(self, done: int, total: int) -> None:
        """Of what is being looked for; how long each takes may differ much."""


class Trials:
    """Who made `pool` closes it; what is given to it can be pickled."""

    def __init__(self, asked: Capacity, pool: Executor, watch: Watch) -> None:
        self._asked = asked
        self._pool = pool
        self._watch = watch

    def smallest(self, rate: float, max_workers: int) -> list[tuple[Split, float]]:
        """The splits of the fewest workers of which one at least keeps `rate`, or else of
        `max_workers`, each with what it attained at that rate.
        """
        for size in range(2, max_workers + 1):
            self._watch.got_to(size - 2, max_workers - 1)
            shares = dict(self._at(rate, list(splits(size))))
            short = [split for split, share in shares.items() if not self._keeps(share)]
            if len(short) < len(shares) or size == max_workers:
                shares |= self._at(rate, short, whole=True)
                return list(shares.items())
        raise AssertionError(f"no fleet of {max_workers}")

    def goodput(self, wanted: Sequence[Split]) -> list[Found]:
        """Those of a size at a time: what they can do tells where to look with one worker more."""
        known: dict[Split, float] = {}
        found: list[Found] = []
        for _, group in groupby(wanted, key=lambda split: split.num_workers):
            self._watch.got_to(len(found), len(wanted))
            found += self._run([self._asked.search(split, known) for split in group])
            known |= {each.split: each.rate for each in found}
        return found

    def _keeps(self, share: float) -> bool:
        return share >= self._asked.targets.share

    def _at(
        self, rate: float, wanted: Sequence[Split], *, whole: bool = False
    ) -> list[tuple[Split, float]]:
        return self._run([self._asked.once(Trial(split, rate, whole)) for split in wanted])

    def _run(self, searches: Sequence[Search[T]]) -> list[T]:
        """What each returns, in their order. Raises what a replay raised."""
        found: dict[int, T] = {}
        running: dict[Future[float], tuple[int, Trial]] = {}

        def go_on(number: int, told: float | None) -> None:
            try:
                trial = searches[number].send(cast(Any, told))
            except StopIteration as end:
                found[number] = end.value
            else:
                running[self._pool.submit(_attained, self._asked, trial)] = number, trial

        for number in range(len(searches)):
            go_on(number, None)
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    number, trial = running.pop(future)
                    share = future.result()
                    self._watch.replayed(trial, share)
                    go_on(number, share)
        finally:
            for future in running:
                future.cancel()
        return [found[number] for number in range(len(searches))]


def _attained(asked: Capacity, trial: Trial) -> float:
    silence()
    return asked.attained(trial)
