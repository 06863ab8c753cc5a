"""How a thread wakes the event loop and goes on."""

import asyncio
import contextlib
import ctypes
import functools
import os
from collections.abc import Callable


class Bell:
    """Calls `answer` on the loop soon after any thread has rung, once for all that rang before.

    `call_soon_threadsafe` gives up the interpreter's lock while it wakes the loop, so that the loop
    takes it, and the thread waits for all that the loop then does. Who rings keeps the lock until
    it lets go of it by itself.
    """

    def __init__(self, answer: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._answer = answer
        self._rung = False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if _write() else -1
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._hear)

    @property
    def fd(self) -> int:
        """An eventfd, for who rings it without us; -1 where there is none."""
        return self._fd

    def ring(self) -> None:
        """Any thread, until it is closed."""
        if self._rung:
            return
        self._rung = True
        write = _write()
        if write is not None:
            write(self._fd, 1)
            return
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(self._hear)

    def close(self) -> None:
        """On the loop, when nobody rings any more."""
        if self._fd < 0:
            return
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1

    def _hear(self) -> None:
        if self._fd >= 0:
            os.eventfd_read(self._fd)
        self._rung = False  # first: what is done from here on may be missed by `answer`
        self._answer()


@functools.cache
def _write() -> Callable[[int, int], int] | None:
    """Of an eventfd, with the interpreter's lock held; None where there is none."""
    write: Callable[[int, int], int] | None = getattr(ctypes.PyDLL(None), "eventfd_write", None)
    if write is not None and hasattr(os, "eventfd"):
        write.argtypes = [ctypes.c_int, ctypes.c_uint64]  # type: ignore[attr-defined]
        return write
    return None
