"""Blocks that changed in prefill's pool since their digests were kept: never shipped as right."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.transport.broken import NUM_TOKENS, SOURCE, failures
from tests.transport.harness import SPEC, WAYS, cluster, network
from transport.orders import Code


@pytest.mark.parametrize("wire", WAYS)
@pytest.mark.parametrize("block_size", [SPEC.block_size, 2])
async def test_a_rotten_block_ends_its_shipment_over_every_wire_and_its_rank_tells_the_engine(
    wire: str, block_size: int
) -> None:
    """In every layer, on one of two ranks; its digests are known. Of parts of blocks none are."""
    told = list[Sequence[int]]()

    async def tell(block_ids: Sequence[int]) -> None:
        told.append(tuple(block_ids))

    async with network(wire) as net, cluster(net, 2, 1, decode_block_size=block_size) as group:
        for shipper, store in zip(group.prefill.shippers, group.prefill.stores, strict=True):
            shipper._pumps._found_rotten = tell
            assert store.recheck(SOURCE) == []
        for layer in range(SPEC.num_layers):
            group.prefill.stores[1].layer(layer)[SOURCE[2]] += 1  # and nobody says so
        table = list(range(-(-NUM_TOKENS // block_size)))
        key, (receiver,) = group.key(), group.decode.receivers
        expected, shipped = group.expect(key, NUM_TOKENS, table), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        try:
            ends = await failures(*expected, shipped[1])
        finally:
            await receiver.abort(key, "over")
            await asyncio.gather(*expected, *shipped, return_exceptions=True)
        assert {end.code for end in ends} == {Code.DATA_LOSS}
        assert all(f"blocks [{SOURCE[2]}] have changed" in end.reason for end in ends)
        assert set(told) == {(SOURCE[2],)}
        assert receiver.counts.links_lost == 0
