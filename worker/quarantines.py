"""What the ranks of a decode group leave alone, brought together on rank 0.

Each rank decides for its own links; the others tell rank 0 with their reports, every second. What
any rank has in quarantine is so for the whole worker.
"""

from collections.abc import Callable, Sequence

from engine.clock import Clock
from prefix_index.quarantine import Quarantine, wires_left
from protos.rank_pb2 import QuarantineReport
from protos.worker_pb2 import PrefillSource
from transport.quarantine import Quarantined


class GroupQuarantines:
    """`own` says what this rank, 0, leaves alone now."""

    def __init__(self, own: Callable[[], Sequence[Quarantined]], clock: Clock) -> None:
        self._own = own
        self._clock = clock
        self._others: dict[int, tuple[float, list[Quarantine]]] = {}  # when, and what

    def hear(self, rank: int, reports: Sequence[QuarantineReport]) -> None:
        """What another rank leaves alone."""
        self._others[rank] = (self._clock.now(), [_from_report(report) for report in reports])

    def standing(self) -> tuple[Quarantine, ...]:
        """Of several ranks' about the same, the one that lasts longest."""
        found: dict[tuple[str, int, str], Quarantine] = {}
        for each in [*map(_from_rank, self._own()), *self._heard()]:
            before = found.get(each.subject)
            if before is None or before.left_s < each.left_s:
                found[each.subject] = each
        return tuple(found.values())

    def against(self, source: PrefillSource) -> str:
        """Why nothing may come from there now; empty when it may."""
        standing = self.standing()
        return wires_left(standing, source.worker, source.epoch, source.wires)[1]

    def _heard(self) -> list[Quarantine]:
        now, heard = self._clock.now(), list[Quarantine]()
        for at, quarantines in self._others.values():
            for each in quarantines:
                if (left_s := each.left_s - (now - at)) > 0:
                    for_s = each.for_s + (now - at)
                    heard.append(Quarantine(*each.subject, for_s, left_s, each.reason))
        return heard


def reports_of(standing: Sequence[Quarantined]) -> list[QuarantineReport]:
    return [
        QuarantineReport(
            prefill=each.worker,
            epoch=each.epoch,
            wire=each.wire,
            for_s=each.for_s,
            left_s=each.left_s,
            reason=each.reason,
        )
        for each in standing
    ]


def _from_rank(own: Quarantined) -> Quarantine:
    return Quarantine(own.worker, own.epoch, own.wire, own.for_s, own.left_s, own.reason)


def _from_report(told: QuarantineReport) -> Quarantine:
    return Quarantine(told.prefill, told.epoch, told.wire, told.for_s, told.left_s, told.reason)
