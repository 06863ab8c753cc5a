"""A link is cut or a worker gone: both ends know at once, say where, and let go."""

import asyncio
import gc
import time
from collections.abc import Sequence

import pytest

from kvcache.kept_digests import BlockRotten
from protos.transfer_pb2 import Commit, Frame, Hello
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
    WAYS,
    Cluster,
    cluster,
    network,
    settled_tasks,
    soon,
)
from transport.departure import Departure
from transport.fault_wire import Cut, Item
from transport.landing import Landing
from transport.link import Connector, Link
from transport.orders import ShipmentKey, TransferFailed


@pytest.mark.parametrize("wire", WAYS)
async def test_a_cut_link_fails_both_ends_at_once_and_names_the_place(wire: str) -> None:
    async def cut(frame: Frame, payload: memoryview | None) -> list[Item]:
        if frame.HasField("chunk") and frame.chunk.layer == 1:
            raise Cut("the cable is out")
        return [(frame, payload)]

    async with network(wire) as net, cluster(net, wrap=with_fault(cut)) as group:
        key = group.key()
        expected = group.expect(key, NUM_TOKENS, TARGET)
        shipped = group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        started = time.monotonic()
        receiver_failure, sender_failure = await failures(*expected, *shipped)
        assert time.monotonic() - started < 3
        assert receiver_failure.code == sender_failure.code == "UNAVAILABLE"
        assert "the link to decode-0 rank 0 is lost at layer" in sender_failure.reason
        assert "prefill-0 rank 0" in receiver_failure.reason
        assert "before layer" in receiver_failure.reason
        assert group.prefill.shippers[0].open_shipments == 0


@pytest.mark.parametrize("wire", WAYS)
@pytest.mark.parametrize("num_sealed", range(0, 15, 2))
async def test_prefill_gone_after_any_number_of_blocks_fails_decode_at_once(
    wire: str, num_sealed: int
) -> None:
    credited = asyncio.Event()

    async def note(frame: Frame, payload: memoryview | None) -> list[Item]:
        if frame.HasField("credit"):
            credited.set()
        return [(frame, payload)]

    async with network(wire) as net, cluster(net, wrap=with_fault(incoming=note)) as group:
        key = group.key()
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        await credited.wait()
        for number in range(num_sealed):
            layer, block = divmod(number, 5)
            group.seal(shipper, key, layer, block, [SOURCE[block]], NUM_TOKENS)
        await soon(lambda: receiver.counts.bytes == num_sealed * 768)
        await shipper.close()
        results = await failures(*expected, *shipped)
        assert [failure.code for failure in results] == ["UNAVAILABLE", "UNAVAILABLE"]
        await receiver.abort(key, "given up")
        assert receiver.open_transfers == 0


class Keeping:
    """Keeps the links it makes, for a test to cut."""

    def __init__(self, inner: Connector) -> None:
        self._inner = inner
        self.links: list[Link] = []

    async def connect(self, address: str, hello: Hello) -> Link:
        self.links.append(await self._inner.connect(address, hello))
        return self.links[-1]


@pytest.mark.parametrize("wire", WAYS)
async def test_a_link_lost_before_the_commit_is_dialled_again_and_the_end_asked_for(
    wire: str,
) -> None:
    """Decode holds every cell, and its commit comes over the next link."""
    kept: list[Keeping] = []

    def keep(inner: Connector) -> Connector:
        kept.append(Keeping(inner))
        return kept[-1]

    async with network(wire) as net, cluster(net, wrap=keep) as group:
        key = group.key()
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        (expected,), (shipped,) = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        async with asyncio.timeout(5):
            await expected
            await kept[0].links[0].close("the cable is out")
            await soon(lambda: len(kept[0].links) == 2)
            await group.commit(key)
            await shipped
        group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
        assert (shipper.counts.ends_asked, shipper.counts.completed) == (1, 1)
        assert (shipper.open_shipments, receiver.open_transfers) == (0, 0)


