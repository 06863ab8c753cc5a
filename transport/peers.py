"""The links of one prefill rank: one per decode rank and wire, dialled when first needed.

A link is used by every shipment of its pair and kept while it works. A broken one is dialled again
by the next shipment; one to an instance that is no longer the wanted one is cut. One whose wire the
decode rank has in quarantine ends with the shipments it carries, and the next ones take the first
of their wires that is not, until it is worth trying again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from weakref import WeakValueDictionary

import structlog

from protos.transfer_pb2 import Frame, Hello, Quarantine
from transport.clock import Clock
from transport.link import (
    PROTOCOL,
    Connector,
    LinkClosed,
    LinkRefused,
    Payload,
    WireQuarantined,
)
from transport.orders import Code, Identity, ShipmentOrder, TransferFailed
from transport.plain_words import heard
from transport.port import Port

log = structlog.get_logger()

Handle = Callable[[Port, Frame], Awaitable[None]]
Lose = Callable[[Port, str], None]

Address = tuple[str, str]  # wire, host:port


class Peers:
    def __init__(
        self,
        identity: Identity,
        connectors: Mapping[str, Connector],
        manifest_digest: bytes,
        send_timeout_s: float,
        handle: Handle,
        lose: Lose,
        in_use: Callable[[Port], bool],
        clock: Clock,
    ) -> None:
        self._identity = identity
        self._connectors = connectors
        self._manifest_digest = manifest_digest
        self._send_timeout_s = send_timeout_s
        self._handle = handle
        self._lose = lose
        self._in_use = in_use
        self._clock = clock
        self._left_alone: dict[tuple[Address, str], tuple[float, str]] = {}  # see `_note`
        self._ports: dict[Address, Port] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._dialling: WeakValueDictionary[Address, asyncio.Lock] = WeakValueDictionary()

    async def port_to(self, order: ShipmentOrder, rank: int) -> Port:
        """The open link to one rank of the order's target, over the first of the order's wires that
        is not in quarantine. Raises TransferFailed, naming the rank.
        """
        refusal = ""
        for wire in (order.wire, *order.other_wires):
            try:
                return await self._port_over(wire, order, rank)
            except WireQuarantined as quarantined:
                refusal = str(quarantined)
        raise TransferFailed(Code.UNAVAILABLE, refusal)

    def port_at_hand(self, order: ShipmentOrder, rank: int) -> Port | None:
        """As `port_to`, of a link over the order's first wire that is open already."""
        target = order.target
        address = (order.wire, target.rank_addresses[rank])
        port, dialling = self._ports.get(address), self._dialling.get(address)
        if port is None or not port.open or (dialling is not None and dialling.locked()):
            return None
        hello, welcome = port.link.hello, port.link.welcome
        there = (hello.decode_instance, welcome.decode_rank, welcome.decode_epoch)
        return port if there == (target.instance, rank, order.key.decode_epoch) else None

    async def _port_over(self, wire: str, order: ShipmentOrder, rank: int) -> Port:
        target = order.target
        address = (wire, target.rank_addresses[rank])
        where = f"{target.worker} rank {rank} at {address[1]}"
        if wire not in self._connectors:
            ours = ", ".join(sorted(self._connectors))
            reason = f"no wire {wire!r} to {where}: this prefill worker has {ours}"
            raise TransferFailed(Code.FAILED_PRECONDITION, reason)
        try:
            async with self._dialling.setdefault(address, asyncio.Lock()):
                port = self._ports.get(address)
                if (
                    port is None
                    or not port.open
                    or port.link.hello.decode_instance != target.instance
                ):
                    port = await self._dial(address, order)
        except WireQuarantined as quarantined:
            self._note(address, target.instance, quarantined.left_s, str(quarantined))
            raise
        except LinkRefused as refused:
            raise TransferFailed(Code.FAILED_PRECONDITION, str(refused)) from refused
        except LinkClosed as closed:
            log.warning(
                "link_failed", to=where, wire=wire, reason=heard(closed.__cause__ or closed)
            )
            who = f"{target.worker} rank {rank} over {wire}"
            raise TransferFailed(Code.UNAVAILABLE, f"cannot reach {who}: {closed}") from closed
        welcome = port.link.welcome
        if (welcome.decode_rank, welcome.decode_epoch) != (rank, order.key.decode_epoch):
            there = f"rank {welcome.decode_rank} of epoch {welcome.decode_epoch}"
            reason = f"{where} is {there}, not of epoch {order.key.decode_epoch}"
            raise TransferFailed(Code.FAILED_PRECONDITION, reason)
        return port

    async def close(self, reason: str) -> None:
        await asyncio.gather(*(port.hang_up(reason) for port in self._ports.values()))
        await asyncio.gather(*self._readers)

    async def _dial(self, address: Address, order: ShipmentOrder) -> Port:
        wire, host_port = address
        me, target = self._identity, order.target
        until, why = self._left_alone.get((address, target.instance), (0.0, ""))
        if (left_s := until - self._clock.now()) > 0:
            raise WireQuarantined(why, left_s)
        old = self._ports.get(address)
        if old is not None and old.open:
            if old.link.welcome.decode_epoch > target.epoch:
                newer = f"instance {old.link.hello.decode_instance} of a later epoch"
                raise LinkRefused(f"{host_port} is {newer} than {target.epoch}")
            await old.link.close(f"{target.worker} was replaced by instance {target.instance}")
        hello = Hello(
            protocol=PROTOCOL,
            prefill_worker=me.worker,
            prefill_instance=me.instance,
            prefill_epoch=me.epoch,
            prefill_rank=me.rank,
            decode_instance=target.instance,
            manifest_digest=self._manifest_digest,
        )
        link = await self._connectors[wire].connect(host_port, hello)
        port = self._ports[address] = Port(link, self._send_timeout_s)
        reader = asyncio.create_task(self._read(address, port))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return port

    async def _read(self, address: Address, port: Port) -> None:
        async def handle(frame: Frame, payload: Payload) -> None:
            if frame.HasField("quarantine"):
                self._retire(address, port, frame.quarantine)
            else:
                await self._handle(port, frame)

        reason = "reading stopped"
        try:
            reason = await port.run(handle)
        finally:
            if self._ports.get(address) is port:
                del self._ports[address]
            self._lose(port, reason)
            await port.link.close(reason)

    def _retire(self, address: Address, port: Port, quarantine: Quarantine) -> None:
        """No shipment begins over the port any more; with the last that it carries it is closed."""
        instance = port.link.hello.decode_instance
        self._note(address, instance, quarantine.left_ms / 1000, quarantine.reason)
        if self._ports.get(address) is port:
            del self._ports[address]
        port.retired = True
        if not self._in_use(port):
            closing = asyncio.create_task(port.hang_up(quarantine.reason))
            self._readers.add(closing)
            closing.add_done_callback(self._readers.discard)

    def _note(self, address: Address, instance: str, left_s: float, why: str) -> None:
        """Until then a call to this life over this wire would be refused, and why."""
        now = self._clock.now()
        running = {key: each for key, each in self._left_alone.items() if each[0] > now}
        self._left_alone = {**running, (address, instance): (now + left_s, why)}
