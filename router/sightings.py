"""Which block names were routed before, where to, and what has become of them since.

A prompt is noted when it is routed and settled when it is computed; all its names share one note,
so that both cost next to nothing. Names are kept in two generations: when the young one is full it
becomes the old one, and the old one is forgotten. So the last half of `max_names` are known, and
never more than `max_names`: an oracle with a long memory, not an endless one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from engine.clock import Clock
from router.hit_rate import Loss

LONG_AGO = float("-inf")


@dataclass(slots=True, eq=False)
class _Sighting:
    instance: str
    computed_at: float | None = None


@dataclass(slots=True)
class _Generation:
    seen: dict[bytes, _Sighting]
    # By the last name and the instance: prompts on their way.
    underway: dict[tuple[bytes, str], _Sighting]


class Sightings:
    """`lag_s` is how long a worker's news may take to arrive here before they count as missing."""

    def __init__(self, clock: Clock, lag_s: float = 1.5, max_names: int = 1_000_000) -> None:
        self._clock = clock
        self._lag_s = lag_s
        self._max_young = max(1, max_names // 2)
        self._young = _Generation({}, {})
        self._old = _Generation({}, {})

    def __len__(self) -> int:
        """Names, those in both generations twice."""
        return len(self._young.seen) + len(self._old.seen)

    def depth(self, names: Sequence[bytes]) -> int:
        """How many of `names`, from the first on, were seen before."""
        young, old = self._young.seen, self._old.seen
        for at, name in enumerate(names):
            if name not in young and name not in old:
                return at
        return len(names)

    def note(self, names: Sequence[bytes], instance: str) -> None:
        """A prompt of these blocks is on its way to `instance`."""
        if not names:
            return
        if len(self._young.seen) + len(names) > self._max_young:
            self._old, self._young = self._young, _Generation({}, {})
        sighting = _Sighting(instance)
        self._young.seen.update(dict.fromkeys(names, sighting))
        self._young.underway[names[-1], instance] = sighting

    def last_at(self, names: Sequence[bytes]) -> str:
        """Where a prompt that begins as these do went last; empty where none was seen."""
        if not names:
            return ""
        sighting = self._young.seen.get(names[0]) or self._old.seen.get(names[0])
        return sighting.instance if sighting else ""

    def expected(self, names: Sequence[bytes], instance: str, held: int) -> int:
        """How many of `names`, from the first on, `instance` holds or is about to: `held` of them
        as far as the index knows, and those that follow because a prompt of theirs went there last
        and is being computed, or was so lately that its news may still be on their way.
        """
        if held == len(names):
            return held
        after = self._young.seen.get(names[held]) or self._old.seen.get(names[held])
        if after is None or after.instance != instance:
            return held  # as of nearly all that are asked about
        at = held
        for sighting, same in groupby(self._seen(names[held:] if held else names)):
            if sighting is None or sighting.instance != instance:
                break
            if not self._is_underway(sighting):
                break
            at += len(list(same))
        return at

    def drop(self, names: Sequence[bytes], instance: str) -> None:
        """The prompt was not computed there after all. Safe to say of one that was."""
        if not names:
            return
        for generation in (self._young, self._old):
            sighting = generation.underway.pop((names[-1], instance), None)
            if sighting is not None:
                sighting.computed_at = LONG_AGO

    def _is_underway(self, sighting: _Sighting) -> bool:
        computed_at = sighting.computed_at
        return computed_at is None or self._clock.now() - computed_at < self._lag_s

    def settle(self, names: Sequence[bytes], instance: str) -> None:
        """`instance` has computed them, or had them."""
        if not names:
            return
        for generation in (self._young, self._old):
            sighting = generation.underway.pop((names[-1], instance), None)
            if sighting is not None:
                sighting.computed_at = self._clock.now()
                return

    def gone(
        self, names: Sequence[bytes], tokens_each: int, is_live: Callable[[str], bool]
    ) -> list[tuple[Loss, int]]:
        """Why these, all seen before, are held by nobody, as far as anyone knows."""
        return [
            (self._why(sighting, is_live), tokens_each * len(list(same)))
            for sighting, same in groupby(self._seen(names))
        ]

    def _seen(self, names: Sequence[bytes]) -> Iterable[_Sighting | None]:
        """The last of each name."""
        young, old = self._young.seen, self._old.seen
        if not old:
            return map(young.get, names)
        return (young.get(name) or old.get(name) for name in names)

    def _why(self, sighting: _Sighting | None, is_live: Callable[[str], bool]) -> Loss:
        if sighting is None:
            return Loss.EVICTED
        if not is_live(sighting.instance):
            return Loss.EPOCH
        if self._is_underway(sighting):
            return Loss.LAG
        return Loss.EVICTED
