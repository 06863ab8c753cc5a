"""The digests of the cells that one rank holds, kept beside its pool to be compared later.

    unknown   the block is being written, or nobody has read all of it since
    kept      as the cells were when they were last gathered, or verified on arrival
    rotten    the cells are not what was kept, and nobody who may has written them

Who writes a block says so before and, where another thread may be reading it, again after. So what
is read meanwhile is neither kept nor held against anybody.

    digests_BHP   of B blocks in one layer: H heads of this rank, P planes
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels import kept_rows

Digests = NDArray[np.uint64]
Ids = Sequence[int] | NDArray[np.int64]


class BlockRotten(Exception):
    """A block is not what it was when it was cached."""

    def __init__(self, block_ids: Sequence[int], layer: int) -> None:
        super().__init__(f"blocks {list(block_ids)} have changed in layer {layer} since cached")
        self.block_ids = tuple(block_ids)


class KeptDigests:
    """Thread-safe. Takes `bytes_per_block` of memory, whether digests are known or not."""

    def __init__(self, num_blocks: int, num_heads: int, num_planes: Mapping[int, int]) -> None:
        """`num_planes` by layer."""
        self._digests = {
            layer: np.zeros((num_blocks, num_heads, planes), np.uint64)
            for layer, planes in sorted(num_planes.items())
        }
        self._place = {layer: place for place, layer in enumerate(self._digests)}
        self._known_NLH = np.zeros((num_blocks, len(num_planes), num_heads), np.bool_)
        self._written = np.zeros(num_blocks, np.uint32)  # how often each block was
        self._lock = threading.Lock()
        made, known = kept_rows.load(), [*self._known_NLH.swapaxes(0, 1)]
        self._rows = made and made.rows([*self._digests.values()], known, self._written)
        arrays = (*self._digests.values(), self._known_NLH, self._written)
        self.bytes_per_block = sum(array[:1].nbytes for array in arrays)

    def forget(self, block_ids: Sequence[int]) -> None:
        """These are about to be written, or have just been."""
        ids = np.asarray(block_ids, dtype=np.int64)
        with self._lock:
            self._written[ids] += 1  # of a block that is named twice once, which is as good
            self._known_NLH[ids] = False

    def forget_cells(self, layers: range, block_ids: Ids, heads: Sequence[int]) -> None:
        """As `forget`, for some cells of these blocks of the pool."""
        ids = np.asarray(block_ids, dtype=np.int64)
        run, places = _run_of(heads), self._places(layers)
        with self._lock:
            if self._rows is not None and run is not None:
                self._rows.forget(places, ids, *run)
                return
            self._written[ids] += 1
            cells = self._cells(ids, heads)
            for place in places:
                self._known_NLH[:, place][cells] = False

    def forget_all(self) -> None:
        self.forget(range(len(self._written)))

    def written(self, block_ids: Ids) -> NDArray[np.uint32]:
        """To be taken before cells are read, for `compare`."""
        return self._written[np.asarray(block_ids, dtype=np.int64)]

    def keep(
        self,
        layers: range,
        block_ids: Ids,
        heads: Sequence[int],
        digests_LBHP: Digests,
        good_LBH: NDArray[np.bool_] | None,
    ) -> None:
        """What was just written into these blocks of the pool had these digests, where it is good;
        None: everywhere. The layers have as many planes, one as the other.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        run, places = _run_of(heads), self._places(layers)
        if self._rows is not None and run is not None:
            with self._lock:
                self._rows.keep(places, ids, *run, digests_LBHP, good_LBH)
            return
        cells = self._cells(ids, heads)
        with self._lock:
            self._written[ids] += 1
            for i, layer in enumerate(layers):
                self._digests[layer][cells] = digests_LBHP[i]
                good = True if good_LBH is None else good_LBH[i]
                self._known_NLH[:, self._place[layer]][cells] = good

    def fill(self, write: Callable[[Sequence[int]], None], block_ids: Sequence[int]) -> None:
        """As `keep`, where `write` enters these blocks into `arrays` itself."""
        with self._lock:
            write(block_ids)

    def arrays(self, layer: int) -> tuple[Digests, NDArray[np.bool_], NDArray[np.uint32]]:
        """Of all blocks: digests_NHP, known_NH and written_N, for `fill` alone."""
        return self._digests[layer], self._known_NLH[:, self._place[layer]], self._written

    def known(self, layers: range, block_ids: Ids, heads: Sequence[int]) -> Digests | None:
        """What was kept of these cells [L, B, H, P], if it is of all of them. The layers have as
        many planes, one as the other.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        run, places = _run_of(heads), self._places(layers)
        num_planes = self._digests[layers[0]].shape[2]
        kept = np.empty((len(layers), len(ids), len(heads), num_planes), np.uint64)
        if self._rows is not None and run is not None:
            with self._lock:
                return kept if self._rows.known(places, ids, *run, kept) else None
        cells = self._cells(ids, heads)
        with self._lock:
            for i, layer in enumerate(layers):
                if not self._known_NLH[:, self._place[layer]][cells].all():
                    return None
                kept[i] = self._digests[layer][cells]
        return kept

    def compare(
        self,
        layer: int,
        block_ids: Ids,
        heads: Sequence[int],
        digests_BHP: Digests,
        written_B: NDArray[np.uint32],
    ) -> list[int]:
        """Those of these blocks of the pool whose cells, just read, are not what was kept. What was
        not known is kept.
        """
        ids, run = np.asarray(block_ids, dtype=np.int64), _run_of(heads)
        if self._rows is not None and run is not None:
            with self._lock:
                if self._rows.compare(self._place[layer], ids, *run, digests_BHP, written_B):
                    return []
        return self._look_closer(layer, ids, heads, digests_BHP, written_B)

    def _look_closer(
        self,
        layer: int,
        ids: NDArray[np.int64],
        heads: Sequence[int],
        digests_BHP: Digests,
        written_B: NDArray[np.uint32],
    ) -> list[int]:
        """As `compare`."""
        place = self._cells(ids, heads)
        known_NH = self._known_NLH[:, self._place[layer]]
        with self._lock:
            known_BH = known_NH[place]
            if not known_BH.any() and np.array_equal(self._written[ids], written_B):
                self._digests[layer][place] = digests_BHP
                known_NH[place] = True
                return []
            here_BHP = self._digests[layer][place]
            if known_BH.all() and np.array_equal(here_BHP, digests_BHP):
                return []
            calm_B1 = (self._written[ids] == written_B)[:, None]
            differ_BH = (here_BHP != digests_BHP).any(axis=2)
            fresh_BH = calm_B1 & ~known_BH
            if fresh_BH.any():
                merged_BHP = np.where(fresh_BH[:, :, None], digests_BHP, here_BHP)
                self._digests[layer][place] = merged_BHP
                known_NH[place] = known_BH | fresh_BH
        rotten: list[int] = ids[(calm_B1 & known_BH & differ_BH).any(axis=1)].tolist()
        return rotten

    def _places(self, layers: range) -> range:
        """Of layers that follow each other, and all have digests."""
        first = self._place[layers[0]]
        assert self._place[layers[-1]] - first == len(layers) - 1, f"layers {list(layers)}"
        return range(first, first + len(layers))

    def _cells(self, ids: NDArray[np.int64], heads: Sequence[int]) -> Any:
        """An index of [blocks, heads]; of all heads by the blocks alone, which is far quicker."""
        if len(heads) == self._known_NLH.shape[2]:
            return ids
        return np.ix_(ids, np.asarray(heads, dtype=np.int64))

    def unknown(self, block_ids: Sequence[int]) -> list[int]:
        """Those of which some cell has no digest yet."""
        ids = np.asarray(block_ids, dtype=np.int64)
        whole_B = self._known_NLH[ids].all(axis=(1, 2))
        blank: list[int] = ids[~whole_B].tolist()
        return blank


def _run_of(heads: Sequence[int]) -> tuple[int, int] | None:
    """From which head up to which they are, if they are one run."""
    if not heads or heads[-1] - heads[0] != len(heads) - 1:
        return None
    return heads[0], heads[-1] + 1
