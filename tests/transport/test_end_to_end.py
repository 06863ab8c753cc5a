"""Whole transfers between groups of ranks in one process, over every wire."""

import asyncio
from typing import Any

import pytest

from kvcache.kept_digests import Ids, KeptDigests
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import Chunk, Frame
from tests.transport.harness import (
    SPEC,
    WAYS,
    cluster,
    network,
    num_open_files,
    settled_tasks,
    soon,
)
from transport.config import TransportConfig
from transport.fault_wire import FaultConnector, Item
from transport.from_prefill import PrefillFrames
from transport.landing import Landing
from transport.port import Port

SOURCE, TARGET = [5, 3, 9, 0, 11], [7, 20, 2, 15, 4]  # blocks, on either side


@pytest.mark.parametrize("wire", WAYS)
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (1, 3), (3, 1), (3, 2), (2, 9), (9, 1)]
)
async def test_every_cell_arrives_byte_exact(wire: str, prefill_tp: int, decode_tp: int) -> None:
    async with network(wire) as net, cluster(net, prefill_tp, decode_tp) as group:
        reports, receipts = await group.carry(18, SOURCE, TARGET)
        group.check_blocks(18, SOURCE, TARGET)
        assert sum(report.bytes for report in reports) == sum(r.bytes for r in receipts)
        assert [token.token_id for token in receipts[0].first_tokens] == [7]


