import asyncio

from engine.clock import ManualClock, MonotonicClock


async def test_sleepers_wake_in_the_order_they_are_due() -> None:
    clock = ManualClock(start=100.0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.now()))

    tasks = [asyncio.create_task(sleeper(name, s)) for name, s in [("b", 2), ("a", 1), ("c", 9)]]
    await clock.run(5.0)
    assert woken == [("a", 101.0), ("b", 102.0)]
    assert clock.now() == 105.0
    assert clock.num_sleeping == 1
    tasks[2].cancel()
    await clock.run(10.0)
    assert clock.num_sleeping == 0


async def test_a_loop_that_sleeps_runs_as_often_as_time_allows() -> None:
    clock = ManualClock()
    beats: list[float] = []

    async def beat() -> None:
        while True:
            await clock.sleep(1.0)
            beats.append(clock.now())

    task = asyncio.create_task(beat())
    await clock.run(3.5)
    assert beats == [1.0, 2.0, 3.0]
    task.cancel()


async def test_time_moved_at_once_wakes_everyone_due() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(3.0))
    await asyncio.sleep(0)
    clock.advance(2.9)
    await asyncio.sleep(0)
    assert not task.done()
    clock.advance(0.1)
    await task


async def test_the_machines_clock_moves_by_what_was_slept() -> None:
    clock = MonotonicClock()
    before = clock.now()
    await clock.sleep(0.01)
    assert clock.now() - before >= 0.009
