"""Decode reads cells out of prefill's pool, which may be another request's by then."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.clock import MonotonicClock
from kernels.crew import CCall, Steps
from kernels.host_cells import HostCells, Layout
from kvcache.kv_store import KvStore
from kvcache.layout import KvLayout
from kvcache.mapped_pool import MappedCells, ShownPool
from protos.transfer_pb2 import Frame
from tests.transport.broken import (
    IMPATIENT,
    NUM_TOKENS,
    SOURCE,
    TARGET,
    carry_whole,
    failures,
    with_fault,
)
from tests.transport.harness import POOL, SPEC, Network, cluster, network, soon
from tests.transport.random_transfers import random_transfers
from transport.fault_wire import FaultWire, Item
from transport.faults import Faults
from transport.link import Connector
from transport.orders import TransferFailed
from transport.shm_wire import ShmConnector


class Held(KvStore):
    """Reads no pool until it may."""

    @classmethod
    def of(cls, store: KvStore) -> "Held":
        made = cls(store.spec, store.kv_heads, store.num_blocks)
        made.may, made.entered = threading.Event(), threading.Event()
        return made

    may: threading.Event
    entered: threading.Event

    def taking(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: MappedCells,
        digests: NDArray[np.uint64] | None = None,
    ) -> Steps[NDArray[np.intp]]:
        yield [self._wait]
        return (yield from super().taking(layers, block_ids, heads, cells, digests))

    def _wait(self) -> None:
        self.entered.set()
        assert self.may.wait(10)


async def test_no_payload_leaves_when_decode_reads_the_pool() -> None:
    seen: list[bool] = []

    async def note(frame: Frame, payload: memoryview | None) -> list[Item]:
        if frame.HasField("chunk"):
            seen.append(payload is None and len(frame.chunk.pool_blocks) > 0)
        return [(frame, payload)]

    async with network(POOL) as net, cluster(net, 2, 3, wrap=with_fault(note)) as group:
        await carry_whole(group)
    assert seen and all(seen)


@pytest.mark.parametrize("layout", list(KvLayout))
async def test_a_pool_of_any_layout_and_block_size_is_read(layout: KvLayout) -> None:
    """The tail of a prompt that fills no block is read as zeros, whatever lies there."""
    for theirs, ours in ((4, 4), (8, 2), (2, 8)):
        async with (
            network(POOL) as net,
            cluster(
                net,
                2,
                3,
                spec=replace(SPEC, block_size=theirs),
                decode_block_size=ours,
                layouts=(layout, KvLayout.HEAD_MAJOR),
            ) as group,
        ):
            source = [7, 3, *range(10, 24)][: -(-19 // theirs)]
            target = [5, 9, *range(11, 24)][: -(-19 // ours)]
            await group.carry(19, source, target)
            group.check_blocks(19, source, target)


async def test_blocks_that_are_freed_and_used_again_under_a_reader_give_no_cell() -> None:
    """Prefill waits a moment for decode to say that it reads no more, and then for nobody."""
    held: list[Held] = []

    def sink(store: KvStore) -> KvStore:
        held.append(Held.of(store))
        return held[-1]

    async def lose_aborts(frame: Frame, payload: memoryview | None) -> list[Item]:
        return [] if frame.HasField("abort") else [(frame, payload)]

    async with (
        network(POOL) as net,
        cluster(net, wrap=with_fault(lose_aborts), config=IMPATIENT, sink=sink) as group,
    ):
        key = group.key()
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        await asyncio.to_thread(held[0].entered.wait)
        async with asyncio.timeout(2):  # decode has been told nothing, and reads on
            await shipper.abort(key, "the client left")
        assert shipper.open_shipments == 0
        before = [held[0].layer(layer).clone() for layer in range(SPEC.num_layers)]
        group.prefill.stores[0].poison()  # the blocks are somebody else's
        held[0].may.set()
        await soon(lambda: receiver.counts.damaged_cells > 0)
        await failures(*expected, *shipped)
        with pytest.raises(TransferFailed):
            await receiver.commit(key)
        assert await receiver.abort(key, "over") == 0  # no block of it is kept
        for layer, was in enumerate(before):
            assert (held[0].layer(layer) == was).all()


async def test_prefill_frees_its_blocks_once_decode_says_that_it_reads_no_more() -> None:
    held: list[Held] = []

    def sink(store: KvStore) -> KvStore:
        held.append(Held.of(store))
        return held[-1]

    async with network(POOL) as net, cluster(net, sink=sink) as group:
        key = group.key()
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        await asyncio.to_thread(held[0].entered.wait)
        aborting = asyncio.create_task(shipper.abort(key, "the client left"))
        await soon(lambda: bool(receiver.counts.failed))
        assert shipper.open_shipments == 1
        held[0].may.set()
        await aborting
        await failures(*expected, *shipped)


@pytest.mark.parametrize("kind", ["flip", "truncate", "swap", "stale", "foreign"])
async def test_each_way_to_read_the_wrong_cells_is_caught_and_repaired(kind: str) -> None:
    words = f"seed=3 {kind}=0.5"
    with Faults.of(words) as faults:
        async with (
            network(POOL) as net,
            cluster(
                net,
                config=replace(
                    IMPATIENT, chunk_bytes=1000, max_link_damages=1000, max_link_asks=1000
                ),
                wrap=lambda inner: FaultWire(inner, faults, MonotonicClock()),
            ) as group,
        ):
            for turn in range(12):
                table = SOURCE if turn % 2 else [23 - block for block in SOURCE]
                await group.carry(NUM_TOKENS, table, TARGET)
                group.check_blocks(NUM_TOKENS, table, TARGET)
            assert faults.count() > 0
            counts = group.decode.receivers[0].counts
            assert counts.damaged_chunks > 0 and counts.failed == 0


async def test_random_transfers_out_of_shown_pools_end_whole_or_let_go() -> None:
    """Whatever prefill lets go is overwritten at once, while somebody may read it."""
    ends = [await random_transfers(seed, wire=POOL) for seed in range(6)]
    assert sum(end.whole + end.failed for end in ends) == 36
    assert sum(end.whole for end in ends) > 6


async def test_what_has_landed_is_acknowledged_though_the_transfer_goes_on() -> None:
    async with network(POOL) as net, cluster(net) as group:
        key, (shipper,) = group.key(), group.prefill.shippers
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        group.seal(shipper, key, 0, 0, SOURCE, NUM_TOKENS)
        await soon(lambda: shipper.counts.chunks > 0)
        departure = shipper.lend(key)
        assert departure is not None
        pair = departure.outgoing.pairs[0]
        await soon(lambda: pair.idle)
        assert pair.num_chunks > 0 and not pair.committed
        for layer in range(1, SPEC.num_layers):
            group.seal(shipper, key, layer, 0, SOURCE, NUM_TOKENS)
        group.finish(shipper, key)
        await asyncio.gather(*expected)
        await group.decode.receivers[0].commit(key)
        await asyncio.gather(*shipped)
        group.check_blocks(NUM_TOKENS, SOURCE, TARGET)


async def test_blocks_whose_digests_are_known_are_not_read_by_prefill() -> None:
    async with network(POOL) as net, cluster(net) as group:
        (store,) = group.prefill.stores
        for layer in range(SPEC.num_layers):
            store.note_cells(layer, SOURCE)

        digesting, digested = HostCells.digesting, list[list[int]]()

        def note(host: HostCells, pool: int, layout: Layout, ids_B: Any, *rest: Any) -> CCall:
            digested.append(ids_B.tolist())
            return digesting(host, pool, layout, ids_B, *rest)

        with patch.object(HostCells, "digesting", note):
            await carry_whole(group)
        assert digested == [SOURCE[-1:]] * SPEC.num_layers  # of a tail nothing is kept


async def test_where_decode_cannot_read_the_pool_payloads_go_through_the_ring() -> None:
    async with network(POOL) as net:
        net.reads_pools = False
        await carry_with_payloads(net)


async def test_a_pool_that_would_end_before_its_last_cell_is_not_read() -> None:
    def lie(inner: Connector) -> Connector:
        assert isinstance(inner, ShmConnector) and inner._shown is not None
        lying = replace(inner._shown.map, num_blocks=inner._shown.map.num_blocks + 1)
        inner._shown = ShownPool(inner._shown.memory, lying)
        return inner

    async with network(POOL) as net:
        await carry_with_payloads(net, lie)


async def carry_with_payloads(
    net: Network, wrap: Callable[[Connector], Connector] = lambda inner: inner
) -> None:
    with_payload: list[bool] = []

    async def note(frame: Frame, payload: memoryview | None) -> list[Item]:
        if frame.HasField("chunk"):
            with_payload.append(payload is not None)
        return [(frame, payload)]

    async with cluster(net, wrap=lambda inner: with_fault(note)(wrap(inner))) as group:
        await carry_whole(group)
    assert with_payload and all(with_payload)


async def test_a_block_that_has_rotted_is_found_by_who_reads_it() -> None:
    """Its digests are known from before, and are sent without a look at the block."""
    async with network(POOL) as net, cluster(net) as group:
        await carry_whole(group)
        (store,), (receiver,) = group.prefill.stores, group.decode.receivers
        store.layer(1)[SOURCE[2], 0, 1, 3, 0] += 1  # and nobody says so
        key = group.key()
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        found = await failures(*expected, *shipped)
        assert {failure.code for failure in found} == {"DATA_LOSS"}
        assert all(f"blocks [{SOURCE[2]}] have changed in layer 1" in f.reason for f in found)
        assert receiver.counts.damaged_cells == 1
        await receiver.abort(key, "over")
