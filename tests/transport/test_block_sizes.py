"""Two ends with blocks of different sizes: the wire speaks of the smaller ones."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvcache.layout import KvLayout
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import Open
from tests.transport.harness import SPEC, WAYS, cluster, network, soon
from transport.incoming import Incoming
from transport.orders import Code, TransferFailed
from transport.sealed_runs import Run, cut
from transport.shipment import Shape
from transport.shipper import Shipper

SIZES = [(16, 16), (16, 32), (32, 16), (16, 64), (64, 16), (16, 128), (128, 16), (8, 128), (2, 4)]
LAYOUTS = [(a, b) for a in KvLayout for b in KvLayout]


def of_size(block_size: int) -> CacheSpec:
    return replace(SPEC, block_size=block_size)


@pytest.mark.parametrize(("theirs", "ours"), SIZES)
async def test_every_token_lands_where_its_owner_keeps_it(theirs: int, ours: int) -> None:
    pairs = [(1, 1), (3, 2), (2, 3), (9, 1), (1, 9), (4, 4)]
    async with network("loopback") as net:
        for number, (prefill_tp, decode_tp) in enumerate(pairs):
            layouts = LAYOUTS[number + 1]
            async with cluster(
                net,
                prefill_tp,
                decode_tp,
                spec=of_size(theirs),
                decode_block_size=ours,
                layouts=layouts,
            ) as made:
                for num_tokens in (1, theirs - 1, ours, 2 * max(theirs, ours) + 3):
                    before = made.snapshot()
                    source = [7, 3, *range(10, 24)][: -(-num_tokens // theirs)]
                    target = [5, 9, *range(11, 24)][: -(-num_tokens // ours)]
                    if len(source) * theirs < num_tokens or len(target) * ours < num_tokens:
                        continue  # more blocks of the smaller size than the pool has
                    reports, receipts = await made.carry(num_tokens, source, target)
                    made.check_blocks(num_tokens, source, target)
                    num_bytes = sum(report.bytes for report in reports)
                    unit = min(theirs, ours)
                    held = sum(len(interval) for interval in made.decode.intervals)
                    cell_bytes = unit * 4 * 8
                    want = -(-num_tokens // unit) * 3 * held * 2 * cell_bytes
                    assert num_bytes == want == sum(receipt.bytes for receipt in receipts)
                    after = made.snapshot()
                    for old, new in zip(before, after, strict=True):
                        rest = sorted(set(range(24)) - set(target))
                        assert (old[rest] == new[rest]).all()


@pytest.mark.parametrize("wire", WAYS)
async def test_every_wire_carries_blocks_of_two_sizes(wire: str) -> None:
    async with network(wire) as net:
        for theirs, ours in ((4, 16), (16, 4)):
            async with cluster(
                net, 2, 3, spec=of_size(theirs), decode_block_size=ours, layouts=LAYOUTS[1]
            ) as made:
                source, target = list(range(50 // theirs + 1)), list(range(50 // ours + 1))[::-1]
                await made.carry(50, source, target)
                made.check_blocks(50, source, target)


@pytest.mark.parametrize(("theirs", "ours", "resident"), [(16, 4, 5), (4, 16, 2), (8, 8, 3)])
async def test_what_decode_holds_already_is_counted_in_its_own_blocks_and_not_sent(
    theirs: int, ours: int, resident: int
) -> None:
    num_tokens = 45
    async with (
        network("loopback") as net,
        cluster(net, spec=of_size(theirs), decode_block_size=ours) as made,
    ):
        before = made.decode.stores[0].layer(0).clone()
        source, target = list(range(20))[: -(-num_tokens // theirs)], list(range(20))
        target = target[: -(-num_tokens // ours)]
        (report,), (receipt,) = await made.carry(num_tokens, source, target, resident)
        made.check_blocks(num_tokens, source, target, resident)
        unit = min(theirs, ours)
        sent = -(-num_tokens // unit) - resident * ours // unit
        assert report.bytes == receipt.bytes == sent * 3 * 3 * 2 * unit * 4 * 8
        held = target[:resident]
        assert torch.equal(made.decode.stores[0].layer(0)[held], before[held])


async def test_a_prompt_that_decode_holds_whole_ships_nothing() -> None:
    async with (
        network("loopback") as net,
        cluster(net, spec=of_size(16), decode_block_size=4) as made,
    ):
        before = made.snapshot()
        (report,), (receipt,) = await made.carry(16, [3], [1, 2, 3, 4], first_block=4)
        assert (report.bytes, receipt.bytes) == (0, 0)
        assert all((old == new).all() for old, new in zip(before, made.snapshot(), strict=True))


def sent_chunks(shipper: Shipper, least: int) -> bool:
    return shipper.counts.chunks >= least


async def test_sealing_block_by_block_sends_each_part_once() -> None:
    async with (
        network("loopback") as net,
        cluster(net, spec=of_size(8), decode_block_size=2) as made,
    ):
        key, source, target = made.key(), [4, 2, 9], list(range(11))
        expected, shipped = made.expect(key, 21, target), made.ship(key, 21)
        (shipper,) = made.prefill.shippers
        for block in range(3):
            for layer in range(3):
                made.seal(shipper, key, layer, block, source[block : block + 1], 21)
            await soon(partial(sent_chunks, shipper, 3 * (block + 1)))
        made.finish(shipper, key)
        (receipt,) = await asyncio.gather(*expected)
        await made.commit(key)
        await asyncio.gather(*shipped)
        made.check_blocks(21, source, target)
        assert receipt.bytes == 11 * 3 * 3 * 2 * 2 * 4 * 8


def test_a_run_of_large_blocks_is_cut_into_their_parts_and_ends_where_the_prompt_does() -> None:
    shape = Shape.of(of_size(16), 40, peer_block_size=4)
    assert (shape.num_blocks, shape.block_size, shape.parts) == (10, 4, 4)
    assert cut(Run(1, 0, (7,)), shape) == Run(1, 0, (28, 29, 30, 31))
    assert cut(Run(1, 1, (5, 6), 8), shape) == Run(1, 4, (20, 21, 22, 23, 24, 25))
    assert cut(Run(1, 2, (6,), 7), shape) == Run(1, 8, (24, 25), 3)
    assert shape.part_ids([7, 5, 6], 3, 9) == [31, 20, 21, 22, 23, 24]


def test_an_end_with_the_smaller_blocks_cuts_nothing() -> None:
    shape = Shape.of(of_size(4), 40, peer_block_size=64)
    assert (shape.num_blocks, shape.block_size, shape.parts) == (10, 4, 1)
    run = Run(1, 3, (5, 6), 2)
    assert cut(run, shape) is run


@pytest.mark.parametrize("size", [3, 24, 256])
def test_a_size_that_no_cache_has_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"block size {size} is not a power of two"):
        Shape.of(of_size(4), 40, peer_block_size=size)


def test_ends_that_disagree_about_the_blocks_of_the_wire_part_at_once() -> None:
    shape = Shape.of(of_size(16), 40, peer_block_size=4)
    incoming = Incoming(shape, 40, 0, {0: (0, 1, 2)}, max_resends=2)
    with pytest.raises(TransferFailed, match="offers blocks of 16 tokens, we expect 4") as failed:
        incoming.open(0, Open(num_tokens=40, num_layers=3, heads=[0, 1, 2], block_size=16))
    assert failed.value.code is Code.FAILED_PRECONDITION
