"""Workers that were replaced or do not match, and frames that belong to nobody."""

import asyncio

import pytest

from engine.clock import ManualClock
from protos.transfer_pb2 import Chunk, Credit, Frame, Hello, Open, SealAll
from tests.transport.broken import (
    IMPATIENT,
    NUM_TOKENS,
    SOURCE,
    TARGET,
    carry_whole,
    failures,
)
from tests.transport.harness import (
    MANIFEST,
    QUICK,
    SPEC,
    WIRES,
    cluster,
    filled_store,
    hello,
    network,
    soon,
)
from transport.chunk_check import chunk_check
from transport.link import PROTOCOL, Connector, Link, LinkRefused
from transport.orders import Identity, ShipmentKey, ShipmentOrder, TransferFailed
from transport.receiver import Receiver


async def test_a_replaced_decode_worker_is_noticed_on_first_use() -> None:
    async with network("grpc") as net, cluster(net) as group:
        await carry_whole(group)
        address = group.decode.addresses[0]
        await net.silence(address)
        await soon(lambda: group.prefill.shippers[0].counts.links_lost == 1)
        store = filled_store(SPEC, group.decode.intervals[0], 24, seed=3)
        me = Identity("decode-0", "d2", 2, 0)
        async with Receiver(me, store.kv_heads, store, MANIFEST, ManualClock(), QUICK) as receiver:
            await net.listen(receiver, address)
            key = group.key()
            (old_failure,) = await failures(*group.ship(key, NUM_TOKENS))
            assert old_failure.code == "FAILED_PRECONDITION"
            assert "asks for instance d1, but this is decode-0 rank 0" in old_failure.reason

            target = group.target().__class__(
                "decode-0", "d2", 2, (address,), group.decode.intervals
            )
            key = ShipmentKey(b"new life", 1, 1, 2)
            (shipper,) = group.prefill.shippers
            order = ShipmentOrder(key, 999, NUM_TOKENS, target, "grpc")
            expected = asyncio.create_task(
                receiver.expect(group.receipt_order(key, NUM_TOKENS, TARGET))
            )
            shipped = asyncio.create_task(shipper.ship(order))
            for layer in range(3):
                shipper.seal(999, layer, 0, SOURCE, 2)
            shipper.finish(999)
            await expected
            await receiver.commit(key)
            await shipped
            group.decode.stores[0] = store
            group.check_blocks(NUM_TOKENS, SOURCE, TARGET)


@pytest.mark.parametrize("wire", WIRES)
async def test_a_replaced_prefill_worker_ends_what_its_old_life_began(wire: str) -> None:
    async with network(wire) as net, cluster(net) as group:
        key = group.key()
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        (receiver,) = group.decode.receivers
        await soon(lambda: bool(receiver._ports))
        link = await net.connector().connect(
            group.decode.addresses[0], hello(prefill_instance="p2", prefill_epoch=2)
        )
        receiver_failure, sender_failure = await failures(*expected, *shipped)
        assert "(instance p2, epoch 2) called again" in receiver_failure.reason
        assert sender_failure.code == "UNAVAILABLE"
        with pytest.raises(LinkRefused, match="it is epoch 1, but epoch 2 is connected already"):
            await net.connector().connect(group.decode.addresses[0], hello())
        await link.close("done")


@pytest.mark.parametrize("wire", WIRES)
async def test_other_weights_are_refused_and_both_fingerprints_named(wire: str) -> None:
    async with network(wire) as net, cluster(net) as group:
        with pytest.raises(LinkRefused) as caught:
            await net.connector().connect(
                group.decode.addresses[0], hello(manifest_digest=b"\x01\x02")
            )
        assert "manifest with digest 0102, ours is 6d616e6966657374" in str(caught.value)


async def test_another_protocol_is_refused_with_both_numbers() -> None:
    async with network("grpc") as net, cluster(net) as group:
        with pytest.raises(LinkRefused, match=f"speaks transfer protocol 9, we speak {PROTOCOL}"):
            await net.connector().connect(group.decode.addresses[0], hello(protocol=9))


async def test_a_prefill_of_another_instance_than_ordered_is_refused() -> None:
    async with network("loopback") as net, cluster(net) as group:
        key = group.key()
        order = group.receipt_order(key, NUM_TOKENS, TARGET)
        (receiver,) = group.decode.receivers
        other = order.__class__(
            key, NUM_TOKENS, 0, tuple(TARGET), "p9", group.prefill.intervals, 20
        )
        expected = asyncio.create_task(receiver.expect(other))
        shipped = group.ship(key, NUM_TOKENS)
        for failure in await failures(expected, *shipped):
            assert failure.code == "FAILED_PRECONDITION"
            assert "expected instance p9" in failure.reason


async def test_prompts_of_different_lengths_on_the_two_sides_are_refused() -> None:
    async with network("loopback") as net, cluster(net) as group:
        key = group.key()
        expected, shipped = group.expect(key, 17, TARGET), group.ship(key, 18)
        for failure in await failures(*expected, *shipped):
            assert failure.code == "FAILED_PRECONDITION"
            assert "(18, 3, (0, 1, 2)), we expect (17, 3, (0, 1, 2))" in failure.reason


async def raw_link(connector: Connector, address: str, **fields: object):  # type: ignore[no-untyped-def]
    return await connector.connect(address, hello(**fields))


