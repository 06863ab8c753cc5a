"""What is lost, damaged, late or gone, and what becomes of the transfer and of its blocks."""

import asyncio
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.clock import ManualClock
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import Chunk, Commit, Credit, Frame, Hello, Open, SealAll
from tests.transport.harness import (
    MANIFEST,
    QUICK,
    SPEC,
    WIRES,
    Cluster,
    cluster,
    filled_store,
    hello,
    network,
    soon,
)
from transport.chunk_check import chunk_check
from transport.fault_wire import Cut, Fault, FaultConnector, Item
from transport.link import Connector, Link, LinkRefused
from transport.orders import Identity, ShipmentKey, ShipmentOrder, TransferFailed
from transport.receiver import Receiver
from transport.shipper import Shipper

SOURCE, TARGET = [5, 3, 9, 0, 11], [7, 20, 2, 15, 4]
NUM_TOKENS = 18


def with_fault(outgoing: Fault | None = None, incoming: Fault | None = None):  # type: ignore[no-untyped-def]
    async def none(frame: Frame, payload: memoryview | None) -> list[Item]:
        return [(frame, payload)]

    return lambda inner: FaultConnector(inner, outgoing or none, incoming or none)


def flipped(payload: memoryview, bit: int) -> memoryview:
    raw = bytearray(payload)
    raw[bit // 8 % len(raw)] ^= 1 << bit % 8
    return memoryview(raw)


async def failures(*tasks: "asyncio.Task[object]") -> list[TransferFailed]:
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        assert isinstance(result, TransferFailed), result
    return [result for result in results if isinstance(result, TransferFailed)]


async def carry_whole(group: Cluster) -> None:
    await group.carry(NUM_TOKENS, SOURCE, TARGET)
    group.check_blocks(NUM_TOKENS, SOURCE, TARGET)


# what the wire does to chunks


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

    async with network("loopback") as net, cluster(net, wrap=with_fault(flip)) as group:
        for _ in range(40):
            try:
                await carry_whole(group)
            except TransferFailed as failure:
                assert failure.code == "DATA_LOSS"  # the same cell four times in a row
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


# links and workers that go away


@pytest.mark.parametrize("wire", WIRES)
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
        assert "decode-0 rank 0 at" in sender_failure.reason
        assert "lost at layer" in sender_failure.reason
        assert "prefill-0 rank 0" in receiver_failure.reason
        assert "before layer" in receiver_failure.reason
        assert group.prefill.shippers[0].open_shipments == 0


@pytest.mark.parametrize("wire", WIRES)
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


@pytest.mark.parametrize("wire", WIRES)
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


@pytest.mark.parametrize("wire", WIRES)
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
    posts = 0

    async def refuse(frame: Frame, payload: memoryview | None) -> list[Item]:
        nonlocal posts
        if payload is not None:
            posts += 1
            if posts == nth + 1:
                raise OSError("no buffer space")
        return [(frame, payload)]

    async with network("grpc") as net, cluster(net, 1, 2, wrap=with_fault(refuse)) as group:
        key = group.key()
        expected = group.expect(key, NUM_TOKENS, TARGET)
        shipped = group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        started = time.monotonic()
        for failure in await failures(*expected, *shipped):
            assert failure.code == "INTERNAL"
            assert "no buffer space" in failure.reason
        assert time.monotonic() - started < 1


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


# blocks under a writer


class SlowSink:
    """A store whose scatter, once armed, takes as long as the test likes."""

    def __init__(self, store: KvStore) -> None:
        self.spec: CacheSpec = store.spec
        self.may_write = threading.Event()
        self.entered = threading.Event()
        self._store = store

    def scatter_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: NDArray[np.uint8],
        digests: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.intp]:
        self.entered.set()
        assert self.may_write.wait(10)
        return self._store.scatter_cells(layer, block_ids, heads, cells, digests)


async def test_an_abort_returns_only_when_the_last_writer_is_gone() -> None:
    sinks: list[SlowSink] = []

    def slow(store: KvStore) -> SlowSink:
        sinks.append(SlowSink(store))
        return sinks[-1]

    async with network("loopback") as net, cluster(net, sink=slow) as group:  # type: ignore[arg-type]
        key = group.key()
        (receiver,), (sink,) = group.decode.receivers, sinks
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        await asyncio.to_thread(sink.entered.wait)
        aborting = asyncio.create_task(receiver.abort(key, "the client left"))
        (failure,) = await failures(*expected)  # at once, although the writer still runs
        assert failure.code == "CANCELLED"
        await asyncio.sleep(0.1)
        assert not aborting.done()
        assert receiver.open_transfers == 1
        sink.may_write.set()
        await aborting
        after = group.snapshot()
        await failures(*shipped)
        await asyncio.sleep(0.05)
        for old, new in zip(after, group.snapshot(), strict=True):
            assert (old == new).all()  # no byte has moved since the abort returned
        await group.carry(NUM_TOKENS, SOURCE[::-1], TARGET)  # the same blocks, another request
        group.check_blocks(NUM_TOKENS, SOURCE[::-1], TARGET)


