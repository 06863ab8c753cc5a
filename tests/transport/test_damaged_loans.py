"""Cells that were had by a call and came damaged are held against whoever gave them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from engine.clock import ManualClock
from kvcache.head_map import HeadInterval
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from protos.transfer_pb2_grpc import add_CellsServicer_to_server
from tests.transport.harness import QUICK, Cluster, cluster, network, soon
from tests.transport.test_pull import NAMES, NUM_TOKENS, SOURCE, TARGET, Pins, carry, damaging
from transport.cells_servicer import CellsServicer
from transport.departure import CellSource
from transport.fault_wire import FaultConnector
from transport.orders import Holder
from transport.quarantine import LinkName, Standing

# One cell of a link's 45 is damaged, and each of a call's.
WATCHFUL = replace(QUICK, max_damage_share=0.5)
OF_PREFILL = LinkName("prefill-0", 1, 0, "call")
OF_HOLDER = LinkName("holder-0", 4, 0, "call")


@dataclass
class Rotting:
    """A rank whose memory spoils what it has just digested, while `on`."""

    store: KvStore
    on: bool = True
    num_reads: int = 0

    @property
    def spec(self) -> CacheSpec:
        return self.store.spec

    @property
    def kv_heads(self) -> HeadInterval:
        return self.store.kv_heads

    def cut(self, block_size: int) -> CellSource:
        return self.store.cut(block_size)

    def prove_blocks(self, layer: int, block_ids: Sequence[int], heads: Sequence[int]) -> None:
        self.store.prove_blocks(layer, block_ids, heads)

    def gather_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None,
        out: NDArray[np.uint8] | None = None,
        digests: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.uint8]:
        self.num_reads += 1
        cells = self.store.gather_cells(layer, block_ids, heads, tail_tokens, out, digests)
        cells[:, 0] ^= self.on
        return cells


@asynccontextmanager
async def lending(group: Cluster, source: Rotting, pins: Pins | None = None) -> AsyncIterator[str]:
    """The Cells service of a rank; gives its address."""
    with ThreadPoolExecutor(1) as threads:
        server, lend = grpc.aio.server(), group.prefill.shippers[0].lend
        ledger = group.prefill.shippers[0].ledger
        servicer = CellsServicer(source, threads, WATCHFUL, lend, pins, ledger)
        add_CellsServicer_to_server(servicer, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield address
        finally:
            await server.stop(0)


async def test_who_gives_damaged_cells_by_a_call_is_passed_over_until_one_transfer_clears_it() -> (
    None
):
    clock, pins = ManualClock(), Pins(dict(zip(NAMES, SOURCE, strict=True)))
    async with (
        network("loopback") as net,
        cluster(
            net,
            config=WATCHFUL,
            clock=clock,
            wrap=lambda inner: FaultConnector(inner, damaging),
        ) as group,
    ):
        first, second = Rotting(group.prefill.stores[0]), Rotting(group.prefill.stores[0], on=False)
        receiver = group.decode.receivers[0]
        watch, counts = receiver.watch, receiver.counts
        async with lending(group, first) as prefill, lending(group, second, pins) as other:
            holder = Holder("h", (other,), group.prefill.intervals, 4, "holder-0", 4)
            elsewhere: dict[str, object] = {"source_addresses": (prefill,)}
            elsewhere |= {"holders": (holder,), "block_names": tuple(NAMES)}

            async def carry_whole() -> None:
                carrying = asyncio.create_task(carry(group, elsewhere))
                async with asyncio.timeout(10):
                    while not (await asyncio.wait([carrying], timeout=0.2))[0]:
                        await clock.run(WATCHFUL.repair_wait_s)
                await carrying
                group.check_blocks(NUM_TOKENS, SOURCE, TARGET)

            while not watch.standing():
                await carry_whole()
            (left_alone,) = watch.standing()
            assert (left_alone.worker, left_alone.wire) == ("prefill-0", "call")
            assert "of the last" in left_alone.reason
            assert counts.wires_quarantined == 1
            assert counts.workers_quarantined == 0  # the link itself has done nothing worse
            num_reads, given = first.num_reads, second.num_reads
            await carry_whole()
            assert (first.num_reads, second.num_reads) == (num_reads, given + 1)

            await clock.run(WATCHFUL.cool_down_s)
            first.on = False
            await carry_whole()
            assert (first.num_reads, second.num_reads) == (num_reads + 1, given + 1)
            assert counts.wires_cleared == 1
            standings = {name: link.standing for name, link in watch.links()}
            assert standings[OF_PREFILL] is standings[OF_HOLDER] is Standing.SOUND


async def test_a_holder_that_gives_damaged_cells_is_left_for_the_next_one() -> None:
    pins = Pins(dict(zip(NAMES, SOURCE, strict=True)))
    async with (
        network("loopback") as net,
        cluster(net, config=WATCHFUL, wrap=lambda inner: FaultConnector(inner, damaging)) as group,
    ):
        bad, good = Rotting(group.prefill.stores[0]), Rotting(group.prefill.stores[0], on=False)
        receiver = group.decode.receivers[0]
        async with lending(group, bad, pins) as one, lending(group, good, pins) as other:
            heads = group.prefill.intervals
            holders = (
                Holder("h", (one,), heads, 4, "holder-0", 4),
                Holder("i", (other,), heads, 4, "holder-1", 2),
            )
            order: dict[str, object] = {"holders": holders, "block_names": tuple(NAMES)}
            while not receiver.watch.standing():
                await carry(group, order)
                group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
            (left_alone,) = receiver.watch.standing()
            found = (left_alone.worker, left_alone.epoch, left_alone.wire)
            assert found == ("holder-0", 4, "call")
            assert bad.num_reads == 1 + WATCHFUL.forgiven_chunks

            await carry(group, order)
            group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
            assert bad.num_reads == 1 + WATCHFUL.forgiven_chunks
            assert good.num_reads == 2 + WATCHFUL.forgiven_chunks
            await soon(lambda: receiver.open_transfers == 0)
