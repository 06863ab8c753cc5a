"""One request's life on a decode group.

    checked     a sample of what is cached of it is still what it was; what is not is dropped
    reserving   waits until blocks for the whole prompt can be promised, and a few to grow by
    promised    waits for a prefill rank's call; the blocks serve as cache meanwhile
    receiving   the promise is bound to blocks, once for all ranks, and each rank takes in its heads
                of those whose KV is not cached here
    committed   every rank has every cell; prefill may let its blocks go
    adopted     the request joins the batch with the tokens that prefill sampled
    streaming   tokens leave in order; the blocks stay cached here, named, when it ends

Without a transfer the prompt is computed here, and the first states are skipped. However it ends,
one place lets go: the transfer first, on every rank, and only then the blocks. Those that every
rank has whole by then stay as cache, so that whoever tries again starts from there.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import grpc
import grpc.aio

from decode_worker.ranks import HearsCalls, ReceivesPrompts
from decode_worker.waiting_room import WaitingRoom
from engine.engine import Engine
from engine.request import Admitted, Request
from engine.roster import Reservation
from protos import worker_pb2 as pb
from transport.orders import (
    Holder,
    Identity,
    Receipt,
    ReceiptOrder,
    ShipmentKey,
    TransferFailed,
    intervals_from,
)
from worker.cleanups import Cleanups
from worker.outputs import Outputs
from worker.refusal import Refused, refusals
from worker.work import WorkIntake

NO_DEADLINE_S = 86_400.0

DecodeEvents = AsyncGenerator[pb.DecodeEvent, None]


@dataclass(slots=True)
class _Call:
    """One call's own state: what must be let go, and how far it got."""

    request: Request
    outputs: Outputs
    key: ShipmentKey | None = None
    reservation: Reservation | None = None
    num_whole_blocks: int = 0  # cached here after a transfer that failed
    ended: bool = False


