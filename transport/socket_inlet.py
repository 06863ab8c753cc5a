"""One payload on its way out of a socket, told before it is read."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from transport.link import LinkClosed, heed

if TYPE_CHECKING:
    from transport.frame_reader import FrameReader

T = TypeVar("T")


class Work(Generic[T]):
    """One call for the thread that reads, and what the loop is told of it."""

    def __init__(self, call: Callable[[], T], future: "asyncio.Future[T]") -> None:
        self.future = future
        self._call = call
        self._result: T | None = None
        self._error: BaseException | None = None
        future.add_done_callback(heed)

    def run(self) -> None:
        """On the thread."""
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def fail(self, error: BaseException) -> None:
        """Instead."""
        self._error = error

    def settle(self) -> None:
        """On the loop."""
        if self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._result)  # type: ignore[arg-type]


class SocketInlet:
    """See `transport.link.Inlet`. `take` and the coming of the payload may be in either order."""

    def __init__(self, reader: "FrameReader", num_bytes: int) -> None:
        self.nbytes = num_bytes
        self.left = num_bytes
        self._reader = reader
        self._lock = threading.Lock()
        self._taken = False
        self._work: Work[Any] | None = None  # until it has begun
        self._come = False  # the payload is next, and the thread has left it to the loop

    # on the loop

    def take(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        assert not self._taken, "a payload is read once"
        self._taken = True
        return self._reader.take_in(self, work)

    def stage(self, views: Sequence[memoryview]) -> "asyncio.Future[None]":
        return self.take(partial(self._stage, views))

    def skip(self) -> None:
        if not self._taken:
            self.take(_nothing)

    def withdraw(self, reason: str) -> None:
        with self._lock:
            work = self._work
            if work is None:  # it has begun, or nothing was to
                return
            self._work = Work(_nothing, work.future)
        work.fail(LinkClosed(reason))
        work.settle()

    def give(self, work: Work[Any]) -> bool:
        """Whether the payload is next, and a thread is to be called for it."""
        with self._lock:
            self._work = work
            return self._come

    def come(self) -> bool:
        """The payload is next. Whether it is known what to do with it."""
        with self._lock:
            self._come = True
            return self._work is not None

    # on the thread

    def begin(self) -> Work[Any] | None:
        """As `come`, and what to do begins. None when it is not known."""
        with self._lock:
            work, self._work, self._come = self._work, None, True
            return work

    @property
    def fd(self) -> int:
        return self._reader.fd

    def piece(self, num_bytes: int) -> NDArray[np.uint8]:
        return self._reader.piece(num_bytes)

    def came(self, num_bytes: int) -> None:
        self._reader.num_bytes += self.left - (self.nbytes - num_bytes)
        self.left = self.nbytes - num_bytes

    def room(self, num_bytes: int) -> memoryview:
        return self._reader.staging.take(num_bytes)

    def _stage(self, views: Sequence[memoryview]) -> None:
        self._reader.read(views)
        self.left = 0


def _nothing() -> None:
    """All of it is left, and lost."""