@pytest.mark.parametrize("wire", WAYS)
async def test_digests_that_are_known_are_not_made_again(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole blocks: prefill reads them once less, or not at all."""
    fresh: list[int] = []
    compare = KeptDigests.compare

    def note(kept: KeptDigests, layer: int, block_ids: Ids, *rest: Any) -> list[int]:
        fresh.extend(block_ids)
        return compare(kept, layer, block_ids, *rest)

    async with network(wire) as net, cluster(net, 2, 1) as group:
        monkeypatch.setattr(KeptDigests, "compare", note)
        await group.carry(18, SOURCE, TARGET)
        made, fresh[:] = set(fresh), []
        await group.carry(18, SOURCE, [1, 3, 5, 6, 8])
        group.check_blocks(18, SOURCE, [1, 3, 5, 6, 8])
    assert made == set(SOURCE[:-1])
    assert not fresh


async def test_every_pair_of_group_sizes_arrives_byte_exact() -> None:
    async with network("loopback") as net:
        for prefill_tp in range(1, 10):
            for decode_tp in range(1, 10):
                async with cluster(net, prefill_tp, decode_tp) as group:
                    _, receipts = await group.carry(11, SOURCE[:3], TARGET[:3])
                    group.check_blocks(11, SOURCE[:3], TARGET[:3])
                    held = sum(len(interval) for interval in group.decode.intervals)
                    cells = SPEC.num_layers * 3 * held * 2
                    assert sum(receipt.bytes for receipt in receipts) == cells * 4 * 4 * 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33])
async def test_any_length_and_element_type_arrives(num_tokens: int, dtype: str) -> None:
    spec = CacheSpec.full(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype=dtype)
    async with (
        network("loopback") as net,
        cluster(net, 2, 1, spec=spec, num_query_heads=4) as group,
    ):
        blocks = spec.blocks_needed(num_tokens)
        await group.carry(num_tokens, SOURCE[:blocks], TARGET[:blocks])
        group.check_blocks(num_tokens, SOURCE[:blocks], TARGET[:blocks])


async def test_blocks_that_decode_holds_are_neither_sent_nor_written() -> None:
    async with network("loopback") as net, cluster(net, 1, 2) as group:
        before = group.snapshot()
        _, receipts = await group.carry(18, SOURCE, TARGET, first_block=3)
        group.check_blocks(18, SOURCE, TARGET, first_block=3)
        for old, new in zip(before, group.snapshot(), strict=True):
            assert (old[TARGET[:3]] == new[TARGET[:3]]).all()
        two_blocks = 2 * SPEC.num_layers * 3 * 2 * (4 * 4 * 8)
        assert sum(receipt.bytes for receipt in receipts) == two_blocks


@pytest.mark.parametrize("wire", WAYS)
async def test_a_full_local_hit_ships_nothing_and_still_releases_prefill(wire: str) -> None:
    async with network(wire) as net, cluster(net, 3, 2) as group:
        reports, receipts = await group.carry(16, SOURCE[:4], TARGET[:4], first_block=4)
        assert [report.chunks for report in reports] == [0, 0, 0]
        assert [receipt.bytes for receipt in receipts] == [0, 0]
        assert [token.token_id for token in receipts[0].first_tokens] == [7]
        assert [shipper.open_shipments for shipper in group.prefill.shippers] == [0, 0, 0]


async def test_a_prefill_rank_that_nobody_needs_is_done_at_once() -> None:
    async with network("loopback") as net, cluster(net, 9, 1) as group:
        key = group.key()
        expected, shipped = group.expect(key, 18, TARGET), group.ship(key, 18)
        for task in shipped[1:3]:  # they hold the head that rank 0 sends
            assert (await task).chunks == 0
        group.seal_all(key, 18, SOURCE)
        await asyncio.gather(*expected)
        await group.commit(key)
        await asyncio.gather(*shipped)
        group.check_blocks(18, SOURCE, TARGET)


async def test_layers_travel_while_later_ones_are_still_computed() -> None:
    async with network("grpc") as net, cluster(net, 1, 2) as group:
        key = group.key()
        (shipper,) = group.prefill.shippers
        expected, shipped = group.expect(key, 18, TARGET), group.ship(key, 18)
        for layer in range(SPEC.num_layers):
            for first, last in ((0, 2), (2, 4), (4, 5)):
                group.seal(shipper, key, layer, first, SOURCE[first:last], 18)
            landed = 5 * 3 * 2 * (4 * 4 * 8) * (layer + 1)
            await soon(
                lambda landed=landed: (  # type: ignore[misc]
                    sum(r.counts.bytes for r in group.decode.receivers) == landed
                )
            )
        assert not any(task.done() for task in expected)
        group.finish(shipper, key)
        await asyncio.gather(*expected)
        await group.commit(key)
        await asyncio.gather(*shipped)
        group.check_blocks(18, SOURCE, TARGET)


async def test_sealing_may_come_before_the_order_to_ship_and_from_another_thread() -> None:
    async with network("loopback") as net, cluster(net) as group:
        key = group.key()
        await asyncio.to_thread(group.seal_all, key, 18, SOURCE)
        expected, shipped = group.expect(key, 18, TARGET), group.ship(key, 18)
        await asyncio.gather(*expected)
        await group.commit(key)
        await asyncio.gather(*shipped)
        group.check_blocks(18, SOURCE, TARGET)


async def test_a_call_that_comes_before_its_order_waits_for_it() -> None:
    async with network("grpc") as net, cluster(net) as group:
        key = group.key()
        shipped = group.ship(key, 18)
        group.seal_all(key, 18, SOURCE)
        await asyncio.sleep(0.1)
        assert not shipped[0].done()
        expected = group.expect(key, 18, TARGET)
        await asyncio.gather(*expected)
        await group.commit(key)
        await asyncio.gather(*shipped)
        group.check_blocks(18, SOURCE, TARGET)


@pytest.mark.parametrize("wire", ["loopback", "tcp"])
async def test_what_nobody_waits_for_is_acknowledged_by_the_commit_or_where_that_waits_before_it(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk; and all, where the wire stores none of them."""
    acked: list[int] = []
    ack = PrefillFrames._ack

    def note(frames: PrefillFrames, landing: Landing, port: Port, chunk: Chunk) -> None:
        acked.append(chunk.seq)
        ack(frames, landing, port, chunk)

    monkeypatch.setattr(PrefillFrames, "_ack", note)
    monkeypatch.setattr("transport.from_prefill.ACK_WITHIN_S", 3600)
    async with network(wire) as net, cluster(net) as group:
        (report,), _ = await group.carry(18, SOURCE, TARGET)
        assert len(acked) == (0 if wire == "tcp" else report.chunks - 1)
        monkeypatch.setattr("transport.from_prefill.ACK_WITHIN_S", 0.001)
        await group.carry_acknowledged(18, SOURCE, TARGET)


async def test_prefill_holds_its_blocks_until_every_decode_rank_has_committed() -> None:
    async with network("loopback") as net, cluster(net, 1, 2) as group:
        key = group.key()
        expected, shipped = group.expect(key, 18, TARGET), group.ship(key, 18)
        group.seal_all(key, 18, SOURCE)
        await asyncio.gather(*expected)
        await group.decode.receivers[1].commit(key)
        await asyncio.sleep(0.05)
        assert not shipped[0].done()
        await group.decode.receivers[0].commit(key)
        assert (await shipped[0]).bytes == 5 * SPEC.num_layers * 3 * 2 * (4 * 4 * 8)


async def test_unacknowledged_bytes_on_the_wire_stay_within_the_window() -> None:
    most = 0
    unacked: dict[int, int] = {}

    async def outgoing(frame: Frame, payload: memoryview | None) -> list[Item]:
        nonlocal most
        if payload is not None:
            unacked[frame.chunk.seq] = payload.nbytes
            most = max(most, sum(unacked.values()))
        return [(frame, payload)]

    async def incoming(frame: Frame, payload: memoryview | None) -> list[Item]:
        unacked.pop(frame.chunk_ack.seq if frame.HasField("chunk_ack") else -1, None)
        return [(frame, payload)]

    config = TransportConfig(chunk_bytes=800, window_bytes=2000)
    async with (
        network("grpc") as net,
        cluster(
            net, config=config, wrap=lambda inner: FaultConnector(inner, outgoing, incoming)
        ) as group,
    ):
        await group.carry(18, SOURCE, TARGET)
        group.check_blocks(18, SOURCE, TARGET)
    assert 768 < most <= 2000


@pytest.mark.parametrize(("wire", "rounds"), [("loopback", 50), ("grpc", 20), ("gloo", 20)])
async def test_eight_transfers_at_a_time_never_mix(wire: str, rounds: int) -> None:
    async with network(wire) as net, cluster(net, 2, 3, num_blocks=40) as group:

        async def lane(number: int) -> None:
            source = [5 * number + i for i in range(5)]
            target = [39 - block for block in source]
            for _ in range(rounds):
                await group.carry(17 + number % 4, source, target)
                group.check_blocks(17 + number % 4, source, target)

        await asyncio.gather(*(lane(number) for number in range(8)))
        counts = [receiver.counts for receiver in group.decode.receivers]
        assert sum(each.damaged_chunks + each.bad_chunks + each.failed for each in counts) == 0
        assert [each.completed for each in counts] == [8 * rounds] * 3


@pytest.mark.parametrize("wire", WAYS)
async def test_nothing_is_left_after_close(wire: str) -> None:
    async def live() -> None:
        async with network(wire) as net, cluster(net, 2, 2) as group:
            await group.carry(18, SOURCE, TARGET)
            key = group.key()
            expected, shipped = group.expect(key, 18, TARGET), group.ship(key, 18)
            await asyncio.sleep(0.05)  # closed in the middle of a transfer
        await asyncio.gather(*expected, *shipped, return_exceptions=True)

    await live()  # what grpc and torch open once, they keep
    tasks, files = await settled_tasks(), num_open_files()
    for _ in range(3):
        await live()
    assert await settled_tasks() == tasks
    await soon(lambda: num_open_files() <= files + 1)


async def test_one_link_serves_every_transfer_of_a_pair() -> None:
    calls = 0

    class Counting(FaultConnector):
        async def connect(self, address, hello):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            return await super().connect(address, hello)

    async with network("grpc") as net, cluster(net, 1, 2, wrap=Counting) as group:
        for _ in range(4):
            await group.carry(18, SOURCE, TARGET)
    assert calls == 2
