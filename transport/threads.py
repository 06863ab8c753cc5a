"""Threads that work for the event loop: calls that block, or that compute without Python's lock."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from transport.bell import Bell

T = TypeVar("T")

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Threads:
    """`num` of them, that take one call after another, in order.

    What is done is told to the loop all at once: waking it costs more than most of what it then
    does. Each thread is started when first needed. With `patient`, a call that others wait behind
    is told when one of these says `tell`, which each must: best where it lets go of the
    interpreter's lock for long, since until then it would wait for all that the loop does.
    """

    def __init__(self, num: int, name: str, *, patient: bool = False) -> None:
        self._num = num
        self._name = name
        self._patient = patient
        self._bell: Bell | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._threads: list[threading.Thread] = []
        self.num_waiting = 0  # calls that are not done, as far as the loop knows

    def do(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """The result of `work`. One that is cancelled is called all the same, unless it stops."""
        if self._loop is None or self._bell is None:
            self._loop, self._bell = asyncio.get_running_loop(), Bell(self._settle)
        if len(self._threads) < self._num:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self.num_waiting += 1
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((work, future))
        return future

    def stop(self) -> None:
        """Returns when every call made so far has returned."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._settle()
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    def tell(self) -> None:
        """On one of the threads: what is done is told to the loop."""
        if self._done and self._bell is not None:
            self._bell.ring()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            result, error = None, None
            try:
                result = work()
            except BaseException as caught:
                error = caught
            self._done.append((future, result, error))
            del job, work, future, result, error  # whoever waits shall be the last to hold them
            if not self._patient or self._jobs.empty():
                self.tell()

    def _settle(self) -> None:
        while self._done:
            future, result, error = self._done.popleft()
            self.num_waiting -= 1
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
