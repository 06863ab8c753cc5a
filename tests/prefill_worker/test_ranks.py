"""What rank 0 asks of another rank arrives there as it was meant, and so does the answer."""

import grpc.aio

from kvcache.head_map import HeadInterval
from prefill_worker.ranks import LocalRank, PrefillRankServicer, RemoteRank
from protos import rank_pb2_grpc
from transport.borrower import Borrowed, BorrowOrder
from transport.orders import Holder, ShipmentKey

ORDER = BorrowOrder(
    key=ShipmentKey(b"t" * 16, 2, 7, 0),
    names=(b"a" * 32, b"b" * 32),
    block_ids=(9, 4),
    holder=Holder("p0-life", ("h:1", "h:2"), (HeadInterval(0, 2), HeadInterval(2, 3))),
    timeout_s=0.25,
)


class Rank(LocalRank):
    def __init__(self) -> None:
        self.orders: list[BorrowOrder] = []

    async def borrow(self, order: BorrowOrder) -> Borrowed:
        self.orders.append(order)
        return Borrowed(1, 4096, "some of it is not there any more")


async def test_another_rank_is_told_which_blocks_to_take_and_says_how_many_are_whole() -> None:
    rank = Rank()
    server = grpc.aio.server()
    rank_pb2_grpc.add_PrefillRankServicer_to_server(PrefillRankServicer(rank), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            took = await RemoteRank(channel).borrow(ORDER)
    finally:
        await server.stop(0)
    assert rank.orders == [ORDER]
    assert took == Borrowed(1, 4096, "some of it is not there any more")
