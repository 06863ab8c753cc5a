"""Cells out of a pool, as raw bytes in one order, and their digests.

Whatever is read whole is held against the digests that were kept of it, or has them kept from then
on. Of parts of blocks none are kept.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.crew import Steps, at_once, together
from kernels.gather_blocks import gather_cells
from kernels.host_cells import HostCells
from kvcache.cell_places import CellPlaces, by_block
from kvcache.cell_pourer import CellPourer
from kvcache.cells import cell_digests
from kvcache.device_cells import DeviceCells
from kvcache.kept_digests import BlockRotten, KeptDigests
from kvcache.settled_blocks import SettledBlocks


class CellReader:
    """Reads the cells of `places`: by `host` or `on_device`, or else by torch."""

    def __init__(
        self,
        places: CellPlaces,
        kept: KeptDigests,
        host: HostCells | None,
        on_device: DeviceCells | None,
        settled: SettledBlocks | None,
    ) -> None:
        self._places = places
        self._kept = kept
        self._host = host
        self._on_device = on_device
        self._settled = settled
        self._noters: dict[int, Callable[[Sequence[int]], None]] = {}  # by layer

    def gather_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
        out: NDArray[np.uint8] | None = None,
        digests: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.uint8]:
        """A copy of the cells of `heads` (ascending) in `block_ids`: [num_cells, cell_bytes].

        With `tail_tokens`, only so many slots of the last block have meaning, and the rest of it
        comes out zero, so that equal tokens give equal digests. `out` takes the cells, as many
        bytes as they are; else they come in memory of their own. `digests` [num_cells] takes
        their digests, made on the way; whole blocks are then held against the digests that were
        kept of them, and BlockRotten is raised for those that have changed.
        """
        places, host = self._places, self._host
        runs, ids_B = places.local_runs(heads), places.checked(block_ids)
        compare = self._comparison(layer, ids_B, heads, tail_tokens)
        pool_NPHSD, cell_bytes = places.layers[layer], places.cell_bytes(layer)
        shape = (len(ids_B), len(heads), pool_NPHSD.shape[1], cell_bytes)
        if out is None:
            out = np.empty(shape, dtype=np.uint8)
        cells_BHPC = out.reshape(shape)
        digests_BN = by_block(digests, shape)
        if host is not None:
            address, stride = pool_NPHSD.data_ptr(), cells_BHPC.strides[0]
            for layout, taken, first in places.layouts(layer, runs):
                own_BN = None if digests_BN is None else digests_BN[:, first:]
                host.gather(address, layout, ids_B, cells_BHPC[:, taken:], stride, own_BN)
        elif self._on_device is not None:
            self._on_device.gather(layer, pool_NPHSD, block_ids, runs, places.parts, cells_BHPC)
        else:
            self._gather_by_torch(layer, ids_B, runs, cells_BHPC)
        if tail_tokens is not None and len(block_ids):
            slot_bytes = cell_bytes // places.spec.block_size
            cells_BHPC[-1, :, :, tail_tokens * slot_bytes :] = 0
            if digests_BN is not None and host is not None:  # they were made before
                digests_BN[-1] = cell_digests(cells_BHPC[-1].reshape(-1, cell_bytes))
        if digests is not None:
            if host is None:
                digests[:] = cell_digests(cells_BHPC.reshape(-1, cell_bytes))
            compare(digests)
        return cells_BHPC.reshape(-1, cell_bytes)

    def _gather_by_torch(
        self,
        layer: int,
        ids_B: NDArray[np.int64],
        runs: Sequence[tuple[int, int]],
        cells_BHPC: NDArray[np.uint8],
    ) -> None:
        pool_NPHSD, taken = self._places.layers[layer], 0
        block_ids_B = torch.from_numpy(ids_B).to(pool_NPHSD.device)
        for lo, hi in runs:
            run_BHPSD = gather_cells(pool_NPHSD, block_ids_B, (lo, hi), self._places.parts)
            into_BHPC = cells_BHPC[:, taken : taken + hi - lo]
            into_BHPC[...] = run_BHPSD.view(torch.uint8).numpy().reshape(into_BHPC.shape)
            taken += hi - lo

    def pourer(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None,
        piece_blocks: int,
        *,
        suspect: bool = False,
    ) -> CellPourer | None:
        """What sends the cells that `gather_cells` would give of each of these layers through a
        socket, `piece_blocks` at a time; None where it cannot be done so. They are sent while they
        are gathered; or from where they lie, if their digests are known, and they are not
        `suspect`.
        """
        run, ids_B = self._places.head_run(layers, heads), self._places.checked(block_ids)
        if self._host is None or run is None or not len(ids_B):
            return None
        where = (ids_B, heads, tail_tokens)
        known = None if suspect else self._known(layers, *where)
        compares = [self._comparison(layer, *where) for layer in layers if known is None]
        blocks = (ids_B, tail_tokens or 0, piece_blocks)
        return CellPourer(self._host, run, *blocks, known, _each(compares))

    def digesting(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
    ) -> Steps[NDArray[np.uint64]]:
        """The digests that `gather_cells` would make of each of these layers, which are alike,
        [num_cells], for who reads the cells itself and holds them against these. What is kept of
        whole blocks is not made anew.
        """
        ids_B, settled = self._places.checked(block_ids), self._settled
        whole_B = self._places.whole_ids(ids_B)
        if settled is not None and not all(settled.hold(layer, whole_B) for layer in layers):
            yield [partial(settled.settle, layer, whole_B) for layer in layers]
        known = self._known(layers, ids_B, heads, tail_tokens)
        if known is not None:
            return known
        fresh = [self._fresh(layer, ids_B, heads, tail_tokens) for layer in layers]
        return np.concatenate((yield from together(fresh)))

    def prove_blocks(self, layer: int, block_ids: Sequence[int], heads: Sequence[int]) -> None:
        """Read these whole blocks: raises BlockRotten for those that are not what is kept of them.
        For who goes on to read parts of them, of which nothing is kept.
        """
        at_once(self._fresh(layer, self._places.checked(block_ids), heads, None))

    def known_digests(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
    ) -> NDArray[np.uint64] | None:
        """As `digesting`, if that takes but a moment: of whole blocks those that are kept, and
        only a tail is read. None if some are not.
        """
        ids_B = self._places.checked(block_ids)
        return self._known(range(layer, layer + 1), ids_B, heads, tail_tokens)

    def note_cells(self, layer: int, block_ids: Sequence[int]) -> None:
        """These blocks have just been written, whole, and lie in a cache still: what they hold is
        kept from now on, and costs nobody another look. Nothing where that is a device's work.
        """
        if self._host is None or self._places.parts > 1:
            return
        num_blocks = self._places.num_blocks
        assert min(block_ids) >= 0 and max(block_ids) < num_blocks, f"blocks {block_ids}"
        noter = self._noters.get(layer)
        if noter is None:
            noter = self._noters[layer] = self._noter(self._host, layer)
        self._kept.fill(noter, block_ids)

    def _noter(self, host: HostCells, layer: int) -> Callable[[Sequence[int]], None]:
        everything = [(0, len(self._places.kv_heads))]
        ((layout, _, _),) = self._places.layouts(layer, everything)
        return host.noter(self._places.layers[layer].data_ptr(), layout, *self._kept.arrays(layer))

    def _known(
        self, layers: range, ids_B: NDArray[np.int64], heads: Sequence[int], tail_tokens: int | None
    ) -> NDArray[np.uint64] | None:
        """As `known_digests`, one layer after the other, which are alike."""
        if self._places.parts > 1:
            return None
        whole_B = ids_B if tail_tokens is None else ids_B[:-1]
        known_LBHP = self._kept.known(layers, whole_B, self._places.local(heads))
        if known_LBHP is None or tail_tokens is None:
            return None if known_LBHP is None else known_LBHP.reshape(-1)
        tails = [at_once(self._fresh(layer, ids_B[-1:], heads, tail_tokens)) for layer in layers]
        known_LC = known_LBHP.reshape(len(layers), -1)
        return np.concatenate((known_LC, np.stack(tails)), axis=1).reshape(-1)

    def _fresh(
        self, layer: int, ids_B: NDArray[np.int64], heads: Sequence[int], tail_tokens: int | None
    ) -> Steps[NDArray[np.uint64]]:
        """Made now, whatever is kept, and compared with that or kept; of a tail they are not."""
        num_cells, _ = self._places.block(layer, heads)
        digests = np.empty(len(ids_B) * num_cells, dtype=np.uint64)
        if self._host is None:
            where = (layer, ids_B.tolist(), heads, tail_tokens)
            yield [partial(self.gather_cells, *where, digests=digests)]
            return digests
        compare = self._comparison(layer, ids_B, heads, tail_tokens)
        pool, tail = self._places.layers[layer].data_ptr(), tail_tokens or 0
        digests_BN, runs = digests.reshape(len(ids_B), -1), self._places.local_runs(heads)
        yield [
            self._host.digesting(pool, layout, ids_B, tail, digests_BN[:, first:])
            for layout, _, first in self._places.layouts(layer, runs)
        ]
        compare(digests)
        return digests

    def _comparison(
        self, layer: int, ids_B: NDArray[np.int64], heads: Sequence[int], tail_tokens: int | None
    ) -> Callable[[NDArray[np.uint64]], None]:
        """Made before blocks are read, called with the digests of what was read: raises BlockRotten
        for whole blocks whose kept digests are others.
        """
        kept, places = self._kept, self._places
        if places.parts > 1:
            return _nothing
        whole_B = ids_B if tail_tokens is None else ids_B[:-1]
        written_B, local = kept.written(whole_B), places.local(heads)
        shape = (len(ids_B), len(heads), places.layers[layer].shape[1])
        return partial(_compare, kept, layer, whole_B, local, written_B, shape)


def _compare(
    kept: KeptDigests,
    layer: int,
    whole_B: NDArray[np.int64],
    local: Sequence[int],
    written_B: NDArray[np.uint32],
    shape_BHP: tuple[int, int, int],
    digests: NDArray[np.uint64],
) -> None:
    """`digests` are of a tail, too, if one comes behind the blocks that are whole."""
    digests_BHP = digests.reshape(shape_BHP)[: len(whole_B)]
    rotten = kept.compare(layer, whole_B, local, digests_BHP, written_B)
    if rotten:
        raise BlockRotten(rotten, layer)


def _each(
    compares: Sequence[Callable[[NDArray[np.uint64]], None]],
) -> Callable[[NDArray[np.uint64]], None]:
    """Of digests of as many layers: what compares those of each."""

    def compare(digests: NDArray[np.uint64]) -> None:
        for one, own in zip(compares, np.split(digests, len(compares)), strict=True):
            one(own)

    return compare


def _nothing(digests: NDArray[np.uint64]) -> None:
    """None are kept."""
