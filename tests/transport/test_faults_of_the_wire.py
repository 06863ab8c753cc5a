"""What the wire loses, repeats, reorders or damages, and how it is made good."""

import asyncio

import numpy as np
import pytest

from engine.clock import ManualClock
from protos.transfer_pb2 import Frame, Hello
from tests.transport.broken import (
    IMPATIENT,
    NUM_TOKENS,
    SOURCE,
    TARGET,
    carry_whole,
    failures,
    flipped,
    with_fault,
)
from tests.transport.harness import (
    QUICK,
    SPEC,
    WIRES,
    cluster,
    filled_store,
    network,
)
from transport.fault_wire import FaultConnector, FaultLink, Item, none
from transport.link import Link
from transport.orders import TransferFailed


@pytest.mark.parametrize("wire", WIRES)
async def test_a_flipped_bit_is_caught_and_repaired(wire: str) -> None:
    flips = 0

    async def flip_first_of_each_layer(frame: Frame, payload: memoryview | None) -> list[Item]:
        nonlocal flips
        if payload is None or frame.chunk.first_block or frame.chunk.heads or flips == 3:
            return [(frame, payload)]
        flips += 1
        return [(frame, flipped(payload, bit=8191 * flips))]

    async with (
        network(wire) as net,
        cluster(net, wrap=with_fault(flip_first_of_each_layer)) as group,
    ):
        await carry_whole(group)
        assert group.decode.receivers[0].counts.damaged_chunks == 3
        assert group.prefill.shippers[0].counts.resent_chunks == 0
        assert group.prefill.shippers[0].counts.resent_cells == 3
        assert group.decode.receivers[0].counts.repaired_cells == 3


@pytest.mark.parametrize("wire", WIRES)
async def test_lasting_damage_is_a_loss_of_data_on_both_sides_that_names_the_cell(
    wire: str,
) -> None:
    async def flip(frame: Frame, payload: memoryview | None) -> list[Item]:
        if payload is not None and (frame.chunk.layer, frame.chunk.first_block) == (2, 0):
            return [(frame, flipped(payload, bit=0))]
        return [(frame, payload)]

    async with network(wire) as net, cluster(net, 1, 2, wrap=with_fault(flip)) as group:
        key = group.key()
        expected = group.expect(key, NUM_TOKENS, TARGET)
        shipped = group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        (sender,) = await failures(*shipped)
        for task in expected:
            await asyncio.wait([task], timeout=0.2)
        heard = [task.exception() for task in expected if task.done()]
        assert any(isinstance(error, TransferFailed) for error in heard)
        for error in [sender, *heard]:
            assert isinstance(error, TransferFailed)
            assert error.code == "DATA_LOSS"
            assert "layer 2, block 0, head" in error.reason
            assert "plane k: the digest does not match, after 3 attempts" in error.reason
        for receiver in group.decode.receivers:
            await receiver.abort(key, "test over")
        await asyncio.gather(*expected, return_exceptions=True)


async def test_no_random_flip_in_payload_or_digest_is_missed() -> None:
    rng = np.random.default_rng(7)
    flips = 0

    async def flip(frame: Frame, payload: memoryview | None) -> list[Item]:
        nonlocal flips
        if payload is None or rng.random() > 0.25:
            return [(frame, payload)]
        flips += 1
        if rng.random() < 0.2:
            damaged = Frame()
            damaged.CopyFrom(frame)
            digests = memoryview(frame.chunk.digests)
            damaged.chunk.digests = flipped(digests, int(rng.integers(1 << 20))).tobytes()
            return [(damaged, payload)]
        return [(frame, flipped(payload, int(rng.integers(1 << 20))))]

    async with (
        network("loopback") as net,
        cluster(net, wrap=with_fault(flip), config=IMPATIENT) as group,
    ):
        for _ in range(40):
            try:
                await carry_whole(group)
            except TransferFailed as failure:
                assert failure.code == "DATA_LOSS"  # the same cell four times in a row
                while group.decode.receivers[0].open_transfers:  # the blocks are used again
                    await asyncio.sleep(0.01)
        counts = group.decode.receivers[0].counts
        assert flips > 50
        # what is under way when a transfer fails is not looked at any more
        assert flips - 4 * counts.failed <= counts.damaged_chunks <= flips


