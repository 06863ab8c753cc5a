"""Memory that the kernel may back with huge pages: a core reads it faster.

A layer's matrices are too small to have whole huge pages to themselves, so they lie side by side.
"""

import ctypes
import math
import sys

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
ADVISE_HUGE = 14  # MADV_HUGEPAGE
LINE = 64  # bytes of a cache
PIECE = 32 << 20  # bytes of memory had at once


def huge(num_floats: int) -> Tensor:
    memory = torch.empty(num_floats)
    first = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    last = (memory.data_ptr() + memory.nbytes) // HUGE_PAGE * HUGE_PAGE
    if last > first and sys.platform == "linux":
        address, count = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
        ctypes.CDLL(None).madvise(address, count, ADVISE_HUGE)
    return memory


class Memory:
    """Many matrices side by side in large pieces, which huge pages may back.

    A piece lives as long as something in it; with pieces of 0 bytes, everything has its own.
    """

    def __init__(self, piece_bytes: int = PIECE) -> None:
        self._piece_bytes = piece_bytes
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        room = -(-num_bytes // LINE) * LINE
        if room > len(self._left):
            self._left = huge(max(self._piece_bytes, room) // 4).view(torch.uint8)
        taken, self._left = self._left[:num_bytes], self._left[room:]
        return taken.view(dtype).view(shape)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.empty(*shape, dtype=dtype).zero_()
