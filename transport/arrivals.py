"""The transfers of one decode rank: how each begins and ends, and when its time is up.

A prefill rank's call comes before the order, which says where its cells are to go: until then the
rank waits among the early. A transfer is live from its order until it is committed, or failed and
fenced: no copying thread of it runs any more.
"""

import asyncio
from dataclasses import dataclass
from functools import partial

from kvcache.head_map import HeadInterval
from kvcache.ledger import Ledger
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import Abort, Commit, DrainAck, Frame, Hello, Open, Renew
from transport.books import ReceivingBook
from transport.clock import Clock
from transport.config import TransportConfig
from transport.counts import TransferCounts
from transport.incoming import Incoming
from transport.landing import Landing
from transport.memory import Memory
from transport.orders import Code, Identity, Receipt, ReceiptOrder, ShipmentKey, TransferFailed
from transport.plan import sources_of
from transport.port import Port
from transport.pulse import due_at
from transport.reaper import each
from transport.shipment import Receiving, Shape
from transport.watch import Watch


@dataclass(frozen=True, slots=True)
class Early:
    """A prefill rank that called before its order was here."""

    port: Port
    open: Open
    expires_at: float


@dataclass(frozen=True, slots=True)
class Awaited:
    """A transfer that is to come, and that no prefill rank has called for yet."""

    call: asyncio.Future[None]
    expires_at: float