@pytest.mark.parametrize("wire", WAYS)
async def test_a_commit_lost_with_its_link_is_asked_for_over_the_next(wire: str) -> None:
    cuts = 1

    async def cut(frame: Frame, payload: memoryview | None) -> list[Item]:
        nonlocal cuts
        if cuts and frame.HasField("commit"):
            cuts -= 1
            raise Cut("the cable is out")
        return [(frame, payload)]

    async with network(wire) as net, cluster(net, wrap=with_fault(incoming=cut)) as group:
        async with asyncio.timeout(5):
            await carry_whole(group)
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        assert (shipper.counts.ends_asked, shipper.counts.completed) == (1, 1)
        assert (shipper.open_shipments, receiver.open_transfers) == (0, 0)


async def test_cells_that_came_damaged_come_again_over_the_next_link() -> None:
    kept: list[Keeping] = []
    severed = False

    async def damage(frame: Frame, payload: memoryview | None) -> list[Item]:
        whole = payload is None or frame.chunk.layer != 1 or frame.chunk.heads
        return [(frame, payload if whole or payload is None else flipped(payload, 5))]

    async def lose(frame: Frame, payload: memoryview | None) -> list[Item]:
        return [] if frame.HasField("cells_again") and not severed else [(frame, payload)]

    def keep(inner: Connector) -> Connector:
        kept.append(Keeping(with_fault(damage, lose)(inner)))
        return kept[-1]

    async with network("loopback") as net, cluster(net, wrap=keep, config=IMPATIENT) as group:
        key = group.key()
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        await soon(lambda: key in receiver._arrivals.live)
        pair = receiver._arrivals.live[key].incoming.pairs[0]
        await soon(lambda: pair.num_damaged > 0 and pair.num_chunks is not None)
        severed = True
        await kept[0].links[0].close("the cable is out")
        async with asyncio.timeout(5):
            await asyncio.gather(*expected)
        await group.commit(key)
        await asyncio.gather(*shipped)
        group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
        assert shipper.counts.resent_cells > 0 == receiver.counts.pulled_cells


async def test_a_shipment_of_rotten_blocks_fails_though_the_engine_cannot_be_told() -> None:
    def rotten(*where: object, **named: object) -> None:
        raise BlockRotten([3], 0)

    async def deaf(block_ids: Sequence[int]) -> None:
        raise RuntimeError("rank 0 does not answer")

    async with network("loopback") as net, cluster(net) as group:
        (shipper,), (store,) = group.prefill.shippers, group.prefill.stores
        shipper._pumps._found_rotten = deaf
        store.gather_cells = rotten  # type: ignore[assignment,method-assign]
        key = group.key()
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        for failure in await failures(*expected, *shipped):
            assert failure.code == "DATA_LOSS"


async def test_nothing_but_the_reason_is_kept_of_transfers_that_have_failed() -> None:
    def num_alive() -> int:
        gc.collect()
        return sum(type(each) in (Landing, Departure) for each in gc.get_objects())

    async def fail_one(group: Cluster) -> None:
        key = group.key()
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        await soon(lambda: bool(group.decode.receivers[0]._arrivals.live))
        await group.prefill.shippers[0].abort(key, "the client left")
        await group.decode.receivers[0].abort(key, "the client left")
        await failures(*expected, *shipped)

    before = num_alive()
    async with network("loopback") as net, cluster(net) as group:
        for _ in range(3):
            await fail_one(group)
        await settled_tasks()
        assert num_alive() <= before
        with pytest.raises(TransferFailed, match="CANCELLED: the client left"):
            await group.prefill.shippers[0].ship(
                group.ship_orders(ShipmentKey((1).to_bytes(16, "big"), 1, 1, 1), NUM_TOKENS)
            )


async def test_a_link_lost_after_the_last_chunk_to_a_decode_that_gave_up_says_why() -> None:
    async def cut(frame: Frame, payload: memoryview | None) -> list[Item]:
        if frame.HasField("seal_all") and shipper.counts.ends_asked == 0:
            raise Cut("the cable is out")
        return [(frame, payload)]

    async with network("grpc") as net, cluster(net, wrap=with_fault(cut)) as group:
        (shipper,) = group.prefill.shippers
        key = group.key()
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        receiver_failure, sender_failure = await failures(*expected, *shipped)
        assert receiver_failure.code == sender_failure.code == "UNAVAILABLE"
        assert receiver_failure.reason in sender_failure.reason


