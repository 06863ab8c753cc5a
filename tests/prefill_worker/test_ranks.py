"""What rank 0 asks of another rank arrives there as it was meant, and so does the answer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import grpc.aio
import pytest

from kvcache.head_map import HeadInterval
from prefill_worker.ranks import LocalRank, PrefillRankServicer, RemoteRank
from prefill_worker.sealing import SealingObserver
from protos import rank_pb2_grpc
from tests.transport.harness import cluster, network, served
from transport.borrower import Borrowed, Borrower, BorrowOrder
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


@asynccontextmanager
async def remote_of(rank: LocalRank) -> AsyncIterator[RemoteRank]:
    add = partial(rank_pb2_grpc.add_PrefillRankServicer_to_server, PrefillRankServicer(rank))
    async with served(add) as address, grpc.aio.insecure_channel(address) as channel:
        yield RemoteRank(channel)


async def test_another_rank_is_told_which_blocks_to_take_and_says_how_many_are_whole() -> None:
    rank = Rank()
    async with remote_of(rank) as remote:
        took = await remote.borrow(ORDER)
    assert rank.orders == [ORDER]
    assert took == Borrowed(1, 4096, "some of it is not there any more")


async def test_an_order_that_comes_after_its_abort_is_refused_and_leaves_nothing() -> None:
    async with network("loopback") as net, cluster(net) as group:
        (shipper,) = group.prefill.shippers
        order = group.ship_orders(group.key(), 18)
        observer = SealingObserver(
            shipper, lambda _layer, _blocks: None, 3, 4, finishes_prompts=True
        )
        rank = LocalRank(shipper, observer, cast(Borrower, None))
        async with remote_of(rank) as remote:
            await remote.abort(order.key, "the client left")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await remote.open(order)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert caught.value.details() == "the client left"
        assert shipper.open_shipments == 0
        assert not rank._shipments and not observer._num_tokens
