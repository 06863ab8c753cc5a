"""Which block names were routed before, where to, and what has become of them since.

A name is noted when its prompt is routed and settled when the prompt is computed. The oldest are
forgotten beyond `max_names`: an oracle with a long memory, not an endless one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.clock import Clock
from router.hit_rate import Loss


@dataclass(slots=True)
class _Sighting:
    instance: str
    computed_at: float | None


class Sightings:
    """`lag_s` is how long a worker's news may take to arrive here before they count as missing."""

    def __init__(self, clock: Clock, lag_s: float = 1.5, max_names: int = 1_000_000) -> None:
        self._clock = clock
        self._lag_s = lag_s
        self._max_names = max_names
        self._seen: dict[bytes, _Sighting] = {}  # the longest unseen first

    def __len__(self) -> int:
        return len(self._seen)

    def depth(self, names: Sequence[bytes]) -> int:
        """How many of `names`, from the first on, were seen before."""
        return next((at for at, name in enumerate(names) if name not in self._seen), len(names))

    def note(self, names: Iterable[bytes], instance: str) -> None:
        """A prompt of these blocks is on its way to `instance`."""
        for name in names:
            self._seen.pop(name, None)
            self._seen[name] = _Sighting(instance, None)
        while len(self._seen) > self._max_names:
            del self._seen[next(iter(self._seen))]

    def settle(self, names: Iterable[bytes], instance: str) -> None:
        """`instance` has computed them, or had them."""
        now = self._clock.now()
        for name in names:
            sighting = self._seen.get(name)
            if sighting is not None and sighting.instance == instance:
                sighting.computed_at = now

    def gone(
        self, names: Iterable[bytes], tokens_each: int, is_live: Callable[[str], bool]
    ) -> list[tuple[Loss, int]]:
        """Why these, all seen before, are held by nobody, as far as anyone knows."""
        return [(self._why(name, is_live), tokens_each) for name in names]

    def _why(self, name: bytes, is_live: Callable[[str], bool]) -> Loss:
        sighting = self._seen.get(name)
        if sighting is None:
            return Loss.EVICTED
        if not is_live(sighting.instance):
            return Loss.EPOCH
        computed_at = sighting.computed_at
        if computed_at is None or self._clock.now() - computed_at < self._lag_s:
            return Loss.LAG
        return Loss.EVICTED
