"""A step that hangs, and one that is merely slow."""

import asyncio
import threading
from typing import Any

import pytest

from engine.clock import ManualClock, MonotonicClock
from model.checksum import ChecksumModel
from tests.engine.small_worker import SmallWorker
from worker.step_watch import LOOK_EVERY_S, watch_steps


class Slow:
    """Steps of the ages that it is given, one at each look."""

    def __init__(self, *ages_s: float) -> None:
        self._ages_s = iter(ages_s)
        self.lost: list[str] = []

    @property
    def step_age_s(self) -> float:
        return next(self._ages_s)

    def lose(self, reason: str) -> None:
        self.lost.append(reason)


async def test_a_step_is_given_its_time_and_no_more() -> None:
    clock, steps = ManualClock(), Slow(0.0, 9.0, 10.0, 0.0, 10.5)
    watch = asyncio.create_task(watch_steps(steps, 10.0, clock))
    await clock.run(4 * LOOK_EVERY_S)
    assert steps.lost == [] and not watch.done()
    await clock.run(LOOK_EVERY_S)
    assert steps.lost == ["a step has lasted 10 s, and step_timeout_s is 10"]
    await watch


async def test_a_step_that_hangs_fails_its_requests_and_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        entered.set()
        leave.wait(60)
        raise RuntimeError("it has come back after all")

    deaths: list[Exception] = []
    worker = SmallWorker(on_death=deaths.append)
    monkeypatch.setattr(ChecksumModel, "forward", hang)
    running = worker.add([1, 2, 3])
    worker.engine.start()
    try:
        assert await asyncio.to_thread(entered.wait, 20)
        waiting = worker.add([4, 5, 6])
        async with asyncio.timeout(20):
            await watch_steps(worker.engine, 0.01, MonotonicClock())
        for heard in (running, waiting):
            assert heard.failure is not None and heard.failure.code == "UNAVAILABLE"
            assert "a step has lasted" in heard.failure.reason
        assert len(deaths) == 1
    finally:
        leave.set()
        worker.engine.stop()
    assert worker.engine.step_age_s == 0.0
