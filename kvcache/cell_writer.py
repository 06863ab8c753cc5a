"""Cells into a pool, in the order they are gathered: only those that are what their digests say.

What is good of whole blocks is kept as it was proved. What was kept of others that are written is
forgotten before and, as another thread may be reading them, again after.
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.crew import Steps
from kernels.host_cells import HostCells
from kernels.scatter_blocks import scatter_cells
from kvcache.cell_catcher import CellCatcher
from kvcache.cell_places import CellPlaces, by_block
from kvcache.cell_reader import CellReader
from kvcache.cells import bad_cells
from kvcache.device_cells import DeviceCells
from kvcache.kept_digests import KeptDigests
from kvcache.mapped_pool import MappedCells


class CellWriter:
    """Writes the cells of `places`: by `host` or `on_device`, or else by torch. `reader` reads
    them.
    """

    def __init__(
        self,
        places: CellPlaces,
        kept: KeptDigests,
        host: HostCells | None,
        on_device: DeviceCells | None,
        reader: CellReader,
    ) -> None:
        self._places = places
        self._kept = kept
        self._host = host
        self._on_device = on_device
        self._reader = reader

    def scattering(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: bytes | bytearray | memoryview | NDArray[np.uint8],
        digests: NDArray[np.uint64] | None = None,
    ) -> Steps[NDArray[np.intp]]:
        """Write the cells of `heads` (ascending) into `block_ids`, in the order they are gathered.

        With `digests` [num_cells], only the cells that are what these say are written; returned
        are the others, as rows of [num_cells, cell_bytes]. Raises ValueError when `cells` is not
        exactly as many bytes as that.
        """
        ids_B, runs = self._places.checked(block_ids), self._places.local_runs(heads)
        write = self._scatter(layer, ids_B, heads, runs, cells, digests)
        layers = range(layer, layer + 1)
        return (yield from self._noted(layers, ids_B, heads, digests, write))

    def taking(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: MappedCells,
        digests: NDArray[np.uint64] | None = None,
    ) -> Steps[NDArray[np.intp]]:
        """As `scattering`, with the cells of another process's pool, the same blocks of these
        layers, which are alike, whatever becomes of that meanwhile: what is written is what has
        been digested. Of cells that do not lie there, or not in this shape, none is written.
        """
        places, host, ids_B = self._places, self._host, self._places.checked(block_ids)
        (alike_PHSD,) = {places.layers[layer].shape[1:] for layer in layers}
        num_planes, runs = alike_PHSD[0], places.local_runs(heads)
        shape = (len(layers) * len(ids_B), len(heads), num_planes)
        at = {layer: places.at(layer, runs) for layer in layers}
        if host is None or not cells.fit(places.kv_heads.start, at, ids_B):
            return np.arange(math.prod(shape))

        def write() -> Steps[NDArray[np.intp]]:
            proofs_BN = by_block(digests, shape)
            bad_BN = np.zeros((shape[0], shape[1] * shape[2]), dtype=np.bool_)
            yield cells.moves(host, places.kv_heads.start, at, ids_B, proofs_BN, bad_BN)
            return np.flatnonzero(bad_BN)

        return (yield from self._noted(layers, ids_B, heads, digests, write()))

    def catcher(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        piece_blocks: int,
        digests: NDArray[np.uint64] | None = None,
    ) -> CellCatcher | None:
        """What writes the cells of `heads` (ascending) into `block_ids` of each of these layers as
        they come out of a socket, where it can be done so; they come as `pourer` has them sent, and
        then a u64. With `digests` [num_cells], only cells come.
        """
        places = self._places
        run, ids_B = places.head_run(layers, heads), places.checked(block_ids)
        if self._host is None or run is None or not len(ids_B) or piece_blocks < 1:
            return None
        if digests is not None and len(digests) != len(layers) * len(ids_B) * run.num_cells:
            return None
        made = CellCatcher(self._host, run, ids_B, piece_blocks, digests)
        touched, local = places.whole_ids(ids_B), places.local(heads)
        made.keep_in(self._kept, layers, local, touched, places.parts == 1)
        return made

    def _noted(
        self,
        layers: range,
        ids_B: NDArray[np.int64],
        heads: Sequence[int],
        digests: NDArray[np.uint64] | None,
        write: Steps[NDArray[np.intp]],
    ) -> Steps[NDArray[np.intp]]:
        """Have `write` write these cells; it answers which are bad, and what is good is kept."""
        touched, local = self._places.whole_ids(ids_B), self._places.local(heads)
        self._kept.forget_cells(layers, touched, local)
        bad = yield from write
        if digests is None or self._places.parts > 1:
            self._kept.forget_cells(layers, touched, local)
            return bad
        shape, good_LBH = (len(layers), len(ids_B), len(heads), -1), None
        if len(bad):
            good = np.ones(len(digests), np.bool_)
            good[bad] = False
            good_LBH = np.asarray(good.reshape(shape).all(axis=3))
        self._kept.keep(layers, ids_B, local, digests.reshape(shape), good_LBH)
        return bad

    def _scatter(
        self,
        layer: int,
        ids_B: NDArray[np.int64],
        heads: Sequence[int],
        runs: Sequence[tuple[int, int]],
        cells: bytes | bytearray | memoryview | NDArray[np.uint8],
        digests: NDArray[np.uint64] | None,
    ) -> Steps[NDArray[np.intp]]:
        """As `scattering`, of heads that are these `runs`, without noting it."""
        num_planes = self._places.layers[layer].shape[1]
        shape = (len(ids_B), len(heads), num_planes, self._places.cell_bytes(layer))
        raw, want = np.frombuffer(cells, dtype=np.uint8), math.prod(shape)
        if raw.nbytes != want:
            raise ValueError(
                f"{len(ids_B)} blocks of {len(heads)} heads of layer {layer} are {want} bytes, "
                f"not {raw.nbytes}"
            )
        cells_BHPC = raw.reshape(shape)
        if self._host is None:
            where = (layer, ids_B, heads, runs)
            work = partial(self._by_device_or_torch, *where, cells_BHPC, digests)
            bad: NDArray[np.intp] = (yield [work])[0]
            return bad
        return (yield from self._by_host(self._host, layer, ids_B, runs, cells_BHPC, digests))

    def _by_host(
        self,
        host: HostCells,
        layer: int,
        ids_B: NDArray[np.int64],
        runs: Sequence[tuple[int, int]],
        cells_BHPC: NDArray[np.uint8],
        digests: NDArray[np.uint64] | None,
    ) -> Steps[NDArray[np.intp]]:
        num_blocks, num_heads, num_planes, _ = cells_BHPC.shape
        digests_BN = by_block(digests, cells_BHPC.shape)
        bad_BN = np.zeros((num_blocks, num_heads * num_planes), dtype=np.bool_)
        address, stride = self._places.layers[layer].data_ptr(), cells_BHPC.strides[0]
        calls = []
        for layout, taken, first in self._places.layouts(layer, runs):
            proofs_BN = None if digests_BN is None else digests_BN[:, first:]
            misses_BN = None if digests_BN is None else bad_BN[:, first:]
            source = (cells_BHPC[:, taken:], stride)
            where = (address, layout, ids_B, *source)
            calls.append(host.scattering(*where, proofs_BN, misses_BN))
        yield calls
        return np.flatnonzero(bad_BN)

    def _by_device_or_torch(
        self,
        layer: int,
        ids_B: NDArray[np.int64],
        heads: Sequence[int],
        runs: Sequence[tuple[int, int]],
        cells_BHPC: NDArray[np.uint8],
        digests: NDArray[np.uint64] | None,
    ) -> NDArray[np.intp]:
        pool_NPHSD, parts = self._places.layers[layer], self._places.parts
        rows = cells_BHPC.reshape(-1, cells_BHPC.shape[3])
        bad = np.empty(0, dtype=np.intp) if digests is None else bad_cells(rows, digests)
        if len(bad):  # put what is there in place of what is not to be written
            rows = rows.copy()
            rows[bad] = self._reader.gather_cells(layer, ids_B.tolist(), heads)[bad]
        if self._on_device is not None:
            proved_BHPC = rows.reshape(cells_BHPC.shape)
            self._on_device.scatter(pool_NPHSD, ids_B.tolist(), runs, parts, proved_BHPC)
            return bad
        owned = torch.empty(rows.size, dtype=torch.uint8)  # aligned; torch refuses read-only arrays
        owned.numpy()[:] = rows.reshape(-1)
        shape = (*cells_BHPC.shape[:3], self._places.spec.block_size, pool_NPHSD.shape[4])
        cells_BHPSD = owned.view(pool_NPHSD.dtype).view(shape)
        block_ids_B, taken = torch.from_numpy(ids_B).to(pool_NPHSD.device), 0
        for lo, hi in runs:
            run_BHPSD = cells_BHPSD[:, taken : taken + hi - lo].contiguous()
            scatter_cells(run_BHPSD, pool_NPHSD, block_ids_B, lo, parts)
            taken += hi - lo
        return bad
