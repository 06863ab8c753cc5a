"""Each rank of a prefill worker ships its own KV heads; rank 0 asks the others over gRPC.

open      the rank will ship this prompt as its blocks are sealed; asked before the engine may
          compute any of it
shipped   answers when decode has committed everything this rank had to give
abort     answers when nothing of the shipment will be read any more
borrow    answers when nothing more of another worker's blocks will be written here
"""

import asyncio
from typing import Protocol

import grpc.aio

from prefill_worker.sealing import SealingObserver
from protos import rank_pb2, rank_pb2_grpc
from transport.borrower import Borrowed, Borrower, BorrowOrder
from transport.orders import ShipmentKey, ShipmentOrder, ShipmentReport, TransferFailed
from transport.shipper import Shipper
from worker.refusal import Context, abort_transfer


class ShipsPrompts(Protocol):
    """One rank's side of every shipment."""

    async def open(self, order: ShipmentOrder) -> None:
        """Raises TransferFailed when it is refused at once."""
        ...

    async def shipped(self, key: ShipmentKey) -> ShipmentReport:
        """Raises TransferFailed."""
        ...

    async def abort(self, key: ShipmentKey, reason: str) -> None: ...

    async def borrow(self, order: BorrowOrder) -> Borrowed: ...


class LocalRank:
    """The rank in this process."""

    def __init__(self, shipper: Shipper, observer: SealingObserver, borrower: Borrower) -> None:
        self._shipper = shipper
        self._observer = observer
        self._borrower = borrower
        self._shipments: dict[ShipmentKey, tuple[int, asyncio.Task[ShipmentReport]]] = {}

    async def open(self, order: ShipmentOrder) -> None:
        task = asyncio.create_task(self._shipper.ship(order), name=f"ship {order.key}")
        self._shipments[order.key] = (order.request_key, task)
        self._observer.watch(order.request_key, order.num_tokens)
        await asyncio.sleep(0)  # the task has run up to its first wait: the shipment is known
        # Refused, or given up before it came here. A rank that owes nothing is done at once, too.
        if task.done() and task.exception() is not None:
            self._forget(order.key, order.request_key)
            task.result()

    async def shipped(self, key: ShipmentKey) -> ShipmentReport:
        request_key, task = self._shipments[key]
        report = await asyncio.shield(task)
        self._forget(key, request_key)
        return report

    async def abort(self, key: ShipmentKey, reason: str) -> None:
        known = self._shipments.get(key)
        if known is not None:
            self._forget(key, known[0])
        await self._shipper.abort(key, reason)  # one that comes later, too: its order may be late
        if known is not None:
            await asyncio.gather(known[1], return_exceptions=True)

    async def borrow(self, order: BorrowOrder) -> Borrowed:
        return await self._borrower.borrow(order)

    def _forget(self, key: ShipmentKey, request_key: int) -> None:
        self._shipments.pop(key, None)
        self._observer.forget(request_key)


class RemoteRank:
    """A rank in another process of the group. A lost rank raises AioRpcError."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rank_pb2_grpc.PrefillRankStub(channel)

    async def open(self, order: ShipmentOrder) -> None:
        await self._stub.OpenShipment(order.to_proto())

    async def shipped(self, key: ShipmentKey) -> ShipmentReport:
        report = await self._stub.AwaitShipment(rank_pb2.RankCommit(key=key.to_proto()))
        return ShipmentReport.from_proto(report)

    async def abort(self, key: ShipmentKey, reason: str) -> None:
        await self._stub.AbortShipment(rank_pb2.RankAbort(key=key.to_proto(), reason=reason))

    async def borrow(self, order: BorrowOrder) -> Borrowed:
        return Borrowed.from_proto(await self._stub.Borrow(order.to_proto()))


class PrefillRankServicer(rank_pb2_grpc.PrefillRankServicer):
    """The other end of `RemoteRank`."""

    def __init__(self, rank: LocalRank) -> None:
        self._rank = rank

    async def OpenShipment(
        self, request: rank_pb2.ShipmentOrder, context: Context
    ) -> rank_pb2.RankAck:
        try:
            await self._rank.open(ShipmentOrder.from_proto(request))
        except TransferFailed as failure:
            await abort_transfer(context, failure)
        return rank_pb2.RankAck()

    async def AwaitShipment(
        self, request: rank_pb2.RankCommit, context: Context
    ) -> rank_pb2.ShipmentReport:
        try:
            return (await self._rank.shipped(ShipmentKey.from_proto(request.key))).to_proto()
        except TransferFailed as failure:
            await abort_transfer(context, failure)

    async def AbortShipment(
        self, request: rank_pb2.RankAbort, context: Context
    ) -> rank_pb2.RankAck:
        await self._rank.abort(ShipmentKey.from_proto(request.key), request.reason)
        return rank_pb2.RankAck()

    async def Borrow(self, request: rank_pb2.BorrowOrder, context: Context) -> rank_pb2.Borrowed:
        return (await self._rank.borrow(BorrowOrder.from_proto(request))).to_proto()
