"""An end that says nothing more: leases, deadlines, and frames that never come."""

import asyncio

import pytest

from engine.clock import ManualClock
from protos.transfer_pb2 import Frame
from tests.transport.broken import (
    NUM_TOKENS,
    SOURCE,
    TARGET,
    failures,
    run_until,
    with_fault,
)
from tests.transport.harness import (
    QUICK,
    cluster,
    network,
    soon,
)
from transport.fault_wire import Item
from transport.orders import TransferFailed
from transport.port import Port


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


@pytest.mark.parametrize("flowing_s", [0, 40, 1000])
async def test_who_is_behind_others_on_a_slow_link_is_not_silent_for_three_leases(
    flowing_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of this transfer comes; payloads do, byte by byte."""

    async def drop(frame: Frame, payload: memoryview | None) -> list[Item]:
        return [] if frame.WhichOneof("body") != "open" else [(frame, payload)]

    clock = ManualClock()
    monkeypatch.setattr(Port, "num_received", property(lambda _: int(min(clock.now(), flowing_s))))
    async with (
        network("loopback") as net,
        cluster(net, wrap=with_fault(drop), clock=clock) as group,
    ):
        key, (receiver,) = group.key(), group.decode.receivers
        expected = group.expect(key, NUM_TOKENS, TARGET, timeout_s=1000)
        shipped = group.ship(key, NUM_TOKENS)
        await run_until(clock, min(flowing_s + 29, 89), *expected)
        assert not expected[0].done()
        await run_until(clock, 3, *expected)
        await failures(*expected, *shipped)
        assert receiver.counts.expired == 1


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


async def test_a_transfer_that_cannot_be_looked_at_keeps_no_other_alive() -> None:
    clock = ManualClock()
    async with network("loopback") as net, cluster(net, clock=clock) as group:
        (receiver,) = group.decode.receivers
        stuck, other = group.key(), group.key()
        held = group.expect(stuck, NUM_TOKENS, TARGET, timeout_s=60)
        expected = group.expect(other, NUM_TOKENS, [1, 6, 8, 9, 10], timeout_s=1)
        await asyncio.sleep(0)
        landing = receiver._arrivals.live[stuck]
        del landing.renew_at
        await run_until(clock, 3, *expected)
        landing.renew_at = clock.now()
        (failure,) = await failures(*expected)
        assert failure.code == "DEADLINE_EXCEEDED"
        assert not held[0].done()
        await receiver.abort(stuck, "test over")
        await failures(*held)


async def test_who_waits_for_a_call_that_is_awaited_already_is_told() -> None:
    async with network("loopback") as net, cluster(net) as group:
        (receiver,) = group.decode.receivers
        key = group.key()
        first = asyncio.create_task(receiver.called(key, 20))
        await asyncio.sleep(0)
        with pytest.raises(TransferFailed, match="is awaited already"):
            await receiver.called(key, 20)
        shipped = group.ship(key, NUM_TOKENS)
        await first
        await receiver.abort(key, "test over")
        await failures(*shipped)


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
        cluster(net, wrap=with_fault(drop), clock=clock, num_blocks=250) as group,
    ):
        tasks: list[asyncio.Task[object]] = []
        for first in range(0, 250, 5):
            key = group.key()
            tasks += group.expect(key, NUM_TOKENS, range(first, first + 5), timeout_s=20)
            tasks += group.ship(key, NUM_TOKENS)
            group.seal_all(key, NUM_TOKENS, SOURCE)
        await run_until(clock, 31, *tasks)
        await failures(*tasks)
        await soon(lambda: group.decode.receivers[0].open_transfers == 0)
        await soon(lambda: group.prefill.shippers[0].open_shipments == 0)


@pytest.mark.parametrize("noticed_by", ["prefill", "decode"])
async def test_a_link_that_was_silent_for_a_lease_is_dialled_again(noticed_by: str) -> None:
    silent = True

    async def drop(frame: Frame, payload: memoryview | None) -> list[Item]:
        opens = frame.WhichOneof("body") in ("open", "credit")
        return [] if silent and not opens else [(frame, payload)]

    fault = with_fault(incoming=drop) if noticed_by == "prefill" else with_fault(drop)
    clock = ManualClock()
    async with network("loopback") as net, cluster(net, wrap=fault, clock=clock) as group:
        key = group.key()
        (shipper,) = group.prefill.shippers
        expected = group.expect(key, NUM_TOKENS, TARGET, timeout_s=1000)
        shipped = group.ship(key, NUM_TOKENS)
        await run_until(clock, 31, *shipped)
        await failures(*shipped, *expected)
        await soon(lambda: shipper.counts.links_lost == 1)
        silent = False
        await group.carry(NUM_TOKENS, SOURCE, TARGET)


async def test_a_link_over_which_another_transfer_lives_is_kept() -> None:
    deaf: set[bytes] = set()

    async def drop(frame: Frame, payload: memoryview | None) -> list[Item]:
        return [] if frame.key.transfer_id in deaf else [(frame, payload)]

    clock = ManualClock()
    async with (
        network("loopback") as net,
        cluster(net, wrap=with_fault(incoming=drop), clock=clock) as group,
    ):
        lost, kept = group.key(), group.key()
        deaf.add(lost.transfer_id)
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        unheard = group.expect(lost, NUM_TOKENS, TARGET, timeout_s=1000)
        shipped = group.ship(lost, NUM_TOKENS)
        others = group.expect(kept, NUM_TOKENS, [1, 6, 8, 10, 12], timeout_s=1000)
        alive = group.ship(kept, NUM_TOKENS)
        await run_until(clock, 31, *shipped)
        await failures(*shipped, *unheard)
        assert not alive[0].done()
        group.seal_all(kept, NUM_TOKENS, SOURCE)
        await asyncio.gather(*others)
        await group.commit(kept)
        await asyncio.gather(*alive)
        assert shipper.counts.links_lost == receiver.counts.links_lost == 0
