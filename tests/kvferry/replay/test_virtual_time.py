"""Waiting takes no time, and happens in order."""

import asyncio
import time

import pytest

from kvferry.replay.virtual_time import EverybodyWaits, VirtualClock, run_virtual


def test_a_day_passes_at_once_and_sleepers_wake_in_order() -> None:
    clock, woken = VirtualClock(), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((seconds, clock.now()))

    async def main() -> None:
        await asyncio.gather(*(sleeper(seconds) for seconds in (86_400, 1, 60)))

    started = time.monotonic()
    run_virtual(main())
    assert time.monotonic() - started < 5
    assert [seconds for seconds, _ in woken] == [1, 60, 86_400]
    assert all(at == pytest.approx(seconds) for seconds, at in woken)


def test_a_timeout_is_virtual_too() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        return VirtualClock().now()

    assert run_virtual(main()) == pytest.approx(3600)


def test_waiting_for_nothing_is_an_error_and_no_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(EverybodyWaits):
        run_virtual(main())
