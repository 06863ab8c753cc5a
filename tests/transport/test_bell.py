"""How threads wake the loop."""

import asyncio
import threading

import pytest

from tests.transport.harness import num_open_files, soon
from transport.bell import Bell
from transport.threads import Threads


async def test_whoever_rings_is_answered_and_many_at_once_together() -> None:
    answers = list[int]()
    bell = Bell(lambda: answers.append(1))
    for _ in range(50):
        bell.ring()
    await soon(lambda: bool(answers))
    assert len(answers) == 1
    ringing = threading.Thread(target=bell.ring)
    ringing.start()
    await soon(lambda: len(answers) == 2)
    ringing.join()
    bell.close()


async def test_a_closed_bell_is_answered_no_more_and_leaves_no_file_open() -> None:
    before, answers = num_open_files(), list[int]()
    bell = Bell(lambda: answers.append(1))
    bell.ring()
    bell.close()
    bell.close()
    await asyncio.sleep(0.01)
    assert (answers, num_open_files()) == ([], before)


@pytest.mark.parametrize("tells", [False, True])
async def test_a_patient_thread_tells_when_it_is_told_to_or_when_nothing_waits(
    tells: bool,
) -> None:
    threads, begin, may = Threads(1, "test", patient=True), threading.Event(), threading.Event()

    def second() -> None:
        if tells:
            threads.tell()
        assert may.wait(10)

    first, last = threads.do(lambda: begin.wait(10)), threads.do(second)
    begin.set()
    await (first if tells else asyncio.sleep(0.02))
    assert (first.done(), last.done()) == (tells, False)
    may.set()
    await asyncio.gather(first, last)
    threads.stop()
