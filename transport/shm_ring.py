"""Slots of memory that two processes of one host share, for payloads on their way.

    free      the prefill end may lend it
    lent      somebody builds a payload in it; dropped unsent, it is free again
    posted    its number has been told to the decode end, which alone gives it back

The memory has no name and no file: it is passed over a socket and gone with the last process that
has it, whatever becomes of them. It cannot shrink, so no reader can be cut off within a read.
"""

import asyncio
import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Self

import numpy as np
from numpy.typing import NDArray

NUM_SLOTS = 16
SLOT_BYTES = 4 << 20  # what nobody writes to takes no memory

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ShmRing:
    """The memory, in one of the two processes."""

    def __init__(self, memory: mmap.mmap) -> None:
        bytes_NC = np.frombuffer(memory, dtype=np.uint8)
        self._slots = bytes_NC.reshape(NUM_SLOTS, SLOT_BYTES)

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """A ring, and the descriptor to pass on and then to close."""
        fd = os.memfd_create("kvferry-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, NUM_SLOTS * SLOT_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(mmap.mmap(fd, NUM_SLOTS * SLOT_BYTES)), fd
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, fd: int) -> Self:
        """Takes `fd` over. Raises ValueError when it is not a ring that we could trust."""
        try:
            if os.fstat(fd).st_size != NUM_SLOTS * SLOT_BYTES:
                raise ValueError(f"a ring of {os.fstat(fd).st_size} bytes")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("a ring that may shrink")
            return cls(mmap.mmap(fd, NUM_SLOTS * SLOT_BYTES))
        finally:
            os.close(fd)

    def view(self, slot: int, num_bytes: int) -> NDArray[np.uint8]:
        return self._slots[slot, :num_bytes]


class Lender:
    """The prefill end: who has which slot. On the event loop, but for what is dropped."""

    def __init__(self, ring: ShmRing) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._free = list(range(NUM_SLOTS))
        self._lent: dict[int, int] = {}  # slot by the identity of its view
        self._posted: set[int] = set()
        self._freed = asyncio.Event()

    def lend_now(self, num_bytes: int) -> memoryview | None:
        """A slot, if one is free; it is free again when the view is dropped, unless posted."""
        if not self._free:
            return None
        slot = self._free.pop()  # the last one given back: most likely still in a cache
        view = self._ring.view(slot, num_bytes)
        self._lent[id(view)] = slot
        weakref.finalize(view, self._dropped, id(view)).atexit = False
        return view.data

    async def lend(self, num_bytes: int) -> memoryview:
        """As soon as one is free."""
        while (room := self.lend_now(num_bytes)) is None:
            self._freed.clear()
            await self._freed.wait()
        return room

    def has_lent(self, payload: memoryview) -> bool:
        return id(payload.obj) in self._lent and payload.nbytes == payload.obj.nbytes  # type: ignore[attr-defined]

    def post(self, payload: memoryview) -> int:
        """The slot that `payload` was lent in; from now on it is the other end's."""
        assert self.has_lent(payload), "a payload that was not built in a slot"
        slot = self._lent.pop(id(payload.obj))
        self._posted.add(slot)
        return slot

    def give_back(self, slot: int) -> bool:
        """Whether the slot was posted, so that its reader may give it back."""
        if slot not in self._posted:
            return False
        self._posted.remove(slot)
        self._put(slot)
        return True

    def check(self) -> None:
        slots = sorted([*self._free, *self._lent.values(), *self._posted])
        assert slots == list(range(NUM_SLOTS)), f"slots {slots}"

    def _dropped(self, view_id: int) -> None:
        """Any thread: the last look at a view is over."""
        slot = self._lent.pop(view_id, None)
        if slot is not None:
            call_soon(self._loop, lambda: self._put(slot))

    def _put(self, slot: int) -> None:
        self._free.append(slot)
        self._freed.set()


def call_soon(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> None:
    """From any thread, also at the very end, when there is nobody left to call."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what)
