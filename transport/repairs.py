"""Cells that came damaged, and where each is asked for next: pure, no clock, no wire, no bytes.

    wanted   to be asked for, or asked for and not here yet
    busy     an answer is being verified
    gone     verified and in its block, or nobody is left to ask

LINK comes first, as long as the link is fit; then CALL, which shares nothing with it; then each
HOLDER once. Every source is asked a few times at most, so each cell is decided in the end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from transport.cell_runs import Cell


class Source(Enum):
    LINK = "link"  # the one the cell came over
    CALL = "call"  # a call of its own to the prefill rank
    HOLDER = "holder"  # another worker that holds the block by name


@dataclass(frozen=True, slots=True)
class Ask:
    """Whom to ask: a prefill rank, or the holder of that number."""

    source: Source
    rank: int
    holder: int = 0


@dataclass(frozen=True, slots=True)
class Offers:
    """What can be asked for the cells of one prefill rank."""

    link_asks: int  # 0: the link is not fit
    calls: int
    num_holders: int
    num_named: int  # only blocks before this one have a name that a holder would know


@dataclass(slots=True)
class Wanted:
    rank: int  # the prefill rank whose share the cell is in
    reason: str  # what was wrong the last time
    asked_at: float = -inf  # inf while a call for it is under way
    busy: bool = False
    times: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))

    @property
    def num_asks(self) -> int:
        return sum(self.times.values())

    def next_ask(self, block: int, offers: Offers) -> Ask | None:
        """The source whose turn it is; None when all have been asked."""
        if self.times[Source.LINK] < offers.link_asks:
            return Ask(Source.LINK, self.rank)
        if self.times[Source.CALL] < offers.calls:
            return Ask(Source.CALL, self.rank)
        holder = self.times[Source.HOLDER]
        if holder < offers.num_holders and block < offers.num_named:
            return Ask(Source.HOLDER, self.rank, holder)
        return None

    def book(self, ask: Ask, now: float) -> None:
        """The cell is asked for; a call says itself when it is over."""
        self.times[ask.source] += 1
        self.asked_at = now if ask.source is Source.LINK else inf


class Repairs:
    """Of one transfer on one decode rank."""

    def __init__(self) -> None:
        self._wanted: dict[Cell, Wanted] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    @property
    def first(self) -> Cell:
        return min(self._wanted)

    def add(self, rank: int, cells: Iterable[Cell], reason: str) -> None:
        for cell in cells:
            assert cell not in self._wanted, f"{cell} is wanted already"
            self._wanted[cell] = Wanted(rank, reason)

    def claim(self, cells: Sequence[Cell]) -> bool:
        """Whether an answer with these cells is to be verified; then they are busy."""
        wanted = [self._wanted.get(cell) for cell in cells]
        if not wanted or any(each is None or each.busy for each in wanted):
            return False
        for each in wanted:
            assert each is not None
            each.busy = True
        return True

    def settle(self, cells: Iterable[Cell], bad: Mapping[Cell, str]) -> int:
        """What was claimed is verified; returns how many are in their blocks."""
        num_good = 0
        for cell in cells:
            wanted = self._wanted[cell]
            wanted.busy = False
            if cell in bad:
                wanted.reason = bad[cell]
                if wanted.asked_at < inf:
                    wanted.asked_at = -inf
            else:
                del self._wanted[cell]
                num_good += 1
        return num_good

    def put_off(self, cells: Iterable[Cell], ask: Ask) -> None:
        """A call was booked for these, and is not made now: they are due as before."""
        for cell in cells:
            wanted = self._wanted[cell]
            wanted.times[ask.source] -= 1
            wanted.asked_at = -inf

    def end_call(self, cells: Iterable[Cell], failure: str = "") -> None:
        """A call for these is over; those it did not bring may be asked for at once."""
        for cell in cells:
            wanted = self._wanted.get(cell)
            if wanted is not None and wanted.asked_at == inf:
                wanted.asked_at = -inf
                wanted.reason = failure or wanted.reason

    def due(self, asked_before: float) -> list[tuple[Cell, Wanted]]:
        """The cells that nobody has been asked for since then."""
        return [
            (cell, wanted)
            for cell, wanted in self._wanted.items()
            if not wanted.busy and wanted.asked_at <= asked_before
        ]
