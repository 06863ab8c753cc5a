"""Memory that other processes of this host may read and nobody but its owner can write.

It has no name and no file: whoever is passed the descriptor maps it, and it is gone with the last
process that has it. It cannot shrink, so no reader is cut off within a read; and once its owner has
mapped it, nobody else can have it mapped for writing.
"""

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from typing import Self

import numpy as np
from numpy.typing import NDArray

EXTENT = 2 << 20  # of a huge page, and the alignment it needs in memory as in the file
SEAL_FUTURE_WRITE, COLLAPSE = 0x10, 25  # of fcntl(2) and madvise(2); Python has no names for them
FIXED = 0x10  # of mmap(2)


class SharedMemory:
    """As one process sees it: the owner, or a reader."""

    def __init__(self, fd: int, array: NDArray[np.uint8]) -> None:
        self.fd = fd  # to be passed on; closed with this object
        self.array = array
        self._small = np.ones(array.nbytes // EXTENT, np.bool_)  # extents in small pages
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """Zeros, which take no memory until they are written. Raises OSError, or AttributeError on
        a system that has no such memory.
        """
        fd = os.memfd_create("kvferry-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            array = _map(fd, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return cls(fd, array)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, fd: int, num_bytes: int) -> Self:
        """To read. Takes `fd` over; raises ValueError when it is not `num_bytes` that will stay."""
        try:
            if os.fstat(fd).st_size != num_bytes:
                raise ValueError(f"memory of {os.fstat(fd).st_size} bytes, not {num_bytes}")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("memory that may shrink")
            return cls(fd, _map(fd, num_bytes, mmap.PROT_READ))
        except BaseException:
            os.close(fd)
            raise

    def settle(self, offsets: NDArray[np.int64]) -> None:
        """Put the extents around these bytes into huge pages, where the system has them: once for
        each. The system does it by itself for memory of one process only.
        """
        extents = offsets // EXTENT
        extents = np.unique(extents[extents < len(self._small)])
        with self._lock:
            extents = extents[self._small[extents]]
            self._small[extents] = False
        for extent in extents.tolist():
            address = ctypes.c_void_p(self.array.ctypes.data + extent * EXTENT)
            _libc().madvise(address, ctypes.c_size_t(EXTENT), COLLAPSE)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _map(fd: int, num_bytes: int, protection: int) -> NDArray[np.uint8]:
    """The whole of it, at an address that huge pages can have: `mmap.mmap` gives any."""
    libc = _libc()
    libc.mmap.restype = ctypes.c_void_p
    size, nowhere = ctypes.c_size_t(num_bytes + EXTENT), ctypes.c_void_p(None)
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found = libc.mmap(nowhere, size, 0, reserve, -1, ctypes.c_long(0))
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "no room to map shared memory")
    address = -(-found // EXTENT) * EXTENT
    flags = mmap.MAP_SHARED | FIXED
    at, length = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
    mapped = libc.mmap(at, length, protection, flags, fd, ctypes.c_long(0))
    if mapped != address:
        error = ctypes.get_errno()
        libc.munmap(ctypes.c_void_p(found), size)
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(memory, libc.munmap, ctypes.c_void_p(found), size).atexit = False
    array = np.ctypeslib.as_array(memory)
    array.flags.writeable = bool(protection & mmap.PROT_WRITE)
    return array