class Decoding:
    """Runs requests on rank 0's engine and drives the transfers of all ranks."""

    def __init__(
        self,
        engine: Engine,
        intake: WorkIntake,
        identity: Identity,
        calls: HearsCalls,
        ranks: Sequence[ReceivesPrompts],
        waiting_room: WaitingRoom,
        cleanups: Cleanups,
        against: Callable[[pb.PrefillSource], str] = lambda source: "",
    ) -> None:
        self._engine = engine
        self._intake = intake
        self._identity = identity
        self._calls = calls
        self._ranks = ranks
        self._waiting_room = waiting_room
        self._cleanups = cleanups
        self._against = against  # why nothing is to come from there now; empty when it may

    async def run(
        self, asked: pb.DecodeRequest, remaining_s: float = NO_DEADLINE_S
    ) -> DecodeEvents:
        """Yield the events of one call; raises Refused. Close it, and everything is let go.

        `remaining_s` is what the caller's deadline leaves; a transfer may take all of it, as long
        as its other end gives signs of life.
        """
        if asked.transfer_id and (why := self._against(asked.source)):
            reason = f"{self._identity.worker} takes nothing from {asked.source.worker}: {why}"
            raise Refused(grpc.StatusCode.UNAVAILABLE, reason)
        outputs = Outputs(asyncio.get_running_loop())
        call = _Call(self._intake.accept(asked.work, outputs.put), outputs)
        try:
            with refusals():
                if not asked.transfer_id:
                    self._engine.add(call.request)
                async with aclosing(self._events(call, asked, remaining_s)) as events:
                    async for event in events:
                        yield event
        finally:
            await self._cleanups.run(self._let_go(call), f"let go of {call.request.request_id}")

    async def _events(
        self, call: _Call, asked: pb.DecodeRequest, remaining_s: float
    ) -> DecodeEvents:
        if asked.transfer_id:
            await self._checked(call.request)
            call.reservation = await self._waiting_room.reserve(call.request)
            receiving = self._take_in(call, call.reservation, asked, remaining_s)
            try:
                async with aclosing(receiving):
                    async for event in receiving:
                        yield event
            except (TransferFailed, grpc.aio.AioRpcError):
                await self._cleanups.run(self._let_go(call), f"keep of {call.request.request_id}")
                yield _kept(call)
                raise
        unfinished = call.request.params.n
        while unfinished:
            output = await call.outputs.take()
            if isinstance(output, Admitted):
                continue
            unfinished -= bool(output.finish_reason)
            call.ended = not unfinished
            yield pb.DecodeEvent(token=output.to_proto())
        yield _done(call.request)

    async def _checked(self, request: Request) -> None:
        """Hold a sample of the cached blocks that would not be shipped against their digests."""
        checking = self._engine.sample_reuse(request.names)
        if checking is not None:
            await asyncio.wrap_future(checking)

    async def _take_in(
        self, call: _Call, reservation: Reservation, asked: pb.DecodeRequest, remaining_s: float
    ) -> DecodeEvents:
        """From promised blocks to an adopted request."""
        epochs = (asked.source.epoch, self._identity.epoch)
        call.key = ShipmentKey(asked.transfer_id, asked.attempt, *epochs)
        await self._calls.called(call.key, remaining_s)
        self._engine.bind(reservation)
        yield _reserved(reservation)
        order = _order(call.key, reservation, asked, remaining_s)
        receipts = await self._receipts(order)
        await asyncio.gather(*(rank.commit(order.key) for rank in self._ranks))
        first_tokens = [token for receipt in receipts for token in receipt.first_tokens]
        self._engine.adopt(reservation, first_tokens)
        self._calls.adopted(order.key)
        call.key = call.reservation = None  # the engine's now
        yield _adopted(reservation, receipts)

    async def _receipts(self, order: ReceiptOrder) -> list[Receipt]:
        """One from each rank; the first failure ends the others' wait."""
        tasks = [asyncio.ensure_future(rank.expect(order)) for rank in self._ranks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _let_go(self, call: _Call) -> None:
        whole = [0]
        if call.key is not None:
            whole = await asyncio.gather(
                *(self._abort(rank, call.key) for rank in range(len(self._ranks)))
            )
        if call.reservation is not None:
            num_whole = min([*whole, len(call.request.names)])  # a partial tail has no name
            if self._engine.abandon(call.reservation, num_whole):
                call.num_whole_blocks = num_whole
            call.key = call.reservation = None
        elif not call.ended:
            self._engine.cancel(call.request)

    async def _abort(self, rank: int, key: ShipmentKey) -> int:
        num_whole = await self._ranks[rank].abort(key, "the request has ended")
        if rank > 0:
            self._calls.confirmed(key, rank)
        return num_whole


def _order(
    key: ShipmentKey, reservation: Reservation, asked: pb.DecodeRequest, remaining_s: float
) -> ReceiptOrder:
    source = asked.source
    return ReceiptOrder(
        key=key,
        num_tokens=len(reservation.request.prompt),
        first_block=reservation.num_cached_blocks,
        block_table=reservation.block_table,
        prefill_instance=source.instance,
        source_intervals=intervals_from(source.kv_head_starts, source.kv_head_stops),
        timeout_s=remaining_s,
        source_block_size=source.block_size,
        source_addresses=tuple(source.rank_addresses),
        holders=tuple(map(Holder.from_proto, asked.holders)),
        block_names=tuple(reservation.request.names),
    )


def _reserved(reservation: Reservation) -> pb.DecodeEvent:
    return pb.DecodeEvent(reserved=pb.DecodeReserved(cached_blocks=reservation.num_cached_blocks))


def _adopted(reservation: Reservation, receipts: Sequence[Receipt]) -> pb.DecodeEvent:
    return pb.DecodeEvent(
        adopted=pb.DecodeAdopted(
            shipped_blocks=len(reservation.block_table) - reservation.num_cached_blocks,
            shipped_bytes=sum(receipt.bytes for receipt in receipts),
        )
    )


def _kept(call: _Call) -> pb.DecodeEvent:
    return pb.DecodeEvent(kept=pb.DecodeKept(blocks=call.num_whole_blocks))


def _done(request: Request) -> pb.DecodeEvent:
    return pb.DecodeEvent(
        done=pb.DecodeDone(
            cached_tokens=max(0, request.num_cached_tokens),
            computed_tokens=request.num_computed_tokens,
            queue_ms=request.queue_ms,
            compute_ms=request.compute_ms,
        )
    )
