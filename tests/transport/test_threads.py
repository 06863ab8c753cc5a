"""Calls in line for a thread, and what becomes of them when nobody will take any more."""

import asyncio
import threading

from transport.threads import Threads


async def test_calls_that_nobody_waits_for_keep_their_place_in_line() -> None:
    threads, called = Threads(1, "line"), list[int]()
    first = threads.do(lambda: called.append(0))
    threads.call(lambda: called.append(1))
    await threads.do(lambda: called.append(2))
    assert called == [0, 1, 2] and first.done()
    threads.stop()


async def test_leaving_waits_for_nobody_and_calls_nothing_more() -> None:
    threads, called, may_end = Threads(1, "left"), list[int](), threading.Event()
    begun = threading.Event()

    def stuck() -> str:
        begun.set()
        may_end.wait(10)
        return "ended by itself"

    under_way = threads.do(stuck)
    in_line = threads.do(lambda: called.append(1))
    threads.call(lambda: called.append(2))
    assert begun.wait(10)
    threads.leave()
    assert in_line.cancelled() and not under_way.done()
    may_end.set()
    async with asyncio.timeout(10):
        assert await under_way == "ended by itself"
    assert called == []
