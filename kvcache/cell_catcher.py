"""Cells on their way from a socket into live blocks, past a room that stays in a cache.

They come in pieces of some blocks each, and are verified and written piece by piece, in turns of a
few milliseconds: between two of them whoever drives it may stop, and nothing is written any more.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.host_cells import HostCells
from kvcache.cell_places import HeadRun
from kvcache.kept_digests import KeptDigests

TURN_MS = 10  # before who drives it is asked whether to go on


class _Keeper(NamedTuple):
    kept: KeptDigests
    layers: range
    local_heads: Sequence[int]
    touched: NDArray[np.int64]  # blocks of the pool
    whole: bool  # else parts of blocks come, of which no digests are kept


class CellCatcher:
    """Of some layers, as `CellWriter.catcher` made it. Belongs to one thread at a time.

    num_bytes    that come through the socket
    room_bytes   of the room that each turn is to be given, the same one
    digests      [cells], layer by layer; those that came, so far
    seal         what came after the last cell, where digests come
    """

    def __init__(
        self,
        host: HostCells,
        run: HeadRun,
        ids_B: NDArray[np.int64],
        piece_blocks: int,
        digests: NDArray[np.uint64] | None,
    ) -> None:
        """`digests` are given, or come before their cells."""
        self._host = host
        self._run = run
        self._ids_B = ids_B
        self._piece_blocks = min(piece_blocks, len(ids_B))
        self._led = digests is None
        num_blocks = len(run.pools) * len(ids_B)  # in all layers
        self._bad = np.zeros(num_blocks * run.num_cells, np.bool_)
        self._seal = np.zeros(1, np.uint64)
        self._keeper: _Keeper | None = None
        self.digests = np.zeros(len(self._bad), np.uint64) if digests is None else digests
        self.proved = True  # that cells are compared with their digests: else to see what it costs
        self.num_taken = 0
        width = run.block_bytes + 8 * run.num_cells * self._led
        self.num_bytes = num_blocks * width + 8 * self._led
        self.room_bytes = self._piece_blocks * width

    def keep_in(
        self,
        kept: KeptDigests,
        layers: range,
        local_heads: Sequence[int],
        touched: NDArray[np.int64],
        whole: bool,
    ) -> None:
        """The digests of these blocks of the pool are kept, of `whole` ones those that come."""
        self._keeper = _Keeper(kept, layers, local_heads, touched, whole)

    @property
    def seal(self) -> int:
        return int(self._seal[0])

    def turn(self, fd: int, room: NDArray[np.uint8]) -> bool:
        """Write what comes within some milliseconds; whether all has come. Raises OSError."""
        if not self.num_taken:
            self.forget()
        self.num_taken = self._host.catch(
            fd,
            self._run.pools,
            self._run.layout,
            self._ids_B,
            self._piece_blocks,
            room,
            self.num_taken,
            TURN_MS,
            self._led,
            self.proved,
            self.digests,
            self._bad,
            self._seal,
        )
        return self.num_taken == self.num_bytes

    def bad_rows(self) -> NDArray[np.intp]:
        """The cells that are not what their digests say, and are not written."""
        return np.flatnonzero(self._bad)

    def keep(self) -> None:
        """All has come, and the digests are those that were sent."""
        if self._keeper is None or not self._keeper.whole:
            self.forget()
            return
        kept, layers, heads, ids_B, _ = self._keeper
        shape, good_LBH = (len(layers), len(ids_B), len(heads), -1), None
        if self._bad.any():
            good_LBH = np.asarray(~self._bad.reshape(shape).any(axis=3))
        kept.keep(layers, ids_B, heads, self.digests.reshape(shape), good_LBH)

    def forget(self) -> None:
        """The blocks are about to be written, or have been, and nobody knows with what."""
        if self._keeper is not None:
            kept, layers, heads, ids_B, _ = self._keeper
            kept.forget_cells(layers, ids_B, heads)
