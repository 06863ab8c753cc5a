"""Threads that work for the event loop: calls that block, or that compute without Python's lock."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from transport.bell import Bell

T = TypeVar("T")

_Job = tuple[Callable[[], Any], "asyncio.Future[Any] | None"]  # None: nobody waits for it


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
        self._left = False
        self.num_waiting = 0  # calls that are not done, as far as the loop knows

    def do(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """The result of `work`. One that is cancelled is called all the same, unless it stops."""
        if self._loop is None or self._bell is None:
            self._loop, self._bell = asyncio.get_running_loop(), Bell(self._settle)
        self._start()
        self.num_waiting += 1
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((work, future))
        return future

    def call(self, work: Callable[[], object]) -> None:
        """As `do`, from any one thread, which does not hear of it. `work` raises nothing."""
        self._start()
        self._jobs.put((work, None))

    def stop(self) -> None:
        """Returns when every call made so far has returned."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._close_bell()

    def tell(self) -> None:
        """On one of the threads: what is done is told to the loop."""
        if self._done and self._bell is not None:
            self._bell.ring()

    def leave(self) -> None:
        """As `stop`, but returns at once. A call that is under way ends by itself; what was not
        called yet never is, and counts as cancelled.
        """
        self._num, self._left = 0, True  # whoever comes too late starts no thread any more
        with contextlib.suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                if job[1] is not None:
                    job[1].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        if not self._threads:
            self._close_bell()

    def _end(self) -> None:
        """On a thread that was left: after the last one nobody rings any more."""
        self._threads.remove(threading.current_thread())
        if not self._threads and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._close_bell)

    def _close_bell(self) -> None:
        self._settle()
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    def _start(self) -> None:
        if len(self._threads) < self._num:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            if future is None:
                work()
                del job, work
                continue
            result, error = None, None
            try:
                result = work()
            except BaseException as caught:
                error = caught
            self._done.append((future, result, error))
            del job, work, future, result, error  # whoever waits shall be the last to hold them
            if not self._patient or self._jobs.empty():
                self.tell()
        if self._left:
            self._end()

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
