"""How much of what a link carries comes damaged; what came long ago counts little."""

from math import exp


class DamageRate:
    """Counts that fade: what came `window_s` ago counts a third, and soon nothing."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._at = 0.0
        self._cells = 0.0
        self._bad_cells = 0.0
        self._bad_chunks = 0.0

    def add(self, now: float, num_cells: int, num_bad: int) -> None:
        """A chunk of so many cells has come; it is damaged if any of them is."""
        faded = exp(-max(0.0, now - self._at) / self._window_s)
        self._at = now
        self._cells = self._cells * faded + num_cells
        self._bad_cells = self._bad_cells * faded + num_bad
        self._bad_chunks = self._bad_chunks * faded + (num_bad > 0)

    def clear(self) -> None:
        self._cells = self._bad_cells = self._bad_chunks = 0.0

    @property
    def share(self) -> float:
        """Of the cells that came damaged, 0 to 1."""
        return self._bad_cells / self._cells if self._cells else 0.0

    def exceeds(self, max_share: float, num_forgiven: int) -> bool:
        """Whether more than `max_share` of the cells, and more than so many chunks, were bad."""
        return self._bad_chunks > num_forgiven and self.share > max_share

    def __str__(self) -> str:
        return f"{self._bad_cells:,.0f} of the last {self._cells:,.0f} cells came damaged"
