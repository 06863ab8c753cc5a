"""How late the index's news are, by this router's own clock.

A router knows at once what it sent where, and hears from the index, some time later, what the
worker holds. That time is measured: of each prompt that was computed the last block is looked for
in the mirror until it is there. News come in order, so all that was computed before such a prompt
has been told by then. Some are never told: a block that was evicted first, a worker that left. They
are given up when one of the next few is told.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.clock import Clock

SLACK_S = 1.5  # as late as they may always be, and one worker's later than another's
MOST_LATE_S = 600.0
MOST_AWAITED = 4096  # prompts
NEXT_FEW = 8

# Whether the index says that an instance holds a block; None: the instance is no more.
Tells = Callable[[str, bytes], bool | None]


@dataclass(frozen=True, slots=True)
class _Awaited:
    instance: str
    name: bytes
    computed_at: float


class News:
    def __init__(self, clock: Clock, tells: Tells, slack_s: float = SLACK_S) -> None:
        self._clock = clock
        self._tells = tells
        self._slack_s = slack_s
        self._awaited = deque[_Awaited](maxlen=MOST_AWAITED)

    @property
    def late_s(self) -> float:
        """At least so late they are; 0 when nothing is awaited."""
        return self._clock.now() - self._awaited[0].computed_at if self._awaited else 0.0

    def computed(self, instance: str, name: bytes) -> None:
        """A block that was not there before. What the index tells already is of an earlier time, or
        came faster than the answer: neither teaches anything.
        """
        if self._tells(instance, name) is False:
            self._awaited.append(_Awaited(instance, name, self._clock.now()))

    def listen(self) -> None:
        """Note which have come. To be called from time to time."""
        awaited = self._awaited
        while awaited:
            told = self._last_told()
            if told is None:
                break
            for _ in range(told + 1):
                awaited.popleft()
        while awaited and self.late_s > MOST_LATE_S:
            awaited.popleft()

    def _last_told(self) -> int | None:
        """Of the next few awaited; whoever is gone has nothing more to tell."""
        for at in reversed(range(min(NEXT_FEW, len(self._awaited)))):
            each = self._awaited[at]
            if self._tells(each.instance, each.name) is not False:
                return at
        return None

    def have_come(self, computed_at: float) -> bool:
        """Of what was computed then."""
        age_s, late_s = self._clock.now() - computed_at, self.late_s
        return age_s >= self._slack_s + (late_s if late_s > self._slack_s else 0.0)