class Arrivals:
    """Owns every landing from `begin` until it is forgotten."""

    def __init__(
        self,
        identity: Identity,
        kv_heads: HeadInterval,
        spec: CacheSpec,
        clock: Clock,
        config: TransportConfig,
        ledger: Ledger,
    ) -> None:
        self.identity = identity
        self.counts = TransferCounts()
        self.live: dict[ShipmentKey, Landing] = {}
        self.early: dict[ShipmentKey, dict[int, Early]] = {}
        self.awaited: dict[ShipmentKey, Awaited] = {}
        self.memory = Memory(config.max_remembered)
        self.watch = Watch(identity, clock, config, self.counts)
        self.cuts: set[asyncio.Task[None]] = set()  # of links that seem dead
        self._kv_heads = kv_heads
        self._spec = spec
        self._clock = clock
        self._config = config
        self.ledger = ledger

    async def called(self, key: ShipmentKey, timeout_s: float) -> None:
        """Returns once a prefill rank has called. Raises TransferFailed when none will."""
        if key in self.memory:
            failure = self.memory.failure(key)
            raise failure or TransferFailed(Code.FAILED_PRECONDITION, f"transfer {key} is done")
        if key in self.early:
            return
        if key in self.awaited:
            reason = f"transfer {key} is awaited already"
            raise TransferFailed(Code.FAILED_PRECONDITION, reason)
        call = asyncio.get_running_loop().create_future()
        self.awaited[key] = Awaited(call, self._clock.now() + timeout_s)
        try:
            await call
        finally:
            self.awaited.pop(key, None)

    def welcome(self, key: ShipmentKey, rank: int, early: Early) -> None:
        """A prefill rank calls for a transfer that is not ordered yet."""
        self.early.setdefault(key, {}).setdefault(rank, early)
        awaited = self.awaited.pop(key, None)
        if awaited is not None and not awaited.call.done():
            awaited.call.set_result(None)

    def turn_away(self, key: ShipmentKey, failure: TransferFailed) -> None:
        """End a transfer that is not ordered yet, for whoever calls or waits."""
        self.memory.remember(key, failure)
        for early in self.early.pop(key, {}).values():
            early.port.post(abort_frame(key, failure))
        awaited = self.awaited.pop(key, None)
        if awaited is not None and not awaited.call.done():
            awaited.call.set_exception(failure)

    def begin(self, order: ReceiptOrder) -> Landing:
        """Raises TransferFailed when the transfer has ended, or cannot be what the order says."""
        if order.key in self.memory:
            failure = self.memory.failure(order.key)
            reason = f"transfer {order.key} is done"
            raise failure or TransferFailed(Code.FAILED_PRECONDITION, reason)
        shape = Shape.of(self._spec, order.num_tokens, order.source_block_size)
        num_blocks = -(-shape.num_blocks // shape.parts)  # of our own
        if order.key in self.live:
            reason = f"transfer {order.key} is expected already"
        elif order.key.decode_epoch != self.identity.epoch:
            reason = f"this is epoch {self.identity.epoch}, not {order.key.decode_epoch}"
        elif not 0 <= order.first_block <= num_blocks <= len(order.block_table):
            table = f"{len(order.block_table)} blocks, {order.first_block} of them resident"
            reason = f"{order.num_tokens} tokens need {num_blocks} blocks; there are {table}"
        else:
            reason = ""
        if reason:
            raise TransferFailed(Code.FAILED_PRECONDITION, reason)
        sources = sources_of(self.identity.rank, self._kv_heads, order.source_intervals)
        first_block = min(order.first_block * shape.parts, shape.num_blocks)
        now = self._clock.now()
        landing = Landing(
            order,
            Incoming(shape, order.num_tokens, first_block, sources, self._config.max_resends),
            asyncio.get_running_loop().create_future(),
            expires_at=now + order.timeout_s,
            renew_at=now + self._config.renew_s,
            book=ReceivingBook(
                self.ledger, order.key, sources, shape, first_block, order.prefill_instance
            ),
        )
        landing.book.bound(order.first_block, order.block_table[order.first_block : num_blocks])
        self.live[order.key] = landing
        return landing

    def commit(self, key: ShipmentKey) -> None:
        """Raises TransferFailed when the transfer is not whole, or was given up."""
        landing = self.live.get(key)
        if landing is None:
            if key not in self.memory:
                raise TransferFailed(Code.FAILED_PRECONDITION, f"no transfer {key} is known")
            if (failure := self.memory.failure(key)) is not None:
                raise failure
            return
        landing.incoming.commit()
        landing.book.committed()
        landing.post(Frame(key=key.to_proto(), commit=Commit()))
        self.counts.completed += 1
        self.forget(landing)

    async def abort(self, key: ShipmentKey, reason: str, code: Code = Code.CANCELLED) -> int:
        """Give a transfer up. When this returns, no byte of it will be written any more; it says
        how many blocks, from the prompt's first on, hold all this rank's cells.
        """
        landing = self.live.get(key)
        if landing is not None:
            self.fail(landing, code, reason)
            await landing.settled.wait()
        else:
            self.turn_away(key, TransferFailed(code, reason))
        return self.memory.num_whole_blocks(key)

    def fail(self, landing: Landing, code: Code, reason: str) -> None:
        landing.incoming.fail(code, reason)
        self.review(landing)

    def review(self, landing: Landing) -> None:
        """Act on where a transfer stands now: whole, newly failed, or failed and drained."""
        incoming, key = landing.incoming, landing.order.key
        failure = incoming.failure
        if failure is None:
            if incoming.state is Receiving.WHOLE:
                landing.book.whole()
            if incoming.state is Receiving.WHOLE and not landing.result.done():
                landing.expires_at = self._clock.now() + self._config.lease_s
                landing.result.set_result(
                    Receipt(incoming.num_chunks, incoming.bytes_landed, incoming.first_tokens)
                )
            return
        if not landing.told:
            landing.told = True
            landing.book.failed(failure.code)
            self.counts.failed += 1
            landing.post(abort_frame(key, failure))
            for task in landing.pulls:
                task.cancel()
            for inlet in landing.inlets.values():  # what has not begun to come is not waited for
                inlet.withdraw(failure.reason)
            if not landing.result.done():
                landing.result.set_exception(failure)
        incoming.settle(len(landing.jobs))
        if incoming.state is Receiving.FREED and not landing.settled.is_set():
            landing.book.freed()
            for port in landing.drains:
                port.post(Frame(key=key.to_proto(), drain_ack=DrainAck()))
            self.forget(landing)

    def forget(self, landing: Landing) -> None:
        for task in landing.pulls:
            task.cancel()
        del self.live[landing.order.key]
        incoming = landing.incoming
        self.memory.remember(landing.order.key, incoming.failure, incoming.num_whole_blocks)
        committed = incoming.failure is None
        self.watch.ended(landing.links, landing.order.key, committed=committed)
        landing.settled.set()

    def lose(self, port: Port, reason: str) -> None:
        self.counts.links_lost += not port.retired
        rank = port.link.hello.prefill_rank
        for landing in list(self.live.values()):
            if landing.ports.get(rank) is port:
                landing.incoming.lose(rank, reason)
                self.review(landing)
        for key, ranks in list(self.early.items()):
            if rank in ranks and ranks[rank].port is port:
                del ranks[rank]  # it cannot be told
                self.turn_away(key, TransferFailed(Code.UNAVAILABLE, reason))

    def tick(self, now: float) -> None:
        """Renew leases, and give up what nobody has given a sign of for too long."""
        each(self.live.values(), partial(self._tick, now))
        for key, ranks in list(self.early.items()):
            if min(early.expires_at for early in ranks.values()) <= now:
                reason = f"no order for it within {self._config.open_wait_s:g} s"
                self.turn_away(key, TransferFailed(Code.UNAVAILABLE, f"{self.identity}: {reason}"))
        for key, awaited in list(self.awaited.items()):
            if awaited.expires_at <= now:
                self.counts.expired += 1
                reason = "out of time before any prefill rank called"
                self.turn_away(key, TransferFailed(Code.DEADLINE_EXCEEDED, reason))

    def _tick(self, now: float, landing: Landing) -> None:
        incoming, dead = landing.incoming, dict[int, str]()
        for rank, pair in incoming.pairs.items():
            if pair.opened and not pair.arrived and self._is_silent(landing, rank, now):
                silent_s, where = now - pair.heard_at, incoming.where(rank)
                reason = f"prefill rank {rank} fell silent for {silent_s:.0f} s before {where}"
                self.counts.expired += incoming.fail(Code.UNAVAILABLE, reason)
                dead[rank] = reason
        if landing.expires_at <= now:
            whole = incoming.state is Receiving.WHOLE
            reason = "neither committed nor aborted" if whole else f"before {incoming.where()}"
            self.counts.expired += incoming.fail(Code.DEADLINE_EXCEEDED, f"out of time {reason}")
        if landing.renew_at <= now and not incoming.over:
            landing.renew_at = now + self._config.renew_s
            for port in landing.ports.values():
                renew = Renew(num_received=port.num_received)
                port.post(Frame(key=landing.order.key.to_proto(), renew=renew))
        self.review(landing)
        for rank, reason in dead.items():
            if not self._is_heard(landing.ports[rank], rank, now):
                landing.ports[rank].cut(reason, self.cuts)

    def _is_silent(self, landing: Landing, rank: int, now: float) -> bool:
        heard_at = landing.incoming.pairs[rank].heard_at
        beat_at = landing.ports[rank].pulse.beat_at(now)
        return now >= due_at(heard_at, beat_at, self._config.lease_s)

    def _is_heard(self, port: Port, rank: int, now: float) -> bool:
        """Whether any running transfer over the link has heard of prefill within the lease."""
        return any(
            not self._is_silent(landing, rank, now)
            for landing in self.live.values()
            if landing.ports.get(rank) is port and not landing.incoming.over
        )


def abort_frame(key: ShipmentKey, failure: TransferFailed) -> Frame:
    return Frame(key=key.to_proto(), abort=Abort(reason=failure.reason, code=failure.code))


def name_of(hello: Hello) -> str:
    return str(
        Identity(
            hello.prefill_worker, hello.prefill_instance, hello.prefill_epoch, hello.prefill_rank
        )
    )
