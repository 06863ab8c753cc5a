"""The decode side: takes calls from prefill ranks and lets verified cells into reserved blocks.

`called` answers when a prefill rank asks for credit. `expect` then names the blocks that the
transfer may write, gives credit for them, and answers when they are whole. Each chunk is
verified in staging by a thread, which then scatters it unless the transfer was given up meanwhile:
a copying one, or over some wires the one that reads the payload, piece by piece. `abort` returns
only when no such thread writes any more for the transfer, so its blocks may be used again at once.
One task with its own timer ends what nobody else ends.
"""

import asyncio
import contextlib
from functools import partial
from types import TracebackType
from typing import Self

from kvcache.head_map import HeadInterval
from kvcache.ledger import Ledger
from protos.transfer_pb2 import Hello, Welcome
from transport import books
from transport.arrivals import Arrivals, name_of
from transport.books import own_ledger
from transport.clock import Clock
from transport.config import TransportConfig
from transport.copiers import Copiers
from transport.from_prefill import PrefillFrames
from transport.lander import Lander
from transport.landing_cells import CellSink
from transport.link import PROTOCOL, Link, LinkRefused
from transport.mender import Mender
from transport.orders import Code, Identity, Receipt, ReceiptOrder, ShipmentKey
from transport.port import Port
from transport.pull import GrpcPuller, Puller
from transport.reaper import reap


