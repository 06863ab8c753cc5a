"""Memory of the host: pools in pages as large as the system gives, and what is freed is kept.

Cells lie scattered over a pool: with pages of 4 KiB nearly every one costs a walk through the page
tables, which made a gather a quarter slower, and a scatter a third.
"""

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST_BYTES = 4 << 20  # below this there is nothing to gain

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
KEPT_BYTES = 256 << 20  # at the end of the heap
HEAP_BYTES = 32 << 20  # the largest piece that the heap may give, by mallopt(3)


def huge_pages(memory: mmap.mmap) -> mmap.mmap:
    """Asked for, where the system has them; it is the same memory."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As torch.empty, on the host."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LEAST_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(buffer(num_bytes)).view(dtype).view(shape)


def buffer(num_bytes: int) -> NDArray[np.uint8]:
    """As np.empty."""
    if num_bytes < LEAST_BYTES:
        return np.empty(num_bytes, dtype=np.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(huge_pages(memory), dtype=np.uint8)


def keep_freed() -> None:
    """Let this process use again what it frees, and not give it back to the system each time.

    gRPC makes every message anew. Of one of 4 MiB each page would fault again, which took half of
    the time of whoever received it. Without glibc nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, HEAP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
