"""Threads that work for the event loop: calls that block, or that compute without Python's lock."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Threads:
    """`num` of them, that take one call after another, in order.

    What is done is told to the loop all at once: waking it costs more than most of what it then
    does. Each thread is started when first needed.
    """

    def __init__(self, num: int, name: str) -> None:
        self._num = num
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._told = False  # that the loop is to settle what is done
        self._threads: list[threading.Thread] = []
        self.num_waiting = 0  # calls that are not done, as far as the loop knows

    def do(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """The result of `work`. One that is cancelled is called all the same, unless it stops."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
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
            if not self._told and self._loop is not None:
                self._told = True
                with contextlib.suppress(RuntimeError):  # the loop has closed
                    self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        self._told = False  # first: what is done from here on may be missed below
        while self._done:
            future, result, error = self._done.popleft()
            self.num_waiting -= 1
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
