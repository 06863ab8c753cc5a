"""What is known of one transfer on its way in, and what runs for it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.transfer_pb2 import Frame
from transport.books import ReceivingBook
from transport.cell_runs import Cell
from transport.incoming import Incoming
from transport.link import Inlet
from transport.orders import Receipt, ReceiptOrder
from transport.port import Port
from transport.quarantine import LinkName


@dataclass(frozen=True, slots=True)
class Landed:
    """What became of some cells: all good ones are in their blocks."""

    written: bool = True  # else the transfer had been given up, or the chunk was
    damage: str = ""  # the first thing that was wrong, if anything was
    bad: Mapping[Cell, str] = field(default_factory=dict)  # not written, each with why


@dataclass(slots=True)
class Landing:
    """One transfer on its way in: what is known of it, and what runs for it."""

    order: ReceiptOrder
    incoming: Incoming
    result: asyncio.Future[Receipt]
    expires_at: float
    renew_at: float
    book: ReceivingBook
    ports: dict[int, Port] = field(default_factory=dict)  # by prefill rank, once it has called
    jobs: set["asyncio.Future[Landed]"] = field(default_factory=set)
    inlets: dict["asyncio.Future[Landed]", Inlet] = field(default_factory=dict)  # of some jobs
    pulls: set[asyncio.Task[None]] = field(default_factory=set)  # calls for damaged cells
    lenders: set[LinkName] = field(default_factory=set)  # that were called for them
    told: bool = False  # that it failed
    # Of chunks, with their bytes: acknowledgements that leave in a moment.
    acks: dict[Port, dict[int, int]] = field(default_factory=dict)
    drains: list[Port] = field(default_factory=list)  # that wait to hear of the fence
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def links(self) -> set[LinkName]:
        """All that its cells have come over, or may have."""
        return {LinkName.of(port.link.hello) for port in self.ports.values()} | self.lenders

    def post(self, frame: Frame) -> None:
        for port in self.ports.values():
            port.post(frame)
