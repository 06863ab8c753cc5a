"""Who reads the blocks of a shipment, and when nobody does any more."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class Readers:
    """Threads enter before they read and leave after; once closed, nobody enters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self._closed = False
        self._num_inside = 0

    def enter(self) -> bool:
        """Whether the blocks may be read, until `leave`."""
        with self._lock:
            self._num_inside += not self._closed
            return not self._closed

    def leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            last = self._closed and not self._num_inside
        if last:
            self._loop.call_soon_threadsafe(self._gone.set)

    @contextlib.contextmanager
    def inside(self) -> Iterator[bool]:
        entered = self.enter()
        try:
            yield entered
        finally:
            if entered:
                self.leave()

    def shut(self) -> bool:
        """Let nobody in any more. Whether nobody is inside."""
        with self._lock:
            self._closed = True
            return not self._num_inside

    async def close(self) -> None:
        """Returns when nobody reads, nor ever will."""
        if not self.shut():
            await self._gone.wait()
