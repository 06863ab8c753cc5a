"""Threads that gather, scatter and digest cells for the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kernels import crew
from kernels.crew import CCall, Crew, Steps, at_once
from transport.bell import Bell
from transport.threads import Threads

T = TypeVar("T")


@dataclass(slots=True)
class _Trip:
    """Steps that have begun, and whoever waits for their result."""

    steps: Steps[Any]
    result: "asyncio.Future[Any]"
    made: Any = None  # what came of the calls that were asked for together
    num_left: int = 0  # of them
    error: BaseException | None = None  # of any of them


class Copiers:
    """`num` of them, that begin with what they are given in order.

    Calls of C are made by a crew, which does not wait for the interpreter's lock, and other calls
    by as many threads of Python; where there is no crew, these do all. Each is started when first
    needed.
    """

    def __init__(self, num: int, name: str) -> None:
        self._num = num
        self._threads = Threads(num, name)
        self._start = crew.load()
        self._crew: Crew | None = None
        self._bell: Bell | None = None
        self._waiting: deque[_Trip] = deque()  # that have not begun
        self._num_under_way = 0
        self._trips: dict[CCall, _Trip] = {}  # by the call that the crew is to make for it
        self._stopped = False

    def do(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """As `Threads.do`."""
        return self._threads.do(work)

    def go_through(self, steps: Steps[T]) -> "asyncio.Future[T]":
        """The result of `steps`, which may be there at once; on the loop, but for their calls. Who
        stops waiting stops nothing.
        """
        if self._start is None:
            return self._threads.do(partial(at_once, steps))
        trip = _Trip(steps, asyncio.get_running_loop().create_future())
        self._waiting.append(trip)
        self._begin()
        return trip.result

    def stop(self) -> None:
        """Returns when every call made so far has returned, and all steps have ended."""
        self._stopped = True
        self._threads.stop()
        if self._crew is not None and self._bell is not None:
            made, self._crew = self._crew.leave(), None
            self._bell.close()
            self._go_on(made)
        self._begin()

    def _begin(self) -> None:
        """No more than keep all threads busy: steps first look whether they are wanted yet."""
        while self._waiting and self._num_under_way < 2 * self._num:
            self._num_under_way += 1
            self._go(self._waiting.popleft())

    def _go(self, trip: _Trip) -> None:
        """Up to the next calls, which are then asked for."""
        steps, result = trip.steps, trip.result
        try:
            calls = steps.send(trip.made) if trip.error is None else steps.throw(trip.error)
        except StopIteration as stop:
            self._num_under_way -= 1
            if not result.done():
                result.set_result(stop.value)
            return
        except Exception as error:
            self._num_under_way -= 1
            if not result.done():
                result.set_exception(error)
            return
        trip.made, trip.num_left, trip.error = [None] * len(calls), len(calls), None
        for i, call in enumerate(calls):
            self._ask_for(call, trip, i)

    def _ask_for(self, call: Callable[[], Any], trip: _Trip, i: int) -> None:
        if self._stopped:  # there are no threads any more
            made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            try:
                made.set_result(call())
            except Exception as error:
                made.set_exception(error)
            self._made(trip, i, made)
        elif isinstance(call, CCall) and (crew := self._crew_at_hand()) is not None:
            self._trips[call] = trip
            crew.put(call)
        else:
            self._threads.do(call).add_done_callback(partial(self._made, trip, i))

    def _made(self, trip: _Trip, i: int, made: "asyncio.Future[Any]") -> None:
        error = made.exception()
        if error is not None:
            trip.error = error
        else:
            trip.made[i] = made.result()
        self._one_less(trip)

    def _one_less(self, trip: _Trip) -> None:
        trip.num_left -= 1
        if not trip.num_left:
            self._go(trip)
            self._begin()

    def _crew_at_hand(self) -> Crew | None:
        if self._crew is None and self._start is not None:
            bell = Bell(self._hear)
            try:
                self._crew, self._bell = self._start(self._num, bell.fd), bell
            except OSError:  # no bell, or no threads
                self._start = None
                bell.close()
        return self._crew

    def _hear(self) -> None:
        if self._crew is not None:
            self._go_on(self._crew.made())

    def _go_on(self, made: list[CCall]) -> None:
        for call in made:
            self._one_less(self._trips.pop(call))
