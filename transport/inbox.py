"""Notes from the engine's thread to the event loop: in order, and without waiting for it."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from transport.orders import FirstToken
from transport.sealed_runs import Run


@dataclass(frozen=True, slots=True)
class Sealed:
    request_key: int
    run: Run


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more of this request will be sealed."""

    request_key: int
    first_tokens: tuple[FirstToken, ...]


Note = Sealed | Finished


class Inbox:
    """Any thread may `put`; the loop reads. One wake-up serves every note put before it runs."""

    def __init__(self, read: Callable[[Note], None]) -> None:
        self._read = read
        self._notes: deque[Note] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rung = False

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._read_all)

    def close(self) -> None:
        """Notes put from now on are never read."""
        self._loop = None
        self._notes.clear()

    def put(self, note: Note) -> None:
        self._notes.append(note)
        loop = self._loop
        if loop is not None and not self._rung:
            self._rung = True
            loop.call_soon_threadsafe(self._read_all)

    def _read_all(self) -> None:
        self._rung = False  # before reading: a note put while we read rings again or is seen
        while self._notes:
            self._read(self._notes.popleft())
