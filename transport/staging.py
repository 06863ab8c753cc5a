"""Memory for payloads, used again."""

import contextlib
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvcache import host_memory


class Staging:
    """Buffers for payloads, used again once nobody looks at them any more.

    Fresh memory costs a page fault for every 4 KiB, more than copying them does.
    """

    def __init__(self, max_kept: int = 4) -> None:
        self._kept: deque[NDArray[np.uint8]] = deque(maxlen=max_kept)

    def take(self, num_bytes: int) -> memoryview:
        buffer = self._fitting(num_bytes)
        view = buffer[:num_bytes]
        weakref.finalize(view, self._kept.append, buffer).atexit = False
        return view.data

    def _fitting(self, num_bytes: int) -> NDArray[np.uint8]:
        with contextlib.suppress(IndexError):
            buffer = self._kept.pop()
            if num_bytes <= buffer.nbytes:
                return buffer
        return host_memory.buffer(num_bytes)
