"""Whether a link is alive though a transfer over it has said nothing: what is on its way holds up
the frames behind it, for as long as a slow link takes.
"""

from collections.abc import Callable

PATIENCE = 3  # times as long as where nothing comes, and no longer, others may be in the way


class Pulse:
    """Looks now and then at how much has come over a link."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._seen = count()
        self._beat_at = float("-inf")

    def beat_at(self, now: float) -> float:
        """When something was last seen to have come: now, if something has since the last look."""
        count = self._count()
        if count != self._seen:
            self._seen, self._beat_at = count, now
        return self._beat_at


def due_at(heard_at: float, beat_at: float, patience_s: float) -> float:
    """When somebody counts as silent who was last heard at `heard_at`, over a link that last beat
    at `beat_at`: `patience_s` after both, but not long after the first.
    """
    return min(max(heard_at, beat_at) + patience_s, heard_at + PATIENCE * patience_s)
