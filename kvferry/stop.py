"""Being told to stop, by a signal."""

import asyncio
import os
from collections.abc import Callable

SAME_SIGNAL_S = 0.5


class Stop:
    """A signal handler: the first calls `begin`, another one ends the process at once.

    One in the same moment is the same one: `timeout` and others tell a process and its group.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, begin: Callable[[], object]) -> None:
        self._loop = loop
        self._begin = begin
        self._told_at: float | None = None

    @property
    def told(self) -> bool:
        return self._told_at is not None

    def __call__(self) -> None:
        if self._told_at is None:
            self._told_at = self._loop.time()
            self._begin()
        elif self._loop.time() > self._told_at + SAME_SIGNAL_S:
            os._exit(130)
