"""The decode side: takes calls from prefill ranks and lets verified cells into reserved blocks.

`expect` names the blocks a transfer may write and answers when they are whole. Each chunk is
verified in staging by a copying thread, which then scatters it unless the transfer was given up
meanwhile. `abort` returns only when no such thread runs any more for the transfer, so its blocks
may be used again at once. One task with its own timer ends what nobody else ends.
"""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from kvcache.head_map import HeadInterval
from protos.transfer_pb2 import (
    Abort,
    Chunk,
    ChunkAck,
    ChunkNack,
    Commit,
    Credit,
    DrainAck,
    Frame,
    Hello,
    Open,
    Renew,
    SealAll,
    Welcome,
)
from transport.clock import Clock
from transport.config import TransportConfig
from transport.counts import TransferCounts
from transport.incoming import Incoming, Verdict
from transport.landing import CellSink, Landing, land
from transport.link import PROTOCOL, Link, LinkRefused
from transport.memory import Memory
from transport.orders import Code, Identity, Receipt, ReceiptOrder, ShipmentKey, TransferFailed
from transport.plan import sources_of
from transport.port import Port
from transport.shipment import Receiving, Shape


@dataclass(frozen=True, slots=True)
class _Early:
    """A prefill rank that called before its order was here."""

    port: Port
    open: Open
    expires_at: float


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
    ) -> None:
        self.identity = identity
        self.counts = TransferCounts()
        self._kv_heads = kv_heads
        self._store = store
        self._manifest_digest = manifest_digest
        self._clock = clock
        self._config = config or TransportConfig()
        self._memory = Memory(self._config.max_remembered)
        self._live: dict[ShipmentKey, Landing] = {}
        self._early: dict[ShipmentKey, dict[int, _Early]] = {}
        self._ports: dict[Port, asyncio.Event] = {}
        self._copiers: ThreadPoolExecutor | None = None
        self._reaper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._copiers = ThreadPoolExecutor(self._config.copy_threads, "kv-scatter")
        self._reaper = asyncio.create_task(self._reap())
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
        return len(self._live)

    async def expect(self, order: ReceiptOrder) -> Receipt:
        """Receive a transfer into `order.block_table`; answers when every cell is in place.

        Raises TransferFailed, at once when it fails. The blocks are the caller's again only after
        `abort`, or the request's after `commit`.
        """
        assert self._copiers is not None, "the receiver is not started"
        landing = self._reserve(order)
        for early in self._early.pop(order.key, {}).values():
            self._open(landing, early.port, early.open)
        try:
            return await landing.result
        except asyncio.CancelledError:
            self._fail(landing, Code.CANCELLED, "the decode worker waits no more")
            raise

    async def commit(self, key: ShipmentKey) -> None:
        """Every rank of the group is whole: tell the prefill ranks, who may then release.

        Raises TransferFailed when the transfer is not whole, or was given up.
        """
        landing = self._live.get(key)
        if landing is None:
            if key not in self._memory:
                raise TransferFailed(Code.FAILED_PRECONDITION, f"no transfer {key} is known")
            if (failure := self._memory.failure(key)) is not None:
                raise failure
            return
        landing.incoming.commit()
        landing.post(Frame(key=key.to_proto(), commit=Commit()))
        self.counts.completed += 1
        self._forget(landing)

    async def abort(self, key: ShipmentKey, reason: str, code: Code = Code.CANCELLED) -> None:
        """Give a transfer up. When this returns, no byte of it will be written any more."""
        landing = self._live.get(key)
        if landing is not None:
            self._fail(landing, code, reason)
            await landing.settled.wait()
            return
        failure = TransferFailed(code, reason)
        self._memory.remember(key, failure)
        for early in self._early.pop(key, {}).values():
            early.port.post(_abort(key, failure))

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
            return Welcome(decode_epoch=me.epoch, decode_rank=me.rank)
        self.counts.links_refused += 1
        raise LinkRefused(f"{me.worker} rank {me.rank} refuses {_name(hello)}: it {refusal}")

    async def serve(self, link: Link) -> None:
        """Work for one prefill rank until its link closes; ends what it leaves unfinished."""
        port = Port(link, self._config.send_timeout_s, self._config.max_staged_chunks)
        for other in list(self._ports):
            if _same_rank(other.link.hello, link.hello):
                await other.link.close(f"{_name(link.hello)} called again")
        gone = self._ports[port] = asyncio.Event()
        reason = "its stream was cancelled"
        try:
            reason = await port.run(partial(self._handle, port))
        finally:
            del self._ports[port]
            self._lose(port, f"the link to {_name(link.hello)} is lost: {reason}")
            gone.set()

    async def close(self) -> None:
        """End every transfer and every link; returns when nothing of ours runs any more."""
        if self._reaper is None:
            return
        self._reaper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reaper
        self._reaper = None
        for landing in list(self._live.values()):
            self._fail(landing, Code.UNAVAILABLE, f"{self.identity} stops")
            await landing.settled.wait()
        gone = list(self._ports.values())
        await asyncio.gather(*(port.hang_up(f"{self.identity} stops") for port in self._ports))
        await asyncio.gather(*(event.wait() for event in gone))
        assert self._copiers is not None
        self._copiers.shutdown()
        self._copiers = None

    # what prefill ranks say

    async def _handle(self, port: Port, frame: Frame, payload: memoryview | None) -> None:
        hello, key = port.link.hello, ShipmentKey.from_proto(frame.key)
        if (key.prefill_epoch, key.decode_epoch) != (hello.prefill_epoch, self.identity.epoch):
            self._drop_stale(port, key, frame)
            return
        landing = self._live.get(key)
        if landing is None:
            self._handle_unknown(port, key, frame)
            return
        if frame.HasField("open"):
            self._open(landing, port, frame.open)
        if landing.ports.get(hello.prefill_rank) is not port:
            self.counts.stale_frames += 1
            return
        landing.incoming.pairs[hello.prefill_rank].heard_at = self._clock.now()
        match frame.WhichOneof("body"):
            case "chunk":
                await self._take(landing, port, frame.chunk, payload)
            case "seal_all":
                self._seal(landing, port, frame.seal_all)
            case "abort":
                landing.drains.append(port)
                reason = f"{_name(hello)} gave up: {frame.abort.reason}"
                self._fail(landing, Code.parse(frame.abort.code), reason)

    def _drop_stale(self, port: Port, key: ShipmentKey, frame: Frame) -> None:
        """A frame of another life of ours or theirs; one that asks for an answer gets a no."""
        self.counts.stale_frames += 1
        if frame.HasField("open"):
            ours = f"prefill {port.link.hello.prefill_epoch}, decode {self.identity.epoch}"
            reason = f"epochs are {ours}, not {key.prefill_epoch} and {key.decode_epoch}"
            port.post(_abort(key, TransferFailed(Code.FAILED_PRECONDITION, reason)))

    def _handle_unknown(self, port: Port, key: ShipmentKey, frame: Frame) -> None:
        """Of a transfer that has ended, or that nobody has ordered yet."""
        hello, body = port.link.hello, frame.WhichOneof("body")
        if body == "abort":
            self._early.pop(key, None)
            reason = f"{_name(hello)} gave up: {frame.abort.reason}"
            self._memory.remember(key, TransferFailed(Code.parse(frame.abort.code), reason))
            port.post(Frame(key=key.to_proto(), drain_ack=DrainAck()))
        elif body == "drain_ack":
            pass  # they read no more, and nothing of theirs is written here
        elif key in self._memory:
            failure = self._memory.failure(key)
            if body in ("open", "seal_all") and failure is not None:
                port.post(_abort(key, failure))
            elif body == "seal_all":
                port.post(Frame(key=key.to_proto(), commit=Commit()))
            self.counts.late_frames += 1
        elif body == "open" and len(self._early) < self._config.max_remembered:
            expires_at = self._clock.now() + self._config.open_wait_s
            early = _Early(port, frame.open, expires_at)
            self._early.setdefault(key, {}).setdefault(hello.prefill_rank, early)
        elif key not in self._early:
            self.counts.stale_frames += 1

    def _open(self, landing: Landing, port: Port, open_: Open) -> None:
        hello, order = port.link.hello, landing.order
        bound = landing.ports.setdefault(hello.prefill_rank, port)
        if bound is not port:
            return
        try:
            if hello.prefill_instance != order.prefill_instance:
                reason = f"expected instance {order.prefill_instance}, but {_name(hello)} called"
                raise TransferFailed(Code.FAILED_PRECONDITION, reason)
            wanted = landing.incoming.open(hello.prefill_rank, open_)
        except TransferFailed as failure:
            self._fail(landing, failure.code, failure.reason)
            return
        landing.incoming.pairs[hello.prefill_rank].heard_at = self._clock.now()
        if wanted:
            credit = Credit(first_block=order.first_block, window_bytes=self._config.window_bytes)
            port.post(Frame(key=order.key.to_proto(), credit=credit))

    async def _take(
        self, landing: Landing, port: Port, chunk: Chunk, payload: memoryview | None
    ) -> None:
        await port.room.acquire()
        rank = port.link.hello.prefill_rank
        verdict = landing.incoming.offer(rank, chunk)
        if verdict is Verdict.TAKE:
            heads = landing.incoming.pairs[rank].heads
            work = partial(land, self._store, landing, heads, chunk, payload)
            job = asyncio.get_running_loop().run_in_executor(self._copiers, work)
            landing.jobs.add(job)
            job.add_done_callback(partial(self._landed, landing, port, chunk))
            return
        port.room.release()
        if verdict is Verdict.KNOWN:
            self._ack(landing, port, chunk)
        if verdict in (Verdict.KNOWN, Verdict.BUSY):
            self.counts.duplicate_chunks += 1
        elif verdict is Verdict.BAD:
            self.counts.bad_chunks += 1
            last = chunk.first_block + chunk.num_blocks - 1
            where = f"layer {chunk.layer}, blocks {chunk.first_block}-{last}"
            self._ask_again(landing, port, chunk, f"{where}: not to come, or come already")
        else:
            self.counts.late_frames += 1

    def _landed(self, landing: Landing, port: Port, chunk: Chunk, job: asyncio.Future[str]) -> None:
        port.room.release()
        landing.jobs.remove(job)
        error = job.exception()
        if error is not None:
            landing.incoming.fail(Code.INTERNAL, f"layer {chunk.layer} was not written: {error!r}")
        damage = job.result() if error is None else "not written"
        if damage:
            self.counts.damaged_chunks += error is None
            self._ask_again(landing, port, chunk, damage)
            return
        landing.incoming.landed(port.link.hello.prefill_rank, chunk)
        self.counts.chunks += 1
        self.counts.bytes += chunk.payload_bytes
        self._ack(landing, port, chunk)
        self._review(landing)

    def _ack(self, landing: Landing, port: Port, chunk: Chunk) -> None:
        ack = ChunkAck(seq=chunk.seq)
        port.post(Frame(key=landing.order.key.to_proto(), chunk_ack=ack))

    def _ask_again(self, landing: Landing, port: Port, chunk: Chunk, reason: str) -> None:
        if landing.incoming.damaged(port.link.hello.prefill_rank, chunk, reason):
            nack = ChunkNack(seq=chunk.seq, reason=reason)
            port.post(Frame(key=landing.order.key.to_proto(), chunk_nack=nack))
            self.counts.resent_chunks += 1
        self._review(landing)

    def _seal(self, landing: Landing, port: Port, seal: SealAll) -> None:
        rank = port.link.hello.prefill_rank
        for seq in landing.incoming.seal(rank, seal.num_chunks, tuple(seal.first_tokens)):
            nack = ChunkNack(seq=seq, reason="it never came")
            port.post(Frame(key=landing.order.key.to_proto(), chunk_nack=nack))
            self.counts.resent_chunks += 1
        self._review(landing)

    # how transfers begin and end

    def _reserve(self, order: ReceiptOrder) -> Landing:
        if order.key in self._memory:
            failure = self._memory.failure(order.key)
            reason = f"transfer {order.key} is done"
            raise failure or TransferFailed(Code.FAILED_PRECONDITION, reason)
        shape = Shape.of(self._store.spec, order.num_tokens)
        if order.key in self._live:
            reason = f"transfer {order.key} is expected already"
        elif order.key.decode_epoch != self.identity.epoch:
            reason = f"this is epoch {self.identity.epoch}, not {order.key.decode_epoch}"
        elif not 0 <= order.first_block <= shape.num_blocks <= len(order.block_table):
            table = f"{len(order.block_table)} blocks, {order.first_block} of them resident"
            reason = f"{order.num_tokens} tokens need {shape.num_blocks} blocks; there are {table}"
        else:
            reason = ""
        if reason:
            raise TransferFailed(Code.FAILED_PRECONDITION, reason)
        sources = sources_of(self.identity.rank, self._kv_heads, order.source_intervals)
        now = self._clock.now()
        landing = Landing(
            order,
            Incoming(shape, order.num_tokens, order.first_block, sources, self._config.max_resends),
            asyncio.get_running_loop().create_future(),
            expires_at=now + order.timeout_s,
            renew_at=now + self._config.renew_s,
        )
        self._live[order.key] = landing
        return landing

    def _fail(self, landing: Landing, code: Code, reason: str) -> None:
        landing.incoming.fail(code, reason)
        self._review(landing)

    def _review(self, landing: Landing) -> None:
        """Act on where a transfer stands now: whole, newly failed, or failed and drained."""
        incoming, key = landing.incoming, landing.order.key
        failure = incoming.failure
        if failure is None:
            if incoming.state is Receiving.WHOLE and not landing.result.done():
                landing.expires_at = self._clock.now() + self._config.lease_s
                landing.result.set_result(
                    Receipt(incoming.num_chunks, incoming.bytes_landed, incoming.first_tokens)
                )
            return
        if not landing.told:
            landing.told = True
            self.counts.failed += 1
            landing.post(_abort(key, failure))
            if not landing.result.done():
                landing.result.set_exception(failure)
        incoming.settle(len(landing.jobs))
        if incoming.state is Receiving.FREED and not landing.settled.is_set():
            for port in landing.drains:
                port.post(Frame(key=key.to_proto(), drain_ack=DrainAck()))
            self._forget(landing)

    def _forget(self, landing: Landing) -> None:
        del self._live[landing.order.key]
        self._memory.remember(landing.order.key, landing.incoming.failure)
        landing.settled.set()

    def _lose(self, port: Port, reason: str) -> None:
        self.counts.links_lost += 1
        rank = port.link.hello.prefill_rank
        for landing in list(self._live.values()):
            if landing.ports.get(rank) is port:
                landing.incoming.lose(rank, reason)
                self._review(landing)
        for key, ranks in list(self._early.items()):
            if rank in ranks and ranks[rank].port is port:
                del self._early[key]
                self._memory.remember(key, TransferFailed(Code.UNAVAILABLE, reason))

    def _newer_life(self, hello: Hello) -> int:
        """The epoch of a later life of the same worker that is connected, or 0."""
        epochs = (
            port.link.hello.prefill_epoch
            for port in self._ports
            if port.link.hello.prefill_worker == hello.prefill_worker
        )
        return max((epoch for epoch in epochs if epoch > hello.prefill_epoch), default=0)

    # the timer

    async def _reap(self) -> None:
        while True:
            await self._clock.sleep(self._config.tick_s)
            now = self._clock.now()
            for landing in list(self._live.values()):
                self._tick(landing, now)
            for key, ranks in list(self._early.items()):
                if min(early.expires_at for early in ranks.values()) <= now:
                    reason = f"no order for it within {self._config.open_wait_s:g} s"
                    await self.abort(key, f"{self.identity}: {reason}", Code.UNAVAILABLE)

    def _tick(self, landing: Landing, now: float) -> None:
        incoming = landing.incoming
        for rank, pair in incoming.pairs.items():
            silent_s = now - pair.heard_at
            if pair.opened and not pair.arrived and silent_s >= self._config.lease_s:
                where = incoming.where(rank)
                reason = f"prefill rank {rank} fell silent for {silent_s:.0f} s before {where}"
                self.counts.expired += incoming.fail(Code.UNAVAILABLE, reason)
        if landing.expires_at <= now:
            whole = incoming.state is Receiving.WHOLE
            reason = "neither committed nor aborted" if whole else f"before {incoming.where()}"
            self.counts.expired += incoming.fail(Code.DEADLINE_EXCEEDED, f"out of time {reason}")
        if landing.renew_at <= now and not incoming.over:
            landing.renew_at = now + self._config.renew_s
            landing.post(Frame(key=landing.order.key.to_proto(), renew=Renew()))
        self._review(landing)


def _abort(key: ShipmentKey, failure: TransferFailed) -> Frame:
    return Frame(key=key.to_proto(), abort=Abort(reason=failure.reason, code=failure.code))


def _name(hello: Hello) -> str:
    return str(
        Identity(
            hello.prefill_worker, hello.prefill_instance, hello.prefill_epoch, hello.prefill_rank
        )
    )


def _same_rank(old: Hello, new: Hello) -> bool:
    """Whether `new` comes from the same rank as `old`, or from a later life of its worker."""
    if old.prefill_worker != new.prefill_worker or old.prefill_epoch > new.prefill_epoch:
        return False
    return old.prefill_epoch < new.prefill_epoch or old.prefill_rank == new.prefill_rank