@pytest.mark.parametrize("wire", ["loopback", "grpc"])
async def test_frames_of_other_epochs_and_unknown_transfers_are_counted_and_dropped(
    wire: str,
) -> None:
    async with network(wire) as net, cluster(net) as group:
        (receiver,) = group.decode.receivers
        before = group.snapshot()
        link = await raw_link(net.connector(), group.decode.addresses[0])
        key = group.key()
        expected = group.expect(key, NUM_TOKENS, TARGET)
        chunk = Chunk(num_blocks=1, payload_bytes=768, digests=bytes(48))
        payload = memoryview(bytes(768))
        wrong = [
            ShipmentKey(key.transfer_id, 1, 1, 0),  # of an older life of decode
            ShipmentKey(key.transfer_id, 1, 0, 1),  # of an older life of prefill
            ShipmentKey(key.transfer_id, 0, 1, 1),  # of an older attempt
            key,  # before its Open
        ]
        for each in wrong:
            await link.send(Frame(key=each.to_proto(), chunk=chunk), payload)
        await link.send(Frame(key=key.to_proto(), credit=Credit()))  # not theirs to give
        await soon(lambda: receiver.counts.stale_frames == 5)
        opened = Open(num_tokens=NUM_TOKENS, num_layers=3, heads=[0, 1, 2])
        await link.send(Frame(key=wrong[0].to_proto(), open=opened))
        answer, _ = await link.recv()
        assert (answer.abort.code, answer.abort.reason) == (
            "FAILED_PRECONDITION",
            "epochs are prefill 1, decode 1, not 1 and 0",
        )
        assert not expected[0].done()
        for old, new in zip(before, group.snapshot(), strict=True):
            assert (old == new).all()
        await receiver.abort(key, "test over")
        await failures(*expected)
        await link.close("done")


@pytest.mark.parametrize(
    ("layer", "first_block", "num_blocks"),
    [(3, 0, 1), (0, 5, 1), (0, 4, 2), (0, 0, 0), (2**32 - 1, 2**32 - 1, 2**32 - 1)],
)
async def test_chunks_out_of_range_write_nothing_and_end_in_a_loss_of_data(
    layer: int, first_block: int, num_blocks: int
) -> None:
    async with network("loopback") as net, cluster(net, config=IMPATIENT) as group:
        (receiver,) = group.decode.receivers
        before = group.snapshot()
        link = await raw_link(net.connector(), group.decode.addresses[0])
        key = group.key()
        expected = group.expect(key, NUM_TOKENS, TARGET)
        opened = Open(num_tokens=NUM_TOKENS, num_layers=3, heads=[0, 1, 2])
        await asyncio.sleep(0)
        await link.send(Frame(key=key.to_proto(), open=opened))
        chunk = Chunk(layer=layer, first_block=first_block, num_blocks=num_blocks)
        chunk.check = chunk_check(key, chunk)
        for _ in range(4):
            await link.send(Frame(key=key.to_proto(), chunk=chunk), memoryview(bytes(768)))
        await link.send(Frame(key=key.to_proto(), seal_all=SealAll(num_chunks=1)))
        (failure,) = await failures(*expected)
        assert failure.code == "DATA_LOSS"
        assert receiver.counts.bad_chunks == 4
        for old, new in zip(before, group.snapshot(), strict=True):
            assert (old == new).all()
        await link.close("done")


async def test_a_key_is_never_used_twice() -> None:
    async with network("loopback") as net, cluster(net) as group:
        await carry_whole(group)
        used = ShipmentKey((1).to_bytes(16, "big"), 1, 1, 1)
        (receiver,), (shipper,) = group.decode.receivers, group.prefill.shippers
        with pytest.raises(TransferFailed, match="is done"):
            await receiver.expect(group.receipt_order(used, NUM_TOKENS, TARGET))
        with pytest.raises(TransferFailed, match="is done"):
            await shipper.ship(group.ship_orders(used, NUM_TOKENS))


async def test_an_order_that_does_not_fit_its_blocks_is_refused_with_the_numbers() -> None:
    async with network("loopback") as net, cluster(net) as group:
        (receiver,) = group.decode.receivers
        with pytest.raises(TransferFailed, match="18 tokens need 5 blocks; there are 4 blocks"):
            await receiver.expect(group.receipt_order(group.key(), NUM_TOKENS, TARGET[:4]))
        with pytest.raises(TransferFailed, match="this is epoch 1, not 7"):
            await receiver.expect(
                group.receipt_order(ShipmentKey(b"k", 1, 1, 7), NUM_TOKENS, TARGET)
            )


async def test_a_wire_that_prefill_does_not_have_is_named() -> None:
    async with network("loopback") as net, cluster(net) as group:
        (shipper,) = group.prefill.shippers
        order = group.ship_orders(group.key(), NUM_TOKENS)
        other = ShipmentOrder(order.key, order.request_key, NUM_TOKENS, order.target, "nccl")
        with pytest.raises(TransferFailed, match="no wire 'nccl' to decode-0 rank 0 at here:1"):
            await shipper.ship(other)


async def test_a_wire_that_fails_in_an_unforeseen_way_ends_the_shipment_at_once() -> None:
    class Broken:
        async def connect(self, address: str, hello: Hello) -> Link:
            raise AttributeError("this build has no such wire")

    async with network("loopback") as net, cluster(net, wrap=lambda inner: Broken()) as group:
        key = group.key()
        (failure,) = await failures(*group.ship(key, NUM_TOKENS))
        assert failure.code == "UNAVAILABLE"
        assert "AttributeError: this build has no such wire" in failure.reason
        await soon(lambda: group.prefill.shippers[0].open_shipments == 0)
