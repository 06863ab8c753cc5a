"""A prefill rank that is mistaken: what it says harms no other, and no transfer but its own."""

import asyncio

from protos.transfer_pb2 import Chunk, Frame, Open, SealAll
from tests.transport.broken import NUM_TOKENS, SOURCE, TARGET, carry_whole, failures
from tests.transport.harness import cluster, hello, network, soon
from transport.orders import ShipmentKey

OPEN = Open(num_tokens=NUM_TOKENS, num_layers=3, heads=[0, 1, 2])


async def test_a_rank_without_a_share_is_sent_home_and_what_is_whole_stays_so() -> None:
    async with network("loopback") as net, cluster(net) as group:
        key = group.key()
        (expected,), (shipped,) = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        await expected
        address = group.decode.addresses[0]
        link = await net.connector().connect(address, hello(prefill_rank=5))
        for _ in range(2):
            await link.send(Frame(key=key.to_proto(), open=OPEN))
            answer, _ = await link.recv()
            assert answer.abort.code == "FAILED_PRECONDITION"
            assert "prefill-0 rank 5" in answer.abort.reason
            assert "has no share of it: ranks 0 have" in answer.abort.reason
        await group.commit(key)
        await shipped
        await link.close("done")


async def test_a_rank_without_a_share_ends_a_transfer_that_is_not_whole_and_both_are_told() -> None:
    async with network("loopback") as net, cluster(net) as group:
        key = group.key()
        expected = group.expect(key, NUM_TOKENS, TARGET)
        address = group.decode.addresses[0]
        link = await net.connector().connect(address, hello(prefill_rank=5))
        await asyncio.sleep(0)
        await link.send(Frame(key=key.to_proto(), open=OPEN))
        answer, _ = await link.recv()
        (failure,) = await failures(*expected)
        assert failure.code == answer.abort.code == "FAILED_PRECONDITION"
        await link.close("done")


async def test_a_late_chunk_of_a_rank_that_no_group_has_is_counted_like_any_other() -> None:
    async with network("loopback") as net, cluster(net) as group:
        await carry_whole(group)
        ended = ShipmentKey((1).to_bytes(16, "big"), 1, 1, 1)
        (receiver,) = group.decode.receivers
        address = group.decode.addresses[0]
        link = await net.connector().connect(address, hello(prefill_rank=70_000))
        before = receiver.counts.late_frames
        for _ in range(2):
            chunk = Chunk(num_blocks=1, payload_bytes=8)
            await link.send(Frame(key=ended.to_proto(), chunk=chunk), memoryview(bytes(8)))
        await soon(lambda: receiver.counts.late_frames == before + 2)
        await link.close("done")


async def test_another_worker_does_not_go_on_for_one_whose_link_is_lost() -> None:
    """It has the same epoch and rank, and got hold of the transfer's key."""
    async with network("loopback") as net, cluster(net) as group:
        (receiver,) = group.decode.receivers
        key, address = group.key(), group.decode.addresses[0]
        expected = group.expect(key, NUM_TOKENS, TARGET)
        await asyncio.sleep(0)
        link = await net.connector().connect(address, hello())
        await link.send(Frame(key=key.to_proto(), open=OPEN))
        await link.recv()
        landing = receiver._arrivals.live[key]
        landing.incoming.pairs[0].num_chunks = 0  # all of it has come: a lost link is no failure
        await link.close("the cable is out")
        await soon(lambda: not landing.ports[0].open and not receiver._ports)
        other = await net.connector().connect(address, hello(prefill_instance="p9"))
        stale = receiver.counts.stale_frames
        await other.send(Frame(key=key.to_proto(), seal_all=SealAll(num_chunks=0)))
        await soon(lambda: receiver.counts.stale_frames == stale + 1)
        assert not landing.ports[0].open
        await receiver.abort(key, "test over")
        await failures(*expected)
        await other.close("done")
