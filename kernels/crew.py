"""Threads that make calls of C, and never wait for the interpreter's lock.

A thread of Python that has such a call to make waits first until whoever holds the lock lets go of
it, for up to 5 ms, and does again before it can begin with the next. These do not: they take one
call after another from a queue, and ring an eventfd when some have been made.

`crew.c` is compiled at first use. Where there is no compiler, or no Linux, `load` answers None.
"""

import ctypes
import functools
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kernels.compiled import loaded

SOURCE = Path(__file__).with_name("crew.c")

T = TypeVar("T")

Steps = Generator[Sequence[Callable[[], Any]], list[Any], T]
"""Work of which what takes long is calls. Some are yielded, to be made by whoever goes through the
steps, on any threads, side by side; their results are sent back. Between them Python does but
little.
"""


def at_once(steps: Steps[T]) -> T:
    """The result of all steps, whose calls are made here, one after another."""
    go: Callable[[Any], Sequence[Callable[[], Any]]] = steps.send
    given: Any = None
    while True:
        try:
            calls = go(given)
        except StopIteration as stop:
            result: T = stop.value
            return result
        try:
            go, given = steps.send, [call() for call in calls]
        except BaseException as error:
            go, given = steps.throw, error


def together(many: Sequence[Steps[T]]) -> Steps[list[T]]:
    """All of them, of which each asks for its calls when the others do."""
    results: dict[int, T] = {}
    given: dict[int, Any] = dict.fromkeys(range(len(many)))
    while given:
        asked: dict[int, Sequence[Callable[[], Any]]] = {}
        for i, made in given.items():
            try:
                asked[i] = many[i].send(made)
            except StopIteration as stop:
                results[i] = stop.value
        made = (yield [call for calls in asked.values() for call in calls]) if asked else []
        given = {}
        for i, calls in asked.items():
            given[i], made = made[: len(calls)], made[len(calls) :]
    return [results[i] for i in range(len(many))]


class CCall:
    """A function of C and the structure that it takes; made once, by calling it or by a crew."""

    def __init__(self, work: Any, about: ctypes.Structure, *held: object) -> None:
        """`held` is what `about` points to."""
        self._work = work
        self._about = about
        self._held = held
        self.queued = _Queued(
            ctypes.cast(work, ctypes.c_void_p), ctypes.addressof(about), ctypes.c_void_p(None)
        )

    def __call__(self) -> None:
        self._work(ctypes.byref(self._about))


class _Queued(ctypes.Structure):
    """`call` of crew.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("work", "about", "next")]


class Crew:
    """Not thread-safe: whoever has started it hands it calls, and asks for those made."""

    def __init__(self, library: ctypes.CDLL, num_threads: int, bell: int) -> None:
        """`bell` is an eventfd. Raises OSError when there are no threads to be had."""
        self._library = library
        self._crew = library.crew_start(num_threads, bell) if bell >= 0 else None
        if not self._crew:
            raise OSError(f"{num_threads} threads cannot be started")
        self._under_way: dict[int, CCall] = {}

    def put(self, call: CCall) -> None:
        """Calls are begun in this order."""
        address = ctypes.addressof(call.queued)
        self._under_way[address] = call
        self._library.crew_put(self._crew, address)

    def made(self) -> list[CCall]:
        """Those made since the last time."""
        found, address = [], self._library.crew_made(self._crew)
        while address:
            call = self._under_way.pop(address)
            address = call.queued.next
            found.append(call)
        return found

    def leave(self) -> list[CCall]:
        """Returns when every call has been made: those made since the last time. The last word."""
        self._library.crew_leave(self._crew)
        left, self._under_way = [*self._under_way.values()], {}
        return left


@functools.cache
def load() -> Callable[[int, int], Crew] | None:
    """What starts a crew of so many threads with that bell, or None where there cannot be one."""
    address, count = ctypes.c_void_p, ctypes.c_int64
    return loaded(
        SOURCE,
        "-pthread",
        signatures={
            "crew_start": (address, [count, ctypes.c_int]),
            "crew_put": (None, [address, address]),
            "crew_made": (address, [address]),
            "crew_leave": (None, [address]),
        },
        make=lambda library: functools.partial(Crew, library),
        otherwise="cells are copied by threads of Python, which wait for its lock",
        needs_linux=True,
        keeps_lock=True,
    )