async def test_shipping_ends_only_when_nothing_reads_the_blocks_any_more() -> None:
    reading, may_read = threading.Event(), threading.Event()

    class SlowSource:
        def __init__(self, store: KvStore) -> None:
            self.spec = store.spec
            self.cut = store.cut
            self._store = store

        def gather_cells(
            self,
            layer: int,
            block_ids: Sequence[int],
            heads: Sequence[int],
            tail_tokens: int | None,
            out: NDArray[np.uint8] | None = None,
            digests: NDArray[np.uint64] | None = None,
        ) -> NDArray[np.uint8]:
            reading.set()
            assert may_read.wait(10)
            return self._store.gather_cells(layer, block_ids, heads, tail_tokens, out, digests)

    async with network("loopback") as net, cluster(net) as group:
        source = SlowSource(group.prefill.stores[0])
        me = Identity("prefill-0", "p1", 1, 0)
        clock = ManualClock()
        connectors = {"loopback": net.connector()}
        async with Shipper(
            me, group.prefill.intervals, source, connectors, MANIFEST, clock, QUICK
        ) as shipper:
            key = group.key()
            expected = group.expect(key, NUM_TOKENS, TARGET)
            shipping = asyncio.create_task(shipper.ship(group.ship_orders(key, NUM_TOKENS)))
            group.seal(shipper, key, 0, 0, SOURCE, NUM_TOKENS)
            await asyncio.to_thread(reading.wait)
            shipping.cancel()
            await failures(*expected)
            await asyncio.sleep(0.05)
            assert not shipping.done()
            assert shipper.open_shipments == 1
            may_read.set()
            with pytest.raises(asyncio.CancelledError):
                await shipping
            assert shipper.open_shipments == 0


async def test_cancels_at_any_moment_leave_nothing_behind() -> None:
    rng = np.random.default_rng(11)
    async with network("grpc") as net, cluster(net, 2, 2) as group:
        for number in range(60):
            key = group.key()
            expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
            group.seal_all(key, NUM_TOKENS, SOURCE)
            await asyncio.sleep(float(rng.random()) * 0.02)
            for task in expected if number % 2 else shipped:
                task.cancel()
            started = time.monotonic()
            for receiver in group.decode.receivers:
                await receiver.abort(key, "the client left")
            await asyncio.gather(*expected, *shipped, return_exceptions=True)
            assert time.monotonic() - started < 0.5
        assert [r.open_transfers for r in group.decode.receivers] == [0, 0]
        assert [s.open_shipments for s in group.prefill.shippers] == [0, 0]
        await carry_whole(group)


# silence


async def run_until(clock: ManualClock, seconds: float, *tasks: "asyncio.Task[object]") -> None:
    """Let `seconds` pass, unless the tasks end before."""
    for _ in range(round(seconds * 2)):
        await clock.run(0.5)
        await asyncio.sleep(0.001)
        if all(task.done() for task in tasks):
            return


async def test_a_decode_rank_that_falls_silent_frees_prefill_when_the_lease_ends() -> None:
    async def drop(frame: Frame, payload: memoryview | None) -> list[Item]:
        return [] if frame.WhichOneof("body") != "credit" else [(frame, payload)]

    clock = ManualClock()
    async with (
        network("loopback") as net,
        cluster(net, wrap=with_fault(incoming=drop), clock=clock) as group,
    ):
        key = group.key()
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        expected = group.expect(key, NUM_TOKENS, TARGET, timeout_s=1000)
        shipped = group.ship(key, NUM_TOKENS)
        await run_until(clock, 29, *shipped)
        assert not shipped[0].done()
        await run_until(clock, 2, *shipped)
        (failure,) = await failures(*shipped)
        assert failure.code == "UNAVAILABLE"
        assert "fell silent for 30 s at before layer 0, block 0" in failure.reason
        assert shipper.counts.expired == 1
        await failures(*expected)
        await receiver.abort(key, "given up")


