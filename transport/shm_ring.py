"""Slots of memory that two processes of one host share, for payloads on their way.

    free      the prefill end may take it
    taken     a thread builds a payload in it
    posted    its number has been told to the decode end, which alone gives it back

The memory has no name and no file: it is passed over a socket and gone with the last process that
has it, whatever becomes of them. It cannot shrink, so no reader can be cut off within a read.
"""

import fcntl
import mmap
import os
import threading
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvcache.host_memory import huge_pages

NUM_SLOTS = 8
SLOT_BYTES = 8 << 20  # what nobody writes to takes no memory

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
            return cls(huge_pages(mmap.mmap(fd, NUM_SLOTS * SLOT_BYTES))), fd
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
            return cls(huge_pages(mmap.mmap(fd, NUM_SLOTS * SLOT_BYTES)))
        finally:
            os.close(fd)

    def view(self, slot: int, num_bytes: int) -> NDArray[np.uint8]:
        return self._slots[slot, :num_bytes]


class Slots:
    """The prefill end: who has which slot. Any thread."""

    def __init__(self) -> None:
        self._free = list(range(NUM_SLOTS))
        self._taken: set[int] = set()
        self._posted: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False

    def take(self) -> int | None:
        """Waits for a free slot; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                return None
            slot = self._free.pop()  # the last one given back: most likely still in a cache
            self._taken.add(slot)
            return slot

    def post(self, slot: int) -> None:
        """A taken slot is the other end's from now on."""
        with self._changed:
            self._taken.remove(slot)
            self._posted.add(slot)

    def drop(self, slot: int) -> None:
        """A taken slot is not posted after all."""
        with self._changed:
            self._taken.remove(slot)
            self._put(slot)

    def give_back(self, slot: int) -> bool:
        """Whether the slot was posted, so that its reader may give it back."""
        with self._changed:
            if slot not in self._posted:
                return False
            self._posted.remove(slot)
            self._put(slot)
            return True

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def check(self) -> None:
        with self._changed:
            slots = sorted([*self._free, *self._taken, *self._posted])
        assert slots == list(range(NUM_SLOTS)), f"slots {slots}"

    def _put(self, slot: int) -> None:
        self._free.append(slot)
        self._changed.notify()
