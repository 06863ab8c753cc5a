"""The prefill side: pushes a prompt's cells to every decode rank that needs them, as they seal.

The engine's thread calls `seal` for each layer of each step, which only notes block ids. On the
event loop, pumps cut them into chunks as credit allows; a copying thread gathers and digests them,
and the link's wire carries them. `ship` ends when every decode rank has committed, or raises;
either way nothing of the shipment reads its blocks any more. One task with its own timer ends what
nobody else ends.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

from kvcache.head_map import HeadInterval
from protos.transfer_pb2 import Abort, DrainAck, Frame, Renew
from transport.clock import Clock
from transport.config import TransportConfig
from transport.counts import TransferCounts
from transport.departure import CellSource, Departure, gather
from transport.inbox import Finished, Inbox, Note, Sealed
from transport.link import Connector, LinkClosed
from transport.memory import Memory
from transport.orders import (
    Code,
    FirstToken,
    Identity,
    ShipmentKey,
    ShipmentOrder,
    ShipmentReport,
    TransferFailed,
)
from transport.outgoing import Outgoing, OutgoingPair, Part, Run
from transport.peers import Peers
from transport.plan import pair_plans
from transport.port import Port
from transport.shipment import Shape

PUMPS = 2  # per pair: one gathers while the chunk of the other is handed to the wire


class Shipper:
    """One prefill rank's end of every transfer. An async context manager: starts and stops."""

    def __init__(
        self,
        identity: Identity,
        source_intervals: Sequence[HeadInterval],
        store: CellSource,
        connectors: Mapping[str, Connector],
        manifest_digest: bytes,
        clock: Clock,
        config: TransportConfig | None = None,
    ) -> None:
        self.identity = identity
        self.counts = TransferCounts()
        self._source_intervals = tuple(source_intervals)
        self._store = store
        self._clock = clock
        self._config = config or TransportConfig()
        self._peers = Peers(
            identity,
            connectors,
            manifest_digest,
            self._config.send_timeout_s,
            self._handle,
            self._lose,
        )
        self._inbox = Inbox(self._read_note)
        self._memory = Memory(self._config.max_remembered)
        self._live: dict[ShipmentKey, Departure] = {}
        self._by_request: dict[int, Departure] = {}
        self._done_requests: OrderedDict[int, None] = OrderedDict()
        self._early: OrderedDict[int, tuple[float, list[Note]]] = OrderedDict()
        self._endings: set[asyncio.Task[None]] = set()
        self._copiers: ThreadPoolExecutor | None = None
        self._reaper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._copiers = ThreadPoolExecutor(self._config.copy_threads, "kv-gather")
        self._reaper = asyncio.create_task(self._reap())
        self._inbox.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def open_shipments(self) -> int:
        """Shipments whose blocks may still be read."""
        return len(self._live)

    async def ship(self, order: ShipmentOrder) -> ShipmentReport:
        """Send this rank's share of a prompt; answers when every decode rank has committed.

        Raises TransferFailed. Once this has answered or raised, the blocks may be released.
        """
        assert self._copiers is not None, "the shipper is not started"
        departure = self._admit(order)
        try:
            return await departure.result
        except asyncio.CancelledError:
            self._fail(departure, Code.CANCELLED, f"{self.identity} waits no more")
            raise
        finally:
            await asyncio.shield(departure.drained.wait())

    def seal(
        self,
        request_key: int,
        layer: int,
        first_block: int,
        block_ids: Sequence[int],
        tail_tokens: int | None = None,
    ) -> None:
        """Blocks `first_block`.. of the prompt are complete in `layer`. Any thread; never waits.

        `tail_tokens` counts the tokens of the last of them when it is the prompt's partial tail.
        They must stay as they are until `ship` ends. May be called before `ship` is.
        """
        run = Run(layer, first_block, tuple(block_ids), tail_tokens)
        self._inbox.put(Sealed(request_key, run))

    def finish(self, request_key: int, first_tokens: Sequence[FirstToken] = ()) -> None:
        """Nothing more of the request will be sealed. Any thread; never waits."""
        self._inbox.put(Finished(request_key, tuple(first_tokens)))

    async def abort(self, key: ShipmentKey, reason: str, code: Code = Code.CANCELLED) -> None:
        """Give a shipment up, and tell decode why. Returns when its blocks are read no more."""
        departure = self._live.get(key)
        if departure is None:
            self._memory.remember(key, TransferFailed(code, reason))
            return
        self._fail(departure, code, reason)
        await departure.drained.wait()

    async def close(self) -> None:
        """End every shipment and every link; returns when nothing of ours runs any more."""
        if self._reaper is None:
            return
        self._inbox.close()
        self._reaper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reaper
        self._reaper = None
        for departure in list(self._live.values()):
            self._fail(departure, Code.UNAVAILABLE, f"{self.identity} stops")
        await asyncio.gather(*self._endings)
        await self._peers.close(f"{self.identity} stops")
        assert self._copiers is not None
        self._copiers.shutdown()
        self._copiers = None

    # what the engine says

    def _read_note(self, note: Note) -> None:
        departure = self._by_request.get(note.request_key)
        if departure is not None:
            self._take_note(departure, note)
        elif note.request_key not in self._done_requests:
            expires_at = self._clock.now() + self._config.lease_s
            self._early.setdefault(note.request_key, (expires_at, []))[1].append(note)
            if len(self._early) > self._config.max_remembered:
                self._early.popitem(last=False)

    def _take_note(self, departure: Departure, note: Note) -> None:
        outgoing = departure.outgoing
        if outgoing.over:
            return
        if outgoing.finished:
            self._fail(departure, Code.INTERNAL, f"{self.identity} sealed after the last: {note}")
        elif isinstance(note, Sealed):
            outgoing.seal(note.run)
        else:
            departure.first_tokens = note.first_tokens
            outgoing.finish()
        for stirred in departure.stirred.values():
            stirred.set()

    # how shipments begin and end

    def _admit(self, order: ShipmentOrder) -> Departure:
        if order.key in self._memory:
            failure = self._memory.failure(order.key)
            reason = f"shipment {order.key} is done"
            raise failure or TransferFailed(Code.FAILED_PRECONDITION, reason)
        if order.key in self._live or order.request_key in self._by_request:
            reason = f"shipment {order.key} of request {order.request_key} is under way"
            raise TransferFailed(Code.FAILED_PRECONDITION, reason)
        shape, config, target = (
            Shape.of(self._store.spec, order.num_tokens),
            self._config,
            order.target,
        )
        plans = pair_plans(self._source_intervals, target.kv_intervals)
        pairs = {
            plan.decode_rank: OutgoingPair(plan.heads, shape, config.chunk_bytes)
            for plan in plans
            if plan.prefill_rank == self.identity.rank
        }
        departure = Departure(
            order,
            shape,
            Outgoing(pairs),
            asyncio.get_running_loop().create_future(),
            renew_at=self._clock.now() + config.renew_s,
            stirred={rank: asyncio.Event() for rank in pairs},
        )
        self._live[order.key] = self._by_request[order.request_key] = departure
        for note in self._early.pop(order.request_key, (0.0, []))[1]:
            self._take_note(departure, note)
        for rank in pairs:
            self._spawn(departure, self._open(departure, rank))
        departure.outgoing.advance()
        self._review(departure)
        return departure

    async def _open(self, departure: Departure, rank: int) -> None:
        try:
            port = await self._peers.port_to(departure.order, rank)
        except TransferFailed as failure:
            self._fail(departure, failure.code, failure.reason)
            return
        except Exception as error:  # a wire that this machine cannot make: nobody else would say so
            where = f"{departure.name_of(rank)} over {departure.order.wire}"
            reason = f"cannot open a link to {where}: {type(error).__name__}: {error}"
            self._fail(departure, Code.UNAVAILABLE, reason)
            return
        if not port.open:
            self._fail(departure, Code.UNAVAILABLE, f"{departure.name_of(rank)} hung up")
            return
        departure.ports[rank] = port
        departure.outgoing.pairs[rank].heard_at = self._clock.now()
        port.post(departure.open_frame(rank))
        for _ in range(PUMPS):
            self._spawn(departure, self._pump(departure, rank, port))

    def _fail(
        self, departure: Departure, code: Code, reason: str, *, expired: bool = False
    ) -> None:
        if departure.outgoing.fail(code, reason, expired=expired):
            self.counts.failed += 1
            self.counts.expired += expired
            abort = Abort(reason=reason, code=code)
            for port in departure.ports.values():
                port.post(Frame(key=departure.order.key.to_proto(), abort=abort))
            self._review(departure)

    def _review(self, departure: Departure) -> None:
        """Act on where a shipment stands now, if it has just ended."""
        outgoing, result = departure.outgoing, departure.result
        if not outgoing.over or departure.ending:
            return
        departure.ending = True
        if not result.done():
            if outgoing.failure is not None:
                result.set_exception(outgoing.failure)
            else:
                self.counts.completed += 1
                result.set_result(departure.report(self._clock.now()))
        ending = asyncio.create_task(self._drain(departure))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _drain(self, departure: Departure) -> None:
        """Let go of a shipment once no thread reads its blocks."""
        for task in departure.tasks:
            task.cancel()
        await asyncio.gather(*departure.tasks, return_exceptions=True)
        await asyncio.gather(*departure.gathers, return_exceptions=True)
        departure.outgoing.drained()
        order = departure.order
        for port in departure.drains:
            port.post(Frame(key=order.key.to_proto(), drain_ack=DrainAck()))
        del self._live[order.key], self._by_request[order.request_key]
        self._memory.remember(order.key, departure.outgoing.failure)
        self._done_requests[order.request_key] = None
        if len(self._done_requests) > self._config.max_remembered:
            self._done_requests.popitem(last=False)
        departure.drained.set()

    # the pumps

    async def _pump(self, departure: Departure, rank: int, port: Port) -> None:
        outgoing, pair = departure.outgoing, departure.outgoing.pairs[rank]
        try:
            while True:
                part = pair.take()
                if part is not None:
                    await self._send(departure, rank, port, part)
                    continue
                if outgoing.seal_due(rank):
                    pair.seal_sent = True
                    port.post(departure.seal_frame(rank, self.identity.rank))
                    outgoing.advance()
                departure.stirred[rank].clear()
                await departure.stirred[rank].wait()
        except LinkClosed:
            pass  # `_lose` is told, too
        except Exception as error:
            self._fail(departure, Code.INTERNAL, f"{pair.where()} cannot be sent: {error!r}")

    async def _send(self, departure: Departure, rank: int, port: Port, part: Part) -> None:
        pair = departure.outgoing.pairs[rank]
        block_bytes = departure.shape.layers[part.run.layer].block_bytes(len(pair.heads))
        room = await port.lend(len(part.run.block_ids) * block_bytes)
        work = partial(gather, self._store, departure, pair.heads, part, room)
        job = asyncio.get_running_loop().run_in_executor(self._copiers, work)
        departure.gathers.add(job)
        job.add_done_callback(departure.gathers.discard)
        gathered = await asyncio.shield(job)  # a cancelled pump leaves the thread to `_drain`
        if gathered is None:
            return
        frame, payload = gathered
        del room, work, job, gathered  # the wire knows by their end that nobody has them any more
        if departure.began_at is None:
            departure.began_at = self._clock.now()
        await port.send(frame, payload)
        pair.sent(part.seq, self._clock.now())
        self.counts.chunks += 1
        self.counts.bytes += payload.nbytes
        departure.outgoing.advance()

    # what decode ranks say

    async def _handle(self, port: Port, frame: Frame) -> None:
        key, body = ShipmentKey.from_proto(frame.key), frame.WhichOneof("body")
        departure = self._live.get(key)
        rank = port.link.welcome.decode_rank
        if departure is None or departure.ports.get(rank) is not port:
            known = departure is not None or key in self._memory
            self.counts.late_frames += known
            self.counts.stale_frames += not known
            if body == "abort":
                port.post(Frame(key=frame.key, drain_ack=DrainAck()))
            return
        outgoing, pair = departure.outgoing, departure.outgoing.pairs[rank]
        if body == "abort":
            departure.drains.append(port)
            reason = f"{departure.name_of(rank)} gave up: {frame.abort.reason}"
            self._fail(departure, Code.parse(frame.abort.code), reason)
            return
        if outgoing.over:
            self.counts.late_frames += 1
            return
        pair.heard_at = self._clock.now()
        if body == "credit":
            pair.grant(frame.credit.first_block, frame.credit.window_bytes)
        elif body == "chunk_ack":
            self.counts.duplicate_chunks += not pair.acked(frame.chunk_ack.seq)
        elif body == "chunk_nack":
            self._resend(departure, rank, frame.chunk_nack.seq, frame.chunk_nack.reason)
        elif body == "commit":
            outgoing.commit(rank)
        outgoing.advance()
        departure.stirred[rank].set()
        self._review(departure)

    def _resend(self, departure: Departure, rank: int, seq: int, reason: str) -> None:
        try:
            self.counts.resent_chunks += departure.outgoing.pairs[rank].nacked(seq)
        except TransferFailed as failure:
            who = departure.name_of(rank)
            self._fail(departure, failure.code, f"{who}: {failure.reason}; the last: {reason}")

    def _lose(self, port: Port, reason: str) -> None:
        self.counts.links_lost += 1
        rank = port.link.welcome.decode_rank
        for departure in list(self._live.values()):
            if departure.ports.get(rank) is port and not departure.outgoing.pairs[rank].committed:
                where = departure.outgoing.pairs[rank].where()
                lost = f"the link to {departure.name_of(rank)} is lost at {where}: {reason}"
                self._fail(departure, Code.UNAVAILABLE, lost)

    # the timer

    async def _reap(self) -> None:
        while True:
            await self._clock.sleep(self._config.tick_s)
            now = self._clock.now()
            for departure in list(self._live.values()):
                if not departure.outgoing.over:
                    self._tick(departure, now)
            for request_key, (expires_at, _) in list(self._early.items()):
                if expires_at <= now:
                    del self._early[request_key]

    def _tick(self, departure: Departure, now: float) -> None:
        renew = departure.renew_at <= now
        if renew:
            departure.renew_at = now + self._config.renew_s
        for rank, port in departure.ports.items():
            pair = departure.outgoing.pairs[rank]
            silent_s = now - pair.heard_at
            if silent_s >= self._config.lease_s and not pair.committed:
                who, where = departure.name_of(rank), pair.where()
                reason = f"{who} fell silent for {silent_s:.0f} s at {where}"
                self._fail(departure, Code.UNAVAILABLE, reason, expired=True)
                return
            if pair.probe(now - self._config.resend_after_s):
                self.counts.resent_chunks += 1
                departure.stirred[rank].set()
            if renew and not pair.committed:
                port.post(self._reminder(departure, rank))

    def _reminder(self, departure: Departure, rank: int) -> Frame:
        """What to say when nothing has been heard: the frame that may have been lost."""
        pair = departure.outgoing.pairs[rank]
        if pair.first_block is None:
            return departure.open_frame(rank)
        if pair.seal_sent:
            return departure.seal_frame(rank, self.identity.rank)
        return Frame(key=departure.order.key.to_proto(), renew=Renew())

    def _spawn(self, departure: Departure, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        departure.tasks.add(task)
        task.add_done_callback(departure.tasks.discard)
