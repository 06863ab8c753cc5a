"""A transfer that is given up lets go of its blocks only when nothing reads or writes them."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.clock import ManualClock
from kernels.crew import Steps
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from tests.transport.broken import (
    NUM_TOKENS,
    SOURCE,
    TARGET,
    carry_whole,
    failures,
    with_fault,
)
from tests.transport.harness import (
    MANIFEST,
    QUICK,
    cluster,
    network,
)
from tests.transport.test_pull import damaging, serving
from transport.orders import Identity
from transport.shipper import Shipper


class SlowSink:
    """A store whose scatter, once armed, takes as long as the test likes."""

    def __init__(self, store: KvStore) -> None:
        self.spec: CacheSpec = store.spec
        self.may_write = threading.Event()
        self.entered = threading.Event()
        self._store = store

    def scattering(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: NDArray[np.uint8],
        digests: NDArray[np.uint64] | None = None,
    ) -> Steps[NDArray[np.intp]]:
        yield [self._wait]
        return (yield from self._store.scattering(layer, block_ids, heads, cells, digests))

    def _wait(self) -> None:
        self.entered.set()
        assert self.may_write.wait(10)


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


class SlowRepair(SlowSink):
    """Only the head that came damaged waits, when it comes again."""

    def scattering(
        self, layer: int, block_ids: Sequence[int], heads: Sequence[int], *args: Any, **named: Any
    ) -> Steps[NDArray[np.intp]]:
        if list(heads) == [1]:
            return super().scattering(layer, block_ids, heads, *args, **named)
        return self._store.scattering(layer, block_ids, heads, *args, **named)


async def test_an_abort_waits_for_cells_that_came_by_a_call_as_well() -> None:
    sinks: list[SlowRepair] = []

    def slow(store: KvStore) -> SlowRepair:
        sinks.append(SlowRepair(store))
        return sinks[-1]

    wrap, config = with_fault(outgoing=damaging), replace(QUICK, max_link_asks=0)
    async with (
        network("loopback") as net,
        cluster(net, sink=slow, wrap=wrap, config=config) as group,  # type: ignore[arg-type]
        serving(group) as address,
    ):
        (receiver,), (sink,), key = group.decode.receivers, sinks, group.key()
        order = group.receipt_order(key, NUM_TOKENS, TARGET)
        order = replace(order, source_addresses=(address,))
        expected, shipped = asyncio.create_task(receiver.expect(order)), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        await asyncio.to_thread(sink.entered.wait)
        await asyncio.sleep(0.2)  # the call has ended, and its task waits for the thread
        aborting = asyncio.create_task(receiver.abort(key, "the client left"))
        await failures(expected)
        await asyncio.sleep(0.05)
        assert not aborting.done()
        assert receiver.open_transfers == 1
        sink.may_write.set()
        await aborting
        await failures(*shipped)


async def test_shipping_ends_only_when_nothing_reads_the_blocks_any_more() -> None:
    reading, may_read = threading.Event(), threading.Event()

    class SlowSource:
        def __init__(self, store: KvStore) -> None:
            self.spec = store.spec
            self.cut = store.cut
            self.digesting = store.digesting
            self.known_digests = store.known_digests
            self.streams = store.streams
            self.prove_blocks = store.prove_blocks
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

        def pourer(self, *arguments: Any, **named: Any) -> None:
            """All of it is gathered."""

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
            shipping.cancel()  # whoever called is cancelled itself
            await asyncio.sleep(0.05)
            assert not shipping.done()
            assert shipper.open_shipments == 1
            may_read.set()
            with pytest.raises(asyncio.CancelledError):
                await shipping
            assert shipper.open_shipments == 0


async def test_cancels_at_any_moment_leave_nothing_behind() -> None:
    rng = np.random.default_rng(11)
    took = list[float]()
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
            took.append(time.monotonic() - started)
        assert sorted(took)[-2] < 0.5  # once the machine itself may have been away
        assert [r.open_transfers for r in group.decode.receivers] == [0, 0]
        assert [s.open_shipments for s in group.prefill.shippers] == [0, 0]
        await carry_whole(group)