class Receiver:
    """One decode rank's end of every transfer. An async context manager: starts and stops."""

    def __init__(
        self,
        identity: Identity,
        kv_heads: HeadInterval,
        store: CellSink,
        manifest_digest: bytes,
        clock: Clock,
        config: TransportConfig | None = None,
        puller: Puller | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.identity = identity
        self._manifest_digest = manifest_digest
        self._config = config = config or TransportConfig()
        self._copiers = Copiers(config.copy_threads, "kv-scatter")
        self.ledger = ledger or own_ledger(identity, "decode")
        self._arrivals = Arrivals(identity, kv_heads, store.spec, clock, config, self.ledger)
        lander = Lander(store, self._copiers)
        puller = puller or GrpcPuller(config.call_timeout_s)
        self._mender = Mender(self._arrivals, lander, puller, clock, config)
        self._frames = PrefillFrames(self._arrivals, lander, self._mender, clock, config)
        self.watch = self._arrivals.watch
        self._clock = clock
        self._ports: dict[Port, asyncio.Event] = {}
        self._reaper: asyncio.Task[None] | None = None
        self.counts = self._arrivals.counts

    async def __aenter__(self) -> Self:
        reaping = reap(self._clock, self._config.tick_s, self._tick, str(self.identity))
        self._reaper = asyncio.create_task(reaping)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def open_transfers(self) -> int:
        """Transfers whose blocks may still be written, or that wait for their commit."""
        return len(self._arrivals.live)

    async def called(self, key: ShipmentKey, timeout_s: float) -> None:
        """Returns once a prefill rank has called, and waits for credit. Raises TransferFailed."""
        await self._arrivals.called(key, timeout_s)

    async def expect(self, order: ReceiptOrder) -> Receipt:
        """Receive a transfer into `order.block_table`; answers when every cell is in place.

        Raises TransferFailed, at once when it fails. The blocks are the caller's again only after
        `abort`, or the request's after `commit`.
        """
        assert self._reaper is not None, "the receiver is not started"
        landing = self._arrivals.begin(order)
        for early in self._arrivals.early.pop(order.key, {}).values():
            self._frames.open(landing, early.port, early.open)
        try:
            return await landing.result
        except asyncio.CancelledError:
            self._arrivals.fail(landing, Code.CANCELLED, "the decode worker waits no more")
            raise

    async def commit(self, key: ShipmentKey) -> None:
        """Every rank of the group is whole: tell the prefill ranks, who may then release.

        Raises TransferFailed when the transfer is not whole, or was given up.
        """
        self._arrivals.commit(key)

    def confirmed(self, key: ShipmentKey, rank: int) -> None:
        """Nothing of the transfer can be written on another rank of the group any more."""
        books.confirmed(self.ledger, key, rank)

    def adopted(self, key: ShipmentKey) -> None:
        """The group has committed, and its request runs on the blocks."""
        books.adopted(self.ledger, key)

    async def abort(self, key: ShipmentKey, reason: str, code: Code = Code.CANCELLED) -> int:
        """Give a transfer up. When this returns, no byte of it will be written any more; it says
        how many blocks, from the prompt's first on, hold all this rank's cells.
        """
        return await self._arrivals.abort(key, reason, code)

    def answer(self, hello: Hello) -> Welcome:
        """What to say to a prefill rank that calls. Raises LinkRefused when we cannot work."""
        me = self.identity
        if hello.protocol != PROTOCOL:
            refusal = f"speaks transfer protocol {hello.protocol}, we speak {PROTOCOL}"
        elif hello.decode_instance != me.instance:
            refusal = f"asks for instance {hello.decode_instance}, but this is {me}"
        elif hello.manifest_digest != self._manifest_digest:
            theirs, ours = hello.manifest_digest.hex(), self._manifest_digest.hex()
            refusal = f"has a manifest with digest {theirs}, ours is {ours}"
        elif newer := self._newer_life(hello):
            refusal = f"is epoch {hello.prefill_epoch}, but epoch {newer} is connected already"
        else:
            self.watch.greet(hello)
            return Welcome(decode_epoch=me.epoch, decode_rank=me.rank)
        self.counts.links_refused += 1
        raise LinkRefused(f"{me.worker} rank {me.rank} refuses {name_of(hello)}: it {refusal}")

    async def serve(self, link: Link) -> None:
        """Work for one prefill rank until its link closes; ends what it leaves unfinished."""
        port = Port(link, self._config.send_timeout_s, self._config.max_staged_chunks)
        for other in list(self._ports):
            if _same_rank(other.link.hello, link.hello):
                await other.link.close(f"{name_of(link.hello)} called again")
        gone = self._ports[port] = asyncio.Event()
        self.watch.ports.add(port)
        reason = "its stream was cancelled"
        try:
            reason = await port.run(partial(self._frames.handle, port))
        finally:
            del self._ports[port]
            self.watch.ports.discard(port)
            self._arrivals.lose(port, f"the link to {name_of(link.hello)} is lost: {reason}")
            gone.set()

    async def close(self) -> None:
        """End every transfer and every link; returns when nothing of ours runs any more."""
        if self._reaper is None:
            return
        self._reaper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reaper
        self._reaper = None
        for landing in list(self._arrivals.live.values()):
            self._arrivals.fail(landing, Code.UNAVAILABLE, f"{self.identity} stops")
            await landing.settled.wait()
        for key in list(self._arrivals.awaited):
            await self._arrivals.abort(key, f"{self.identity} stops", Code.UNAVAILABLE)
        await self._mender.close()
        gone = list(self._ports.values())
        await asyncio.gather(*(port.hang_up(f"{self.identity} stops") for port in self._ports))
        await asyncio.gather(*(event.wait() for event in gone))
        await asyncio.gather(*self._arrivals.cuts)
        self._copiers.stop()

    def _tick(self, now: float) -> None:
        self._arrivals.tick(now)
        self._mender.tick()

    def _newer_life(self, hello: Hello) -> int:
        """The epoch of a later life of the same worker that is connected, or 0."""
        epochs = (
            port.link.hello.prefill_epoch
            for port in self._ports
            if port.link.hello.prefill_worker == hello.prefill_worker
        )
        return max((epoch for epoch in epochs if epoch > hello.prefill_epoch), default=0)


def _same_rank(old: Hello, new: Hello) -> bool:
    """Whether `new` comes from the same rank as `old`, over the same wire, or from a later life."""
    if old.prefill_worker != new.prefill_worker or old.prefill_epoch > new.prefill_epoch:
        return False
    same = (old.prefill_rank, old.wire) == (new.prefill_rank, new.wire)
    return old.prefill_epoch < new.prefill_epoch or same
