"""Watches what comes damaged to one rank, and leaves alone the links and lenders that go too far.

`quarantine` decides; here is what follows. The prefill end is told that no shipment may begin over
the link any more, and hangs up when the last that it carries has ended; until then its cells are
verified like all others, and the damaged ones fetched by a call. Whoever calls again over the wire
before its time is told the same in place of a welcome, and takes the next wire. A prefill rank has
no ports, and watches those that it fetches blocks from by calls.
"""

from collections.abc import Iterable

import structlog

from protos.transfer_pb2 import Frame, Hello, Quarantine
from transport.clock import Clock
from transport.config import TransportConfig
from transport.counts import TransferCounts
from transport.link import WireQuarantined
from transport.orders import Identity, Lender, ShipmentKey
from transport.port import Port
from transport.quarantine import CALL, LinkName, LinkRecord, Quarantined, Quarantines

log = structlog.get_logger()


class Watch:
    """One per rank. `ports` are those of a decode rank that are open now."""

    def __init__(
        self, identity: Identity, clock: Clock, config: TransportConfig, counts: TransferCounts
    ) -> None:
        self.ports: set[Port] = set()
        self._identity = identity
        self._clock = clock
        self._counts = counts
        self._quarantines = Quarantines(config)

    def greet(self, hello: Hello) -> None:
        """Raises WireQuarantined when the caller's wire, or its worker, is to be left alone."""
        found = self._quarantines.call(LinkName.of(hello), self._clock.now())
        if found is not None:
            self._counts.links_refused += 1
            raise WireQuarantined(self._sentence(found), found.left_s)

    def opened(self, port: Port, key: ShipmentKey) -> None:
        """A shipment begins over the port: it may be the last, or the only one."""
        name = LinkName.of(port.link.hello)
        found = self._quarantines.opens(name, key, self._clock.now())
        if found is not None:
            self._retire(port, found)

    def landed(self, port: Port, num_cells: int, num_bad: int) -> None:
        """Cells have come over the port, and have been verified."""
        self._count(LinkName.of(port.link.hello), num_cells, num_bad)

    def lent(self, lender: Lender, num_cells: int, num_bad: int) -> None:
        """Cells have come from a lender by a call, and have been verified."""
        self._counts.damaged_chunks += num_bad > 0
        self._counts.damaged_cells += num_bad
        if lender.worker:
            self._count(LinkName.by_call(lender), num_cells, num_bad)

    def against(self, lender: Lender, key: ShipmentKey) -> str:
        """Why a transfer is not to call there now; empty when it may."""
        return self._quarantines.against(LinkName.by_call(lender), key, self._clock.now())

    def calls(self, lender: Lender, key: ShipmentKey) -> None:
        """A transfer that may calls a lender."""
        if lender.worker:
            self._quarantines.calls(LinkName.by_call(lender), key, self._clock.now())

    def ended(self, links: Iterable[LinkName], key: ShipmentKey, *, committed: bool) -> None:
        """A transfer is over that these links brought, or would have."""
        for name in links:
            if self._quarantines.ended(name, key, committed):
                self._counts.wires_cleared += 1
                log.info("wire_cleared", link=str(name), worker=str(self._identity))
        self._quarantines.over(key)

    def standing(self) -> list[Quarantined]:
        """All that is left alone now."""
        return self._quarantines.standing(self._clock.now())

    def links(self) -> list[tuple[LinkName, LinkRecord]]:
        return list(self._quarantines.links())

    def workers(self) -> dict[str, float]:
        """How long each prefill worker is to be left alone as such."""
        return self._quarantines.workers(self._clock.now())

    def _count(self, name: LinkName, num_cells: int, num_bad: int) -> None:
        for found in self._quarantines.landed(name, num_cells, num_bad, self._clock.now()):
            self._counts.wires_quarantined += bool(found.wire)
            self._counts.workers_quarantined += not found.wire
            self._say(found)
            for each in self.ports:
                other = LinkName.of(each.link.hello)
                same_life = (other.worker, other.epoch) == (name.worker, name.epoch)
                if other == name or (same_life and not found.wire):
                    self._retire(each, found)

    def _retire(self, port: Port, found: Quarantined) -> None:
        port.retired = True
        left_ms = round(found.left_s * 1000)
        port.post(Frame(quarantine=Quarantine(reason=self._sentence(found), left_ms=left_ms)))

    def _sentence(self, found: Quarantined) -> str:
        what = f"its wire {found.wire}" if found.wire else "it"
        who = f"{self._identity.worker} rank {self._identity.rank}"
        return f"{who} has {what} in quarantine for {found.left_s:.0f} s: {found.reason}"

    def _say(self, found: Quarantined) -> None:
        wire = found.wire
        log.warning(
            "wire_quarantined" if wire else "worker_quarantined",
            sender=found.worker,
            epoch=found.epoch,
            worker=self._identity.worker,
            rank=self._identity.rank,
            wire=wire,
            cool_down_s=round(found.left_s),
            reason=found.reason,
            advice="its cells are had elsewhere, or computed; check the memory of the host of "
            f"{found.worker}"
            if wire == CALL
            else f"other wires are used; look at what carries {wire} between the two hosts"
            if wire
            else f"others serve its requests; check the memory and network of the host of "
            f"{found.worker}, and restart it there or elsewhere: a new life starts clean",
        )