async def test_a_broken_link_is_dialled_again() -> None:
    cuts = 1

    async def cut(frame: Frame, payload: memoryview | None) -> list[Item]:
        nonlocal cuts
        if frame.HasField("chunk") and cuts:
            cuts -= 1
            raise Cut("the cable is out")
        return [(frame, payload)]

    async with network("grpc") as net, cluster(net, wrap=with_fault(cut)) as group:
        with pytest.raises(TransferFailed, match="UNAVAILABLE"):
            await carry_whole(group)
        (shipper,) = group.prefill.shippers
        await soon(lambda: shipper.counts.links_lost == 1)
        await carry_whole(group)


@pytest.mark.parametrize("nth", [0, 2])
async def test_a_failure_that_only_the_sender_knows_ends_the_receiver_with_its_reason(
    nth: int,
) -> None:
    broken, posts = False, 0

    async def refuse(frame: Frame, payload: memoryview | None) -> list[Item]:
        nonlocal posts
        if broken and payload is not None:
            posts += 1
            if posts == nth + 1:
                raise OSError("no buffer space")
        return [(frame, payload)]

    async with network("grpc") as net, cluster(net, 1, 2, wrap=with_fault(refuse)) as group:
        await carry_whole(group)  # a rank that nobody has called yet hears of it from its group
        broken, key = True, group.key()
        expected = group.expect(key, NUM_TOKENS, TARGET)
        shipped = group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        for failure in await failures(*expected, *shipped):
            assert failure.code == "UNAVAILABLE"
            assert "no buffer space" in failure.reason


async def test_a_success_after_the_failure_changes_nothing() -> None:
    async with network("loopback") as net, cluster(net) as group:
        key = group.key()
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        await soon(lambda: receiver.open_transfers == 1)
        await asyncio.sleep(0.02)
        await shipper.abort(key, "the engine failed")
        group.seal_all(key, NUM_TOKENS, SOURCE)
        results = await failures(*expected, *shipped)
        assert [failure.code for failure in results] == ["CANCELLED", "CANCELLED"]
        with pytest.raises(TransferFailed, match="the engine failed"):
            await receiver.commit(key)
        with pytest.raises(TransferFailed, match="the engine failed"):
            await receiver.expect(group.receipt_order(key, NUM_TOKENS, TARGET))
        await carry_whole(group)


async def test_late_completions_of_an_aborted_transfer_are_counted_and_ignored() -> None:
    async with network("loopback") as net, cluster(net) as group:
        key = group.key()
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        await soon(lambda: bool(receiver._ports))
        await receiver.abort(key, "the client left")
        await failures(*expected, *shipped)
        late = shipper.counts.late_frames
        (port,) = receiver._ports
        for _ in range(2):
            port.post(Frame(key=key.to_proto(), commit=Commit()))
        await soon(lambda: shipper.counts.late_frames >= late + 2)
        assert shipper.counts.completed == 0
        await carry_whole(group)


async def test_both_ends_of_an_abort_learn_that_nothing_moves_any_more() -> None:
    seen: list[str] = []

    async def note(frame: Frame, payload: memoryview | None) -> list[Item]:
        seen.append(frame.WhichOneof("body") or "")
        return [(frame, payload)]

    async with network("grpc") as net, cluster(net, wrap=with_fault(note, note)) as group:
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        for end in (shipper, receiver):
            key = group.key()
            expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
            group.seal(shipper, key, 0, 0, SOURCE[:2], NUM_TOKENS)
            await soon(lambda: "chunk_ack" in seen)
            await end.abort(key, "the client left")
            await failures(*expected, *shipped)
            await soon(lambda: "drain_ack" in seen)
            seen.clear()
            assert shipper.open_shipments == receiver.open_transfers == 0
