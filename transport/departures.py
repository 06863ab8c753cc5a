"""The shipments of one prefill rank: how each begins and ends, and when its time is up.

A shipment is live from its order until every decode rank has committed, or it has failed, and in
either case until no thread reads its blocks any more.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from kvcache.head_map import HeadInterval
from kvcache.ledger import Ledger
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import Abort, DrainAck, Frame, Renew
from transport.books import SendingBook
from transport.clock import Clock
from transport.config import TransportConfig
from transport.counts import TransferCounts
from transport.departure import Departure
from transport.memory import Memory
from transport.orders import Code, Identity, ShipmentKey, ShipmentOrder, TransferFailed
from transport.outgoing import Outgoing
from transport.outgoing_pair import OutgoingPair
from transport.plan import pair_plans
from transport.port import Port
from transport.reaper import each
from transport.shipment import Shape

SEE_OFF_S = 0.2  # an abort frees both ends within half a second


class Departures:
    """Owns every departure from `begin` until it is drained."""

    def __init__(
        self,
        identity: Identity,
        source_intervals: Sequence[HeadInterval],
        spec: CacheSpec,
        clock: Clock,
        config: TransportConfig,
        ledger: Ledger,
    ) -> None:
        self.identity = identity
        self.counts = TransferCounts()
        self.live: dict[ShipmentKey, Departure] = {}
        self.by_request: dict[int, Departure] = {}
        self.done_requests: OrderedDict[int, None] = OrderedDict()
        self.memory = Memory(config.max_remembered)
        self.endings: set[asyncio.Task[None]] = set()
        self._source_intervals = tuple(source_intervals)
        self._spec = spec
        self._clock = clock
        self._config = config
        self._ledger = ledger

    def begin(self, order: ShipmentOrder) -> Departure:
        """Raises TransferFailed when the shipment has ended, or is under way."""
        if order.key in self.memory:
            failure = self.memory.failure(order.key)
            reason = f"shipment {order.key} is done"
            raise failure or TransferFailed(Code.FAILED_PRECONDITION, reason)
        if order.key in self.live or order.request_key in self.by_request:
            reason = f"shipment {order.key} of request {order.request_key} is under way"
            raise TransferFailed(Code.FAILED_PRECONDITION, reason)
        shape = Shape.of(self._spec, order.num_tokens, order.target.block_size)
        config = self._config
        plans = pair_plans(self._source_intervals, order.target.kv_intervals)
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
            book=SendingBook(
                self._ledger,
                order.key,
                {rank: pair.heads for rank, pair in pairs.items()},
                shape,
                order.target.instance,
            ),
            stirred={rank: asyncio.Event() for rank in pairs},
        )
        self.live[order.key] = self.by_request[order.request_key] = departure
        return departure

    def lend(self, key: ShipmentKey) -> Departure | None:
        """The shipment, while its blocks may be read: who does is one of its `readers`."""
        departure = self.live.get(key)
        return departure if departure is not None and not departure.outgoing.over else None

    async def abort(self, key: ShipmentKey, reason: str, code: Code) -> None:
        """Returns when the shipment's blocks are read no more."""
        departure = self.live.get(key)
        if departure is None:
            self.memory.remember(key, TransferFailed(code, reason))
            return
        self.fail(departure, code, reason)
        await departure.drained.wait()

    def fail(self, departure: Departure, code: Code, reason: str, *, expired: bool = False) -> None:
        if departure.outgoing.fail(code, reason, expired=expired):
            self.counts.failed += 1
            self.counts.expired += expired
            departure.book.failed(code, expired=expired)
            abort = Abort(reason=reason, code=code)
            for port in departure.ports.values():
                port.post(Frame(key=departure.order.key.to_proto(), abort=abort))
            self.review(departure)

    def review(self, departure: Departure) -> None:
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
        if outgoing.failure is None and departure.readers.shut():
            for task in departure.tasks:
                task.cancel()
            self._let_go(departure)
        else:
            self._spawn(self._drain(departure))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        ending = asyncio.create_task(work)
        self.endings.add(ending)
        ending.add_done_callback(self.endings.discard)

    async def _drain(self, departure: Departure) -> None:
        """Let go of a shipment once no thread reads its blocks."""
        for task in departure.tasks:
            task.cancel()
        await asyncio.gather(*departure.tasks, return_exceptions=True)
        await departure.readers.close()
        if departure.outgoing.failure is not None:
            await self._see_off(departure)
        self._let_go(departure)

    def _let_go(self, departure: Departure) -> None:
        """No thread reads its blocks, nor will."""
        departure.outgoing.drained()
        departure.book.drained()
        order = departure.order
        for port in departure.drains:
            port.post(Frame(key=order.key.to_proto(), drain_ack=DrainAck()))
        del self.live[order.key], self.by_request[order.request_key]
        self.memory.remember(order.key, departure.outgoing.failure)
        self.done_requests[order.request_key] = None
        if len(self.done_requests) > self._config.max_remembered:
            self.done_requests.popitem(last=False)
        departure.drained.set()
        for port in departure.ports.values():
            if port.retired and not self.uses(port):
                self._spawn(port.hang_up("its wire is in quarantine"))

    async def _see_off(self, departure: Departure) -> None:
        """Wait a moment for the decode ranks that read blocks where they lie to say that they do no
        more. Who does not say so may still read when the blocks are another request's: what is
        read then is not what its digest says, and nothing of a failed transfer is committed.
        """
        away = [
            asyncio.ensure_future(looker.wait())
            for rank, looker in departure.lookers.items()
            if departure.ports[rank].open
        ]
        if away:
            patience = asyncio.ensure_future(self._clock.sleep(SEE_OFF_S))
            gone = asyncio.ensure_future(asyncio.gather(*away))
            either: set[asyncio.Future[Any]] = {gone, patience}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for waiting in either:
                waiting.cancel()
            await asyncio.gather(*either, *away, return_exceptions=True)

    def left(self, departure: Departure, rank: int) -> None:
        """A decode rank reads the blocks no more."""
        if rank in departure.lookers:
            departure.lookers[rank].set()

    def uses(self, port: Port) -> bool:
        """Whether any shipment goes over the port."""
        return any(port in departure.ports.values() for departure in self.live.values())

    def lose(self, port: Port, reason: str) -> list[Departure]:
        """Fails what still had to be sent. Of those that it returns all was sent, and decode may
        have committed: whoever can dial asks it.
        """
        self.counts.links_lost += not port.retired
        rank = port.link.welcome.decode_rank
        unknown = []
        for departure in list(self.live.values()):
            pair = departure.outgoing.pairs.get(rank)
            if departure.ports.get(rank) is not port or pair is None:
                continue
            self.left(departure, rank)
            if pair.committed:
                continue
            if pair.seal_sent and pair.all_left and not departure.outgoing.over:
                unknown.append(departure)
                continue
            lost = f"the link to {departure.name_of(rank)} is lost at {pair.where()}: {reason}"
            self.fail(departure, Code.UNAVAILABLE, lost)
        return unknown

    def tick(self, now: float) -> None:
        """Remind and renew where nothing has been heard, and give up where that lasts too long."""
        each(self.live.values(), partial(self._tick, now))

    def _tick(self, now: float, departure: Departure) -> None:
        if departure.outgoing.over:
            return
        renew = departure.renew_at <= now
        if renew:
            departure.renew_at = now + self._config.renew_s
        for rank, port in departure.ports.items():
            pair = departure.outgoing.pairs[rank]
            silent_s = now - pair.heard_at
            if silent_s >= self._config.lease_s and not pair.committed:
                who, where = departure.name_of(rank), pair.where()
                reason = f"{who} fell silent for {silent_s:.0f} s at {where}"
                self.fail(departure, Code.UNAVAILABLE, reason, expired=True)
                if not self._is_heard(port, rank, now):
                    port.cut(reason, self.endings)
                return
            if pair.probe(now, self._config.resend_after_s):
                self.counts.resent_chunks += 1
                departure.stirred[rank].set()
            if renew and not pair.committed:
                port.post(self._reminder(departure, rank))

    def _is_heard(self, port: Port, rank: int, now: float) -> bool:
        """Whether any running shipment over the link has heard of decode within the lease."""
        return any(
            now - departure.outgoing.pairs[rank].heard_at < self._config.lease_s
            for departure in self.live.values()
            if departure.ports.get(rank) is port and not departure.outgoing.over
        )

    def _reminder(self, departure: Departure, rank: int) -> Frame:
        """What to say when nothing has been heard: the frame that may have been lost."""
        pair = departure.outgoing.pairs[rank]
        if pair.first_block is None:
            return departure.open_frame(rank)
        if pair.seal_sent:
            return departure.seal_frame(rank, self.identity.rank)
        return Frame(key=departure.order.key.to_proto(), renew=Renew())

    def spawn(self, departure: Departure, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        departure.tasks.add(task)
        task.add_done_callback(departure.tasks.discard)
