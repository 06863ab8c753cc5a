"""Which block names were routed before, where to, and what has become of them since.

A prompt is noted when it is routed and settled when it is computed; all its names share one note,
so that both cost next to nothing. Names are kept in two generations: when the young one is full it
becomes the old one, and the old one is forgotten. So the last half of `max_names` are known, and
never more than `max_names`: an oracle with a long memory, not an endless one.

What was sent to a worker is expected there until its news have come (`router.news`), or until so
much was computed there since that its pool cannot hold it any more: pools evict what was used least
recently.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from engine.clock import Clock
from router.hit_rate import Loss
from router.news import News

LONG_AGO = float("-inf")


@dataclass(slots=True, eq=False)
class _Sighting:
    instance: str
    computed_at: float | None = None
    num_fresh: int = 0  # blocks that are to be computed
    place: int = 0  # of the first of these among all that the pool computed


@dataclass(slots=True)
class _Pool:
    """A worker's, as far as we know."""

    num_blocks: int  # 0: it does not say
    num_computed: int = 0  # ever
    num_ours: int = 0  # of these, what we sent
    num_prompts: int = 0  # of ours

    def compute(self, num_blocks: int) -> int:
        """For a prompt of ours; the place of its first one."""
        place = self.num_computed
        self.num_computed += num_blocks
        self.num_ours += num_blocks
        self.num_prompts += 1
        return place

    def holds(self, place: int) -> bool:
        return not self.num_blocks or self.num_computed - place <= self.num_blocks


@dataclass(slots=True)
class _Generation:
    seen: dict[bytes, _Sighting]
    # By the last name and the instance: prompts on their way.
    underway: dict[tuple[bytes, str], _Sighting]


class Sightings:
    """Belongs to one router."""

    def __init__(self, clock: Clock, news: News | None = None, max_names: int = 1_000_000) -> None:
        self._clock = clock
        self._news = News(clock, lambda _instance, _name: True) if news is None else news
        self._pools: dict[str, _Pool] = {}  # by instance
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

    def opened(self, instance: str, num_blocks: int) -> None:
        """A life has begun, with a pool of so many blocks."""
        self._pools[instance] = _Pool(num_blocks)

    def closed(self, instance: str) -> None:
        self._pools.pop(instance, None)

    def others_computed(self, instance: str, num_prompts: int) -> None:
        """Of other routers, as long as ours in the mean."""
        pool = self._pools.get(instance)
        if pool is not None and pool.num_prompts:
            pool.num_computed += num_prompts * pool.num_ours // pool.num_prompts

    def note(self, names: Sequence[bytes], instance: str, num_held: int = 0) -> None:
        """A prompt of these blocks is on its way to `instance`, which seems to hold the first of
        them.
        """
        if not names:
            return
        if len(self._young.seen) + len(names) > self._max_young:
            self._old, self._young = self._young, _Generation({}, {})
        sighting = _Sighting(instance, num_fresh=max(0, len(names) - num_held))
        self._young.seen.update(dict.fromkeys(names, sighting))
        self._young.underway[names[-1], instance] = sighting

    def expected(self, names: Sequence[bytes]) -> dict[str, int]:
        """How many of `names`, from the first on, an instance holds or is about to because a prompt
        of theirs was sent there: up to the last one of which that is the latest news. (Those before
        it may have been sent elsewhere since: it has them nevertheless.)
        """
        found: dict[str, int] = {}
        stop = 0
        for sighting, same in groupby(self._seen(names)):
            if sighting is None:
                break
            stop += len(list(same))
            if self._is_underway(sighting):
                found[sighting.instance] = stop
        return found

    def drop(self, names: Sequence[bytes], instance: str) -> None:
        """The prompt was not computed there after all. Safe to say of one that was."""
        if not names:
            return
        for generation in (self._young, self._old):
            sighting = generation.underway.pop((names[-1], instance), None)
            if sighting is not None:
                sighting.computed_at = LONG_AGO

    def _is_underway(self, sighting: _Sighting) -> bool:
        """Or so lately computed that the news of it may not have come."""
        computed_at = sighting.computed_at
        if computed_at is None:
            return True
        pool = self._pools.get(sighting.instance)
        return not self._news.have_come(computed_at) and (
            pool is None or pool.holds(sighting.place)
        )

    def settle(self, names: Sequence[bytes], instance: str) -> None:
        """`instance` has computed them, or had them."""
        if not names:
            return
        for generation in (self._young, self._old):
            sighting = generation.underway.pop((names[-1], instance), None)
            if sighting is not None:
                sighting.computed_at = self._clock.now()
                if (pool := self._pools.get(instance)) is not None:
                    sighting.place = pool.compute(sighting.num_fresh)
                if sighting.num_fresh:
                    self._news.computed(instance, names[-1])
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
