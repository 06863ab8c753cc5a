"""What is kept of blocks, entered and compared row by row without numpy's many small calls.

`kept_rows.c` is compiled at first use. Whoever calls it has just digested or moved some MiB, so
Python is in no cache, and each call of numpy costs several times what it usually does
(docs/performance.md). Where there is no compiler, `load` answers None.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import loaded

SOURCE = Path(__file__).with_suffix(".c")


class _Rows(ctypes.Structure):
    """See kept_rows.c."""

    _fields_ = [
        ("digests", ctypes.c_void_p),
        ("digest_stride", ctypes.c_int64),
        ("known", ctypes.c_void_p),
        ("known_stride", ctypes.c_int64),
        ("written", ctypes.c_void_p),
        ("num_planes", ctypes.c_int64),
    ]


class KeptRows:
    """Of all layers: `digests` [N, H, P] and `known` [N, H] of each, and written_N. The caller sees
    that nobody else is at them, that `ids` are blocks, that `layers` are numbers of theirs, from 0,
    and that heads are a run from `lo` up to `hi`.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        digests: Sequence[NDArray[np.uint64]],
        known: Sequence[NDArray[np.bool_]],
        written_N: NDArray[np.uint32],
    ) -> None:
        assert all(own_NHP.flags.c_contiguous for own_NHP in digests)
        assert all(own_NH.strides[1] == 1 for own_NH in known) and written_N.flags.c_contiguous
        self._arrays = (list(digests), list(known), written_N)  # which `_rows` points at
        self._rows = (_Rows * len(digests))(
            *(
                _Rows(
                    own_NHP.ctypes.data,
                    own_NHP[0].size,
                    own_NH.ctypes.data,
                    own_NH.strides[0],
                    written_N.ctypes.data,
                    own_NHP.shape[2],
                )
                for own_NHP, own_NH in zip(digests, known, strict=True)
            )
        )
        self._at = ctypes.addressof(self._rows)
        self._forget, self._keep = library.forget_rows, library.keep_rows
        self._compare, self._known = library.compare_rows, library.known_rows

    def _of(self, layer: int) -> int:
        return self._at + layer * ctypes.sizeof(_Rows)

    def forget(self, layers: range, ids: NDArray[np.int64], lo: int, hi: int) -> None:
        """They are not known any more, and count as written."""
        self._forget(self._of(layers[0]), len(layers), ids.ctypes.data, len(ids), lo, hi)

    def keep(
        self,
        layers: range,
        ids: NDArray[np.int64],
        lo: int,
        hi: int,
        found: NDArray[np.uint64],
        good: NDArray[np.bool_] | None,
    ) -> None:
        """They count as written, and `found` is known of what is `good` [layers, blocks, heads];
        all, if None. Both are dense.
        """
        at = None if good is None else good.ctypes.data
        where = (self._of(layers[0]), len(layers), ids.ctypes.data, len(ids), lo, hi)
        self._keep(*where, found.ctypes.data, at)

    def known(
        self, layers: range, ids: NDArray[np.int64], lo: int, hi: int, found: NDArray[np.uint64]
    ) -> bool:
        """Whether all of them are known; `found`, dense, then has what is kept."""
        where = (self._of(layers[0]), len(layers), ids.ctypes.data, len(ids), lo, hi)
        return bool(self._known(*where, found.ctypes.data))

    def compare(
        self,
        layer: int,
        ids: NDArray[np.int64],
        lo: int,
        hi: int,
        found: NDArray[np.uint64],
        written: NDArray[np.uint32],
    ) -> bool:
        """Whether `found` is what is known of all, or is known from now on, since nothing was and
        none was written since `written`. If not, nothing has changed. Both are dense.
        """
        at = found.ctypes.data, written.ctypes.data
        return bool(self._compare(self._of(layer), ids.ctypes.data, len(ids), lo, hi, *at))


class Maker(NamedTuple):
    """The compiled functions."""

    library: ctypes.CDLL

    def rows(
        self,
        digests: Sequence[NDArray[np.uint64]],
        known: Sequence[NDArray[np.bool_]],
        written_N: NDArray[np.uint32],
    ) -> KeptRows:
        return KeptRows(self.library, digests, known, written_N)


@functools.cache
def load() -> Maker | None:
    """The compiled functions, or None where they cannot be had."""
    address, count = ctypes.c_void_p, ctypes.c_int64
    blocks = [address, count, count, count]
    layers = [address, count, *blocks]
    return loaded(
        SOURCE,
        signatures={
            "forget_rows": (None, layers),
            "keep_rows": (None, [*layers, address, address]),
            "compare_rows": (ctypes.c_int, [address, *blocks, address, address]),
            "known_rows": (ctypes.c_int, [*layers, address]),
        },
        make=Maker,
        otherwise="digests are kept by numpy, slower",
        keeps_lock=True,
    )