@pytest.mark.parametrize(
    "what",
    ["swapped payloads", "the right bytes of another request", "truncated", "no payload"],
)
async def test_payloads_that_are_not_the_announced_cells_are_repaired(what: str) -> None:
    held: list[Item] = []
    num_chunks = 0

    async def swap(frame: Frame, payload: memoryview | None) -> list[Item]:
        nonlocal num_chunks
        if payload is None:
            return [(frame, payload)]
        num_chunks += 1
        if what == "truncated" and num_chunks == 2:
            return [(frame, payload[: payload.nbytes // 2])]
        if what == "no payload" and num_chunks == 2:
            return [(frame, None)]
        if what == "the right bytes of another request" and num_chunks == 2:
            foreign = filled_store(SPEC, group.prefill.intervals[0], 24, seed=9)
            blocks = SOURCE[: frame.chunk.num_blocks]
            cells = foreign.gather_cells(frame.chunk.layer, blocks, (0, 1, 2))
            return [(frame, memoryview(cells.reshape(-1).data)[: payload.nbytes])]
        if what == "swapped payloads" and num_chunks <= 2:
            held.append((frame, payload))
            if num_chunks == 1:
                return []
            (first, first_payload), (second, second_payload) = held
            return [(first, second_payload), (second, first_payload)]
        return [(frame, payload)]

    config = QUICK.__class__(chunk_bytes=800)
    async with (
        network("loopback") as net,
        cluster(net, wrap=with_fault(swap), config=config) as group,
    ):
        await carry_whole(group)
        assert group.decode.receivers[0].counts.damaged_chunks in (1, 2)


@pytest.mark.parametrize("wire", ["loopback", "grpc"])
async def test_repeated_and_reordered_chunks_are_placed_once(wire: str) -> None:
    held: list[Item] = []

    async def shuffle(frame: Frame, payload: memoryview | None) -> list[Item]:
        if payload is None:
            out, held[:] = [*held, (frame, payload)], []
            return out
        held.append((frame, payload))
        if len(held) < 3:
            return []
        first, second, third = held
        held.clear()
        return [third, first, third, second, first]

    async with network(wire) as net, cluster(net, wrap=with_fault(shuffle)) as group:
        await carry_whole(group)
        counts = group.decode.receivers[0].counts
        assert counts.duplicate_chunks > 0
        assert counts.bad_chunks == counts.damaged_chunks == counts.failed == 0


@pytest.mark.parametrize("body", ["open", "credit", "chunk", "chunk_ack", "seal_all", "commit"])
async def test_any_one_lost_frame_is_made_good(body: str) -> None:
    lost = 0

    async def lose_one(frame: Frame, payload: memoryview | None) -> list[Item]:
        nonlocal lost
        if frame.HasField(body) and lost == 0:
            lost += 1
            return []
        return [(frame, payload)]

    clock = ManualClock()
    config = QUICK.__class__(chunk_bytes=1000, window_bytes=1000)
    async with (
        network("loopback") as net,
        cluster(net, wrap=with_fault(lose_one, lose_one), clock=clock, config=config) as group,
    ):
        carrying = asyncio.create_task(carry_whole(group))
        for _ in range(100):
            if carrying.done():
                break
            await asyncio.sleep(0.01)
            await clock.run(0.5)
        await carrying
        assert lost == 1
        assert clock.now() < 30


async def test_an_acknowledgement_that_comes_after_its_ranks_commit_is_not_booked() -> None:
    """While another rank has not committed yet, so the shipment still lives."""
    held: list[Item] = []
    overtaken = asyncio.Event()

    async def of_rank_0(frame: Frame, payload: memoryview | None) -> list[Item]:
        if frame.HasField("chunk_ack") and not held:
            held.append((frame, payload))
            return []
        if frame.HasField("commit"):
            overtaken.set()
            return [(frame, payload), *held]
        return [(frame, payload)]

    async def of_rank_1(frame: Frame, payload: memoryview | None) -> list[Item]:
        if frame.HasField("commit"):
            await overtaken.wait()
            await asyncio.sleep(0.02)
        return [(frame, payload)]

    class ByRank(FaultConnector):
        async def connect(self, address: str, hello: Hello) -> Link:
            link = await self._inner.connect(address, hello)
            incoming = of_rank_1 if link.welcome.decode_rank else of_rank_0
            return FaultLink(link, none, incoming)

    async with network("loopback") as net, cluster(net, 1, 2, wrap=ByRank) as group:
        await carry_whole(group)
    assert held  # and the ledgers, which are read at the end, prove the transfer
