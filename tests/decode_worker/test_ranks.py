"""What another rank says of a transfer reaches rank 0 as it was said."""

from functools import partial
from typing import cast

import grpc.aio
import pytest

from decode_worker.ranks import DecodeRankServicer, RemoteRank
from protos import rank_pb2_grpc
from tests.transport.harness import served
from transport.orders import Code, ShipmentKey, TransferFailed
from transport.receiver import Receiver


class GivenUp:
    """Prefill gave the transfer up just before the group's commit came here."""

    async def commit(self, key: ShipmentKey) -> None:
        raise TransferFailed(Code.UNAVAILABLE, "prefill-0 rank 1 gave up: its client left")


async def test_a_commit_that_comes_too_late_fails_for_the_transfers_own_reason() -> None:
    """Not as a mistake of this worker's, which would be avoided for it."""
    servicer = DecodeRankServicer(cast(Receiver, GivenUp()))
    add = partial(rank_pb2_grpc.add_DecodeRankServicer_to_server, servicer)
    async with served(add) as address, grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await RemoteRank(channel).commit(ShipmentKey(b"t" * 16, 1, 1, 1))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "prefill-0 rank 1 gave up: its client left"