async def test_a_prefill_rank_that_falls_silent_frees_decode_when_the_lease_ends() -> None:
    async def drop(frame: Frame, payload: memoryview | None) -> list[Item]:
        return [] if frame.WhichOneof("body") != "open" else [(frame, payload)]

    clock = ManualClock()
    async with (
        network("loopback") as net,
        cluster(net, wrap=with_fault(drop), clock=clock) as group,
    ):
        key = group.key()
        (receiver,) = group.decode.receivers
        expected = group.expect(key, NUM_TOKENS, TARGET, timeout_s=1000)
        shipped = group.ship(key, NUM_TOKENS)
        await run_until(clock, 29, *expected)
        assert not expected[0].done()
        await run_until(clock, 2, *expected)
        (failure,) = await failures(*expected)
        assert "prefill rank 0 fell silent for 30 s before layer 0, block 0" in failure.reason
        assert receiver.counts.expired == 1
        assert receiver.open_transfers == 0
        await failures(*shipped)


async def test_renewals_keep_a_long_prefill_alive() -> None:
    clock = ManualClock()
    async with network("loopback") as net, cluster(net, clock=clock) as group:
        key = group.key()
        expected = group.expect(key, NUM_TOKENS, TARGET, timeout_s=1000)
        shipped = group.ship(key, NUM_TOKENS)
        await run_until(clock, 200, *expected, *shipped)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        await asyncio.gather(*expected)
        await run_until(clock, 20)
        await group.commit(key)
        await asyncio.gather(*shipped)
        group.check_blocks(NUM_TOKENS, SOURCE, TARGET)


async def test_a_short_lease_is_renewed_more_often() -> None:
    config = QUICK.__class__(lease_s=0.6)
    assert (config.renew_s, config.resend_after_s, config.tick_s) == pytest.approx((0.1, 0.2, 0.05))
    clock = ManualClock()
    async with network("loopback") as net, cluster(net, clock=clock, config=config) as group:
        key = group.key()
        expected = group.expect(key, NUM_TOKENS, TARGET, timeout_s=1000)
        shipped = group.ship(key, NUM_TOKENS)
        for _ in range(100):
            await clock.run(0.05)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        await asyncio.gather(*expected)
        await group.commit(key)
        await asyncio.gather(*shipped)


async def test_an_order_that_no_prefill_rank_follows_ends_at_its_deadline() -> None:
    clock = ManualClock()
    async with network("loopback") as net, cluster(net, clock=clock) as group:
        key = group.key()
        expected = group.expect(key, NUM_TOKENS, TARGET, timeout_s=12)
        await run_until(clock, 13, *expected)
        (failure,) = await failures(*expected)
        assert failure.code == "DEADLINE_EXCEEDED"
        assert group.decode.receivers[0].open_transfers == 0


async def test_a_whole_transfer_that_nobody_commits_is_let_go() -> None:
    clock = ManualClock()
    async with network("loopback") as net, cluster(net, clock=clock) as group:
        key = group.key()
        expected = group.expect(key, NUM_TOKENS, TARGET, timeout_s=5)
        shipped = group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        await asyncio.gather(*expected)
        await run_until(clock, 31, *shipped)
        (failure,) = await failures(*shipped)
        assert "out of time neither committed nor aborted" in failure.reason
        with pytest.raises(TransferFailed, match="DEADLINE_EXCEEDED"):
            await group.commit(key)


async def test_a_call_without_an_order_is_sent_home_after_a_few_seconds() -> None:
    clock = ManualClock()
    async with network("loopback") as net, cluster(net, clock=clock) as group:
        shipped = group.ship(group.key(), NUM_TOKENS)
        await run_until(clock, 4, *shipped)
        assert not shipped[0].done()
        await run_until(clock, 2, *shipped)
        (failure,) = await failures(*shipped)
        assert failure.code == "UNAVAILABLE"
        assert "no order for it within 5 s" in failure.reason


async def test_lost_completions_never_hold_blocks_for_ever() -> None:
    async def drop(frame: Frame, payload: memoryview | None) -> list[Item]:
        return [] if frame.HasField("seal_all") else [(frame, payload)]

    clock = ManualClock()
    async with (
        network("loopback") as net,
        cluster(net, wrap=with_fault(drop), clock=clock) as group,
    ):
        tasks: list[asyncio.Task[object]] = []
        for _ in range(50):
            key = group.key()
            tasks += group.expect(key, NUM_TOKENS, TARGET, timeout_s=20)
            tasks += group.ship(key, NUM_TOKENS)
            group.seal_all(key, NUM_TOKENS, SOURCE)
        await run_until(clock, 31, *tasks)
        await failures(*tasks)
        await soon(lambda: group.decode.receivers[0].open_transfers == 0)
        await soon(lambda: group.prefill.shippers[0].open_shipments == 0)


# lives and versions


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
        with pytest.raises(LinkRefused, match="speaks transfer protocol 9, we speak 1"):
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
    async with network("loopback") as net, cluster(net) as group:
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
