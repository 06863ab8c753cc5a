"""A wire that damages too much is left for the next one, and tried again after a while."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from engine.clock import ManualClock
from protos.transfer_pb2 import Frame
from tests.transport.broken import NUM_TOKENS, SOURCE, TARGET, carry_whole, failures
from tests.transport.harness import MANIFEST, QUICK, Cluster, Network, cluster, network, soon
from transport.fault_wire import FaultConnector, FaultWire, Item
from transport.faults import Faults
from transport.orders import Identity, TransferFailed
from transport.quarantine import Quarantined, Standing
from transport.shipper import Shipper

WATCHFUL = replace(QUICK, max_damage_share=1e-4, max_link_asks=30, max_link_damages=10**6)
COOL_DOWN_S = WATCHFUL.cool_down_s
FLIPS = "seed=3 flip=0.3"


@asynccontextmanager
async def two_wires(
    first: str, second: str, faults: Faults, also: Faults | None = None
) -> AsyncIterator[tuple[Cluster, Network, ManualClock]]:
    """A pair whose first wire has `faults`, and whose second one has those of `also`."""
    clock = ManualClock()
    async with network(first) as net:
        next_wire = net.connector_of(second)
        if also is not None:
            next_wire = FaultWire(next_wire, also, clock)
        async with cluster(
            net,
            config=WATCHFUL,
            clock=clock,
            wrap=lambda inner: FaultWire(inner, faults, clock),
            others={second: next_wire},
        ) as group:
            yield group, net, clock


async def in_time(clock: ManualClock, carried: Coroutine[Any, Any, object]) -> None:
    """Time passes only when an answer came damaged, too, and must be asked for again."""
    carrying = asyncio.create_task(carried)
    async with asyncio.timeout(10):
        while not (await asyncio.wait([carrying], timeout=0.3))[0]:
            await clock.run(WATCHFUL.repair_wait_s)
    await carrying


async def _all(carried: Iterable[Coroutine[Any, Any, object]]) -> None:
    await asyncio.gather(*carried)


async def carry(group: Cluster, clock: ManualClock) -> None:
    await in_time(clock, carry_whole(group))


def time_of(left_alone: Quarantined) -> float:
    return left_alone.for_s + left_alone.left_s


async def carry_until_quarantined(group: Cluster, clock: ManualClock) -> None:
    counts = group.decode.receivers[0].counts
    before = counts.wires_quarantined
    async with asyncio.timeout(10):
        while counts.wires_quarantined == before:
            await carry(group, clock)


@pytest.mark.parametrize(
    ("first", "second"), [("shm", "tcp"), ("tcp", "gloo"), ("gloo", "grpc"), ("grpc", "tcp")]
)
async def test_a_wire_that_damages_is_left_for_the_next_and_used_again_after_its_cool_down(
    first: str, second: str
) -> None:
    faults = Faults.of(FLIPS)
    async with two_wires(first, second, faults) as (group, _, clock):
        receiver, shipper = group.decode.receivers[0], group.prefill.shippers[0]
        await carry_until_quarantined(group, clock)
        await soon(lambda: not receiver.watch.ports)  # the link has ended with its transfer

        seen, damaged = faults.num_frames, receiver.counts.damaged_chunks
        for _ in range(3):
            await carry(group, clock)
        assert faults.num_frames == seen
        assert receiver.counts.damaged_chunks == damaged
        (left_alone,) = receiver.watch.standing()
        assert (left_alone.wire, time_of(left_alone)) == (first, COOL_DOWN_S)

        # Its time is over, but it has not been mended: one transfer finds out.
        await clock.run(COOL_DOWN_S)
        faults.spec = Faults.of("seed=3 flip=0.7").spec
        await carry(group, clock)
        assert receiver.counts.wires_quarantined == 2
        assert time_of(receiver.watch.standing()[0]) == 2 * COOL_DOWN_S

        await clock.run(2 * COOL_DOWN_S)
        faults.on = False
        await carry(group, clock)
        assert receiver.counts.wires_cleared == 1
        await soon(lambda: len(receiver.watch.ports) == 1)  # the trial's link has ended, too
        await clock.run(1.0)
        seen = faults.num_frames
        await carry(group, clock)
        assert faults.num_frames > seen
        standings = {name.wire: link.standing for name, link in receiver.watch.links()}
        assert standings == dict.fromkeys((first, second), Standing.SOUND)
        assert shipper.counts.failed == receiver.counts.failed == 0
        assert shipper.counts.links_lost == receiver.counts.links_lost == 0


async def test_transfers_that_run_over_a_wire_when_it_is_quarantined_all_end_well() -> None:
    async with two_wires("tcp", "grpc", Faults.of(FLIPS)) as (group, _, clock):
        sources = [[5, 3, 9, 0, 11], [1, 2, 4, 6, 7], [8, 10, 12, 13, 14]]
        targets = [[7, 20, 2, 15, 4], [0, 1, 3, 5, 6], [8, 9, 10, 11, 12]]
        for _ in range(4):
            pairs = list(zip(sources, targets, strict=True))
            all_three = (group.carry(NUM_TOKENS, *pair) for pair in pairs)
            await in_time(clock, _all(all_three))
            for pair in pairs:
                group.check_blocks(NUM_TOKENS, *pair)
        counts = group.decode.receivers[0].counts
        assert counts.wires_quarantined == 1
        assert counts.failed == 0


async def test_a_worker_whose_wires_all_damage_is_refused_until_its_next_life() -> None:
    faults, also = Faults.of(FLIPS), Faults.of(FLIPS)
    async with two_wires("tcp", "grpc", faults, also) as (group, net, clock):
        receiver = group.decode.receivers[0]
        await carry_until_quarantined(group, clock)
        await carry_until_quarantined(group, clock)
        assert receiver.counts.workers_quarantined == 1
        await soon(lambda: not receiver.watch.ports)

        key = group.key()
        (failure,) = await failures(*group.ship(key, NUM_TOKENS))
        assert failure.code == "UNAVAILABLE"
        assert "decode-0 rank 0 has it in quarantine for 60 s" in failure.reason
        assert "cells came damaged over tcp and grpc" in failure.reason
        await receiver.abort(key, "nobody will call")

        born = Identity("prefill-0", "p2", 2, 0)
        old = group.prefill.shippers[0]
        stores, heads = group.prefill.stores, group.prefill.intervals
        connectors = {"tcp": net.connector()}
        async with Shipper(
            born, heads, stores[0], connectors, MANIFEST, clock, WATCHFUL
        ) as shipper:
            group.prefill.shippers[:] = [shipper]
            key = replace(group.key(), prefill_epoch=2)
            receipt = replace(group.receipt_order(key, NUM_TOKENS, TARGET), prefill_instance="p2")
            expected = asyncio.create_task(receiver.expect(receipt))
            shipped = group.ship(key, NUM_TOKENS)
            group.seal_all(key, NUM_TOKENS, SOURCE)
            await expected
            await group.commit(key)
            await asyncio.gather(*shipped)
            group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
            assert receiver.watch.standing() == []
        group.prefill.shippers[:] = [old, shipper]


async def test_with_no_other_wire_a_shipment_is_refused_at_once_and_told_why() -> None:
    faults = Faults.of(FLIPS)
    async with two_wires("tcp", "grpc", faults) as (group, _, clock):
        group.other_wires = ()
        await carry_until_quarantined(group, clock)
        key = group.key()
        order = group.receipt_order(key, NUM_TOKENS, TARGET)
        expected = asyncio.create_task(group.decode.receivers[0].expect(order))
        (failure,) = await failures(*group.ship(key, NUM_TOKENS))
        assert isinstance(failure, TransferFailed)
        assert failure.code == "UNAVAILABLE"
        assert "in quarantine" in failure.reason
        await group.decode.receivers[0].abort(key, "test over")
        await asyncio.gather(expected, return_exceptions=True)


async def test_a_quarantine_that_is_lost_is_said_again_at_the_next_open() -> None:
    lost = 0

    async def lose_the_first(frame: Frame, payload: memoryview | None) -> list[Item]:
        nonlocal lost
        if frame.HasField("quarantine") and not lost:
            lost += 1
            return []
        return [(frame, payload)]

    clock, faults = ManualClock(), Faults.of(FLIPS)
    async with (
        network("grpc") as net,
        cluster(
            net,
            config=WATCHFUL,
            clock=clock,
            wrap=lambda inner: FaultConnector(
                FaultWire(inner, faults, clock), incoming=lose_the_first
            ),
            others={"tcp": net.connector_of("tcp")},
        ) as group,
    ):
        await carry_until_quarantined(group, clock)
        (port,) = group.decode.receivers[0].watch.ports
        assert (lost, port.retired) == (1, True)
        await carry(group, clock)  # over the old link, which ends with it
        await soon(lambda: not group.decode.receivers[0].watch.ports)
        seen = faults.num_frames
        await carry(group, clock)
        assert faults.num_frames == seen
