"""What workers leave alone because of the damage that came from there, as all may know it.

Every worker announces its own with each heartbeat. A prefill and a decode worker use the wires that
are not named between them; when the prefill worker itself is, or none of the pair's wires is left,
the pair is not used at all. No blocks are fetched from who gave damaged ones by calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

CALL = "call"  # what brings cells that were asked for by a call, beside all wires


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Of one wire from one life of a worker, or of calls to it; without a wire, of that worker as
    such. `prefill` is a prefill worker, but for calls, which a decode worker answers, too.
    """

    prefill: str
    epoch: int
    wire: str
    for_s: float  # already
    left_s: float
    reason: str

    @property
    def subject(self) -> tuple[str, int, str]:
        return self.prefill, self.epoch, self.wire

    @property
    def sentence(self) -> str:
        what = f"the wire {self.wire}" if self.wire else self.prefill
        times = f"since {self.for_s:.0f} s, for {self.left_s:.0f} s more"
        return f"{what} is in quarantine ({times}): {self.reason}"


def wires_left(
    quarantines: Sequence[Quarantine], prefill: str, epoch: int, wires: Sequence[str]
) -> tuple[list[str], str]:
    """Those of a pair's wires that may be used, and when there is none, why."""
    against = {each.wire: each for each in quarantines if each.subject[:2] == (prefill, epoch)}
    if "" in against:
        return [], against[""].sentence
    left = [wire for wire in wires if wire not in against]
    if left or not wires:
        return left, ""
    return [], "; ".join(against[wire].sentence for wire in wires)


def may_fetch(quarantines: Sequence[Quarantine], holder: str, epoch: int) -> bool:
    """Whether who announces these would ask this holder for blocks."""
    return not any(
        (each.prefill, each.epoch) == (holder, epoch) and each.wire in ("", CALL)
        for each in quarantines
    )
