"""Cells on their way out of live blocks into a socket.

Those whose digests are known leave from where they lie, and nobody looks at them on the way; others
pass through a room that stays in a cache. All that can be is made ready before: the thread that
pours sends nothing while it is in Python.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kernels.host_cells import HostCells
from kvcache.cell_places import HeadRun

PATIENCE_MS = 5  # for a socket to take more, before what is left is gathered all at once


class CellPourer:
    """Of some layers, as `CellReader.pourer` made it. Belongs to one thread at a time.

    num_bytes    of the pieces that leave through the socket
    room_bytes   of the room that `pour` is to be given
    known        whether the digests are, before a cell is read
    digests      [cells], layer by layer; those of the cells that have left, so far
    """

    def __init__(
        self,
        host: HostCells,
        run: HeadRun,
        ids_B: NDArray[np.int64],
        tail_slots: int,
        piece_blocks: int,
        known: NDArray[np.uint64] | None,
        compare: Callable[[NDArray[np.uint64]], None],
    ) -> None:
        """`known` are the digests, if all are known; else `compare` hears of them once all has
        left.
        """
        self._host = host
        self._run = run
        self._ids_B = ids_B
        self._tail_slots = tail_slots
        self._piece_blocks = min(piece_blocks, len(ids_B))
        self._compare = compare
        self.known = known is not None
        num_blocks = len(run.pools) * len(ids_B)  # in all layers
        self.digests = np.zeros(num_blocks * run.num_cells, np.uint64) if known is None else known
        self.proved = True  # that digests are made: else they are 0, to see what they cost
        width = run.block_bytes + 8 * run.num_cells
        self.num_bytes = num_blocks * width
        self.room_bytes = self._piece_blocks * width

    def pour(self, fd: int, head: bytes, room: NDArray[np.uint8], seal: int | None = None) -> int:
        """Send `head` through the socket `fd`, and then a piece at a time: the digests of some
        blocks, u64 each, then their cells. Behind those that are `known` comes the `seal`, a u64.

        Returns how many bytes have left: not all where the socket takes no more for some
        milliseconds, so that the blocks are not held by who reads slowly: then all is to be
        gathered once more, for what is left. Raises OSError, and BlockRotten when all has left.
        """
        assert room.nbytes >= self.room_bytes, f"{room.nbytes} bytes for {self.room_bytes}"
        assert self.known == (seal is not None), "a seal is over digests that are known"
        run = self._run
        blocks = (run.pools, run.layout, self._ids_B, self._tail_slots, self._piece_blocks)
        if seal is not None:
            return self._host.send(fd, head, *blocks, room, PATIENCE_MS, self.digests, seal)
        digests = self.digests if self.proved else None
        gone = self._host.pour(fd, head, *blocks, room, PATIENCE_MS, digests)
        if gone == len(head) + self.num_bytes and self.proved:
            self._compare(self.digests)
        return gone
