"""Each rank of a decode group receives its own KV heads; rank 0 asks the others over gRPC.

expect   answers when every cell of the rank's share is verified and in its blocks
commit   prefill may let go: this rank holds everything
abort    answers when no byte of the transfer can be written here any more, with the number of
         blocks, from the prompt's first on, that hold every cell of the rank's share
"""

from typing import Protocol

import grpc.aio

from protos import rank_pb2, rank_pb2_grpc
from transport.orders import Receipt, ReceiptOrder, ShipmentKey, TransferFailed
from transport.receiver import Receiver
from worker.refusal import Context, abort_transfer


class ReceivesPrompts(Protocol):
    """One rank's side of every transfer; `transport.receiver.Receiver` is the local one."""

    async def expect(self, order: ReceiptOrder) -> Receipt:
        """Raises TransferFailed."""
        ...

    async def commit(self, key: ShipmentKey) -> None: ...

    async def abort(self, key: ShipmentKey, reason: str) -> int: ...


class HearsCalls(Protocol):
    """Rank 0's own `transport.receiver.Receiver`."""

    async def called(self, key: ShipmentKey, timeout_s: float) -> None:
        """Returns once a prefill rank has called. Raises TransferFailed."""
        ...

    def confirmed(self, key: ShipmentKey, rank: int) -> None:
        """Another rank has answered an abort."""
        ...

    def adopted(self, key: ShipmentKey) -> None:
        """The request runs on what was committed."""
        ...


class RemoteRank:
    """A rank in another process of the group. A lost rank raises AioRpcError."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rank_pb2_grpc.DecodeRankStub(channel)

    async def expect(self, order: ReceiptOrder) -> Receipt:
        return Receipt.from_proto(await self._stub.Expect(order.to_proto()))

    async def commit(self, key: ShipmentKey) -> None:
        await self._stub.CommitReceipt(rank_pb2.RankCommit(key=key.to_proto()))

    async def abort(self, key: ShipmentKey, reason: str) -> int:
        order = rank_pb2.RankAbort(key=key.to_proto(), reason=reason)
        answer: rank_pb2.RankWhole = await self._stub.AbortReceipt(order)
        return answer.whole_blocks


class DecodeRankServicer(rank_pb2_grpc.DecodeRankServicer):
    """The other end of `RemoteRank`."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def Expect(self, request: rank_pb2.ReceiptOrder, context: Context) -> rank_pb2.Receipt:
        try:
            return (await self._receiver.expect(ReceiptOrder.from_proto(request))).to_proto()
        except TransferFailed as failure:
            await abort_transfer(context, failure)

    async def CommitReceipt(
        self, request: rank_pb2.RankCommit, context: Context
    ) -> rank_pb2.RankAck:
        try:
            await self._receiver.commit(ShipmentKey.from_proto(request.key))
        except TransferFailed as failure:  # the transfer's own fault, not this rank's
            await abort_transfer(context, failure)
        return rank_pb2.RankAck()

    async def AbortReceipt(
        self, request: rank_pb2.RankAbort, context: Context
    ) -> rank_pb2.RankWhole:
        key = ShipmentKey.from_proto(request.key)
        return rank_pb2.RankWhole(whole_blocks=await self._receiver.abort(key, request.reason))
