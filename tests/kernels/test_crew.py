"""Steps and their calls, and the threads of C that make some of them."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels import crew, host_cells
from kernels.crew import CCall, Crew, Steps, at_once, together
from kvcache.cells import cell_digests


def add(first: int, second: int) -> Callable[[], int]:
    return lambda: first + second


def fail() -> None:
    raise OSError("it did not work")


def test_what_calls_answer_comes_back_to_the_steps() -> None:
    def steps() -> Steps[list[Any]]:
        three, seven = yield [add(1, 2), add(3, 4)]
        nothing = yield []
        (ten,) = yield [add(three, seven)]
        return [three, seven, nothing, ten]

    assert at_once(steps()) == [3, 7, [], 10]


def test_a_call_that_fails_is_heard_of_in_the_steps() -> None:
    def gives_up() -> Steps[None]:
        yield [fail]

    def goes_on() -> Steps[str]:
        try:
            yield [add(1, 2), fail]
        except OSError as error:
            yield [add(1, 2)]
            return str(error)
        return "all was well"

    with pytest.raises(OSError, match="it did not work"):
        at_once(gives_up())
    assert at_once(goes_on()) == "it did not work"


def test_several_steps_ask_for_their_calls_together() -> None:
    asked: list[int] = []

    def steps(num_calls: int) -> Steps[int]:
        total = 0
        for i in range(num_calls):
            (made,) = yield [add(total, i)]
            total = made
        return total

    def seen() -> Steps[list[int]]:
        both, made = together([steps(3), steps(0), steps(1)]), None
        while True:
            try:
                calls = both.send(made)  # type: ignore[arg-type]
            except StopIteration as stop:
                results: list[int] = stop.value
                return results
            asked.append(len(calls))
            made = yield calls

    assert at_once(seen()) == [3, 0, 0]
    assert asked == [2, 1, 1]
    assert at_once(together([])) == []


@pytest.fixture
def bell() -> Iterator[int]:
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


def started(num_threads: int, bell: int) -> Crew:
    start = crew.load()
    assert start is not None
    return start(num_threads, bell)


def digest(cells: NDArray[np.uint8]) -> tuple[CCall, NDArray[np.uint64]]:
    """A call that digests them, as one block of so many heads, and where the digests go."""
    host, (num_cells, cell_bytes) = host_cells.load(), cells.shape
    assert host is not None
    strides = (cells.nbytes, cell_bytes, cell_bytes, cell_bytes)
    layout = host_cells.Layout(*strides, 1, 1, cell_bytes, 1, 0, num_cells)
    digests = np.zeros((1, num_cells), dtype=np.uint64)
    ids_B = np.zeros(1, dtype=np.int64)
    return host.digesting(cells.ctypes.data, layout, ids_B, 0, digests), digests


def test_calls_are_made_while_another_thread_holds_the_interpreters_lock(bell: int) -> None:
    cells = np.random.default_rng(1).integers(0, 256, (50, 4096), dtype=np.uint8)
    ours = started(1, bell)
    call, digests = digest(cells)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    try:
        ours.put(call)
        until = time.monotonic() + 20
        while not digests[0, -1] and time.monotonic() < until:
            pass
    finally:
        sys.setswitchinterval(usual)
    assert digests[0].tolist() == cell_digests(cells).tolist()
    assert os.eventfd_read(bell) == 1
    assert ours.made() == [call]
    assert ours.made() == []
    assert ours.leave() == []


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_call_is_made_once_and_told_of_once(num_threads: int, bell: int) -> None:
    rng = np.random.default_rng(2)
    ours = started(num_threads, bell)
    work = {}
    for _ in range(200):
        cells = rng.integers(0, 256, (2, 100), dtype=np.uint8)
        call, digests = digest(cells)
        work[call] = (cells, digests)
        ours.put(call)
    told = list[CCall]()
    while len(told) < len(work):
        assert os.eventfd_read(bell) > 0  # waits
        told += ours.made()
    assert set(told) == set(work)
    if num_threads == 1:
        assert told == list(work)
    for cells, digests in work.values():
        assert digests[0].tolist() == cell_digests(cells).tolist()
    assert ours.leave() == []


def test_who_leaves_waits_for_what_is_queued(bell: int) -> None:
    ours = started(1, bell)
    cells = np.random.default_rng(3).integers(0, 256, (100, 4096), dtype=np.uint8)
    work = [digest(cells) for _ in range(10)]
    for call, _ in work:
        ours.put(call)
    assert ours.leave()[-1] is work[-1][0]
    assert all(digests.all() for _, digests in work)


def test_a_call_of_c_can_be_made_like_any_other() -> None:
    cells = np.random.default_rng(4).integers(0, 256, (5, 64), dtype=np.uint8)
    call, digests = digest(cells)
    call()
    assert digests[0].tolist() == cell_digests(cells).tolist()


def test_without_a_bell_there_is_no_crew() -> None:
    with pytest.raises(OSError, match="2 threads cannot be started"):
        started(2, -1)
