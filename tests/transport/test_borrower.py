"""Blocks fetched by their names: what comes damaged is held against whoever gave it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.clock import ManualClock
from kvcache.head_map import HeadInterval, HeadMap
from kvcache.ledger import Ledger
from kvcache.ledger_row import Origin
from kvferry.audit.audit import audit
from protos.transfer_pb2_grpc import add_CellsServicer_to_server
from tests.transport.harness import QUICK, SPEC, filled_store
from tests.transport.test_damaged_loans import Rotting
from tests.transport.test_pull import NAMES, SOURCE, Pins
from transport.borrower import Borrowed, Borrower, BorrowOrder
from transport.cells_servicer import MAX_RUNS, CellsServicer
from transport.counts import TransferCounts
from transport.orders import Holder, Identity, ShipmentKey
from transport.pull import GrpcPuller, Part, Pull, Puller
from transport.quarantine import Standing
from transport.watch import Watch

TARGET = (7, 20, 2, 15, 4)
WATCHFUL = replace(QUICK, max_damage_share=0.5)
HEADS = HeadMap.even(9, SPEC.num_kv_heads, 1).kv
NUM_BYTES = SPEC.bytes_per_block(SPEC.num_kv_heads) * len(NAMES)
ALL_HEADS = HeadInterval(0, SPEC.num_kv_heads)


class Lending(Rotting):
    """Spoils the first `num_bad` reads."""

    num_bad = 1 << 30

    def gather_cells(self, *args: Any, **named: Any) -> NDArray[np.uint8]:
        self.on = self.num_bad > 0
        self.num_bad -= self.on
        return super().gather_cells(*args, **named)


@dataclass
class Bench:
    """One rank that fetches, and one that lends."""

    borrower: Borrower
    lender: Lending
    watch: Watch
    counts: TransferCounts
    clock: ManualClock
    holder: Holder
    ledgers: tuple[Ledger, Ledger]
    num_fetches: int = 0

    async def fetch(self) -> Borrowed:
        self.num_fetches += 1
        key = ShipmentKey(self.num_fetches.to_bytes(16, "big"), 1, 1, 0)
        return await self.borrower.borrow(BorrowOrder(key, tuple(NAMES), TARGET, self.holder, 5))


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    clock, counts = ManualClock(), TransferCounts()
    ours = Ledger(Origin("prefill-1", "p1", 1, "prefill", 0, 1))
    theirs = Ledger(Origin("prefill-0", "p0", 3, "prefill", 0, 1))
    lender = Lending(filled_store(SPEC, ALL_HEADS, 24, 1))
    me = Identity("prefill-1", "p1", 1, 0)
    watch = Watch(me, clock, WATCHFUL, counts)
    pins = Pins(dict(zip(NAMES, SOURCE, strict=True)))
    with ThreadPoolExecutor(1) as copiers, ThreadPoolExecutor(1) as writers:
        server = grpc.aio.server()
        cells = CellsServicer(lender, copiers, WATCHFUL, blocks=pins, ledger=theirs)
        add_CellsServicer_to_server(cells, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        holder = Holder("p0", (address,), HEADS, SPEC.block_size, "prefill-0", 3)
        store = filled_store(SPEC, ALL_HEADS, 24, 2)
        parts = (GrpcPuller(5), writers, WATCHFUL, watch, ours)
        borrower = Borrower(me, ALL_HEADS, store, *parts)
        try:
            yield Bench(borrower, lender, watch, counts, clock, holder, (ours, theirs))
        finally:
            await server.stop(0)
    report = audit([ledger.extract() for ledger in (ours, theirs)], at_rest=True)
    report.check()
    assert not report.one_sided


async def test_who_lends_damaged_blocks_is_not_asked_again_until_one_fetch_is_whole() -> None:
    async with bench() as those:
        while not those.watch.standing():
            took = await those.fetch()
            assert took.num_whole == 0
            assert took.why == "layer 0, block 0, head 0 came damaged from prefill-0 rank 0"
        (left_alone,) = those.watch.standing()
        assert (left_alone.worker, left_alone.epoch, left_alone.wire) == ("prefill-0", 3, "call")
        assert those.counts.wires_quarantined == 1
        assert those.counts.damaged_chunks == those.lender.num_reads > WATCHFUL.forgiven_chunks
        assert those.counts.damaged_cells == 5 * 3 * SPEC.num_kv_heads

        num_reads = those.lender.num_reads
        refused = await those.fetch()
        assert "prefill-0 rank 0 is in quarantine" in refused.why
        assert "came damaged over call" in refused.why
        assert those.lender.num_reads == num_reads

        await those.clock.run(WATCHFUL.cool_down_s)
        those.lender.num_bad = 0
        assert (await those.fetch()).num_whole == len(NAMES)
        assert those.counts.wires_cleared == 1
        assert [link.standing for _, link in those.watch.links()] == [Standing.SOUND]


async def test_damage_on_trial_ends_the_trial() -> None:
    async with bench() as those:
        while not those.watch.standing():
            await those.fetch()
        await those.clock.run(WATCHFUL.cool_down_s)
        await those.fetch()
        (left_alone,) = those.watch.standing()
        assert left_alone.left_s == pytest.approx(2 * WATCHFUL.cool_down_s)
        assert "tried again" in left_alone.reason


async def test_one_damaged_fetch_is_an_accident_and_the_rest_comes() -> None:
    async with bench() as those:
        those.lender.num_bad = 1
        assert (await those.fetch()).num_whole == 0
        assert those.counts.damaged_chunks == 1
        assert await those.fetch() == Borrowed(len(NAMES), NUM_BYTES)
        assert not those.watch.standing()


class Repeating:
    """Says the cells of layer 0 again where those of layer 1 belong."""

    def __init__(self, inner: Puller) -> None:
        self._inner = inner

    async def fetch(self, pull: Pull) -> AsyncGenerator[Part, None]:
        last: Part | None = None
        async with aclosing(self._inner.fetch(pull)) as parts:
            async for part in parts:
                if part[0].layer == 1 and last is not None:
                    yield last
                else:
                    yield part
                last = part


async def test_cells_that_come_twice_do_not_stand_for_those_that_never_came() -> None:
    async with bench() as those:
        those.lender.num_bad = 0
        those.borrower._puller = Repeating(those.borrower._puller)
        took = await those.fetch()
        assert took.num_whole == 0
        assert took.why == "some of it is not at prefill-0 any more"


async def test_a_fetch_that_is_cut_off_ends_its_books_after_the_last_thread() -> None:
    async with bench() as those:
        those.lender.num_bad = 0
        fetching = asyncio.create_task(those.fetch())
        async with asyncio.timeout(5):
            while not those.lender.num_reads:
                await asyncio.sleep(0)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)


async def test_as_many_runs_are_asked_for_as_a_call_may_have_however_many_blocks() -> None:
    async with bench() as those:
        for num_blocks in (1, 7, 4096, 5033):
            names = tuple([NAMES[0]] * num_blocks)
            order = BorrowOrder(ShipmentKey(bytes(16), 1, 1, 0), names, (), those.holder, 5)
            lender = those.holder.lender(0, 0)
            assert lender is not None
            pull = those.borrower._pull(order, range(num_blocks), lender, [0, 1, 2])
            assert len(pull.runs) <= MAX_RUNS
            assert sum(run.num_blocks for run in pull.runs) == 3 * num_blocks
