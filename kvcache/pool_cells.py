"""Cells of a pool, as raw bytes in one order whatever the pool's memory looks like.

Where they lie is `cell_places`' to say; `cell_reader` has them out, and `cell_writer` in. What a
call does is said there.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels import host_cells
from kernels.crew import Steps, at_once
from kvcache.cell_catcher import CellCatcher
from kvcache.cell_places import CellPlaces
from kvcache.cell_pourer import CellPourer
from kvcache.cell_reader import CellReader
from kvcache.cell_writer import CellWriter
from kvcache.device_cells import DeviceCells
from kvcache.kept_digests import KeptDigests
from kvcache.mapped_pool import MappedCells
from kvcache.settled_blocks import SettledBlocks


class PoolCells:
    """Reads and writes the cells of `places`."""

    def __init__(
        self,
        places: CellPlaces,
        kept: KeptDigests,
        on_device: DeviceCells | None = None,
        settled: SettledBlocks | None = None,
    ) -> None:
        """`kept` are the digests of whole blocks: those of parts are not kept. `on_device` does the
        work where the layers are a device's. `settled` is there if others read the pool.
        """
        host = host_cells.load() if on_device is None else None
        self.spec = places.spec
        self.kept = kept
        self._places = places
        self._on_host = host is not None
        self._on_device = on_device
        self._settled = settled
        self._reader = CellReader(places, kept, host, on_device, settled)
        self._writer = CellWriter(places, kept, host, on_device, self._reader)

    def cut(self, block_size: int) -> "PoolCells":
        """The same cells, in blocks of fewer tokens. Raises ValueError for what does not divide."""
        return PoolCells(self._places.cut(block_size), self.kept, self._on_device, self._settled)

    @property
    def takes_cells(self) -> bool:
        """Whether `taking` can read them where another process has them."""
        return self._on_host

    def streams(self, heads: Sequence[int]) -> bool:
        """Whether there is a `pourer` and a `catcher` for cells of these heads."""
        return self._on_host and bool(heads) and len(self._places.local_runs(heads)) == 1

    def gather_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
        out: NDArray[np.uint8] | None = None,
        digests: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.uint8]:
        """As `CellReader`."""
        return self._reader.gather_cells(layer, block_ids, heads, tail_tokens, out, digests)

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
        """As `CellReader`."""
        where = (layers, block_ids, heads, tail_tokens, piece_blocks)
        return self._reader.pourer(*where, suspect=suspect)

    def digesting(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
    ) -> Steps[NDArray[np.uint64]]:
        """As `CellReader`."""
        return self._reader.digesting(layers, block_ids, heads, tail_tokens)

    def digest_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
    ) -> NDArray[np.uint64]:
        """`digesting`, of one layer, at once."""
        layers = range(layer, layer + 1)
        return at_once(self.digesting(layers, block_ids, heads, tail_tokens))

    def prove_blocks(self, layer: int, block_ids: Sequence[int], heads: Sequence[int]) -> None:
        """As `CellReader`."""
        self._reader.prove_blocks(layer, block_ids, heads)

    def known_digests(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
    ) -> NDArray[np.uint64] | None:
        """As `CellReader`."""
        return self._reader.known_digests(layer, block_ids, heads, tail_tokens)

    def note_cells(self, layer: int, block_ids: Sequence[int]) -> None:
        """As `CellReader`."""
        self._reader.note_cells(layer, block_ids)

    def scattering(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: bytes | bytearray | memoryview | NDArray[np.uint8],
        digests: NDArray[np.uint64] | None = None,
    ) -> Steps[NDArray[np.intp]]:
        """As `CellWriter`."""
        return self._writer.scattering(layer, block_ids, heads, cells, digests)

    def scatter_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: bytes | bytearray | memoryview | NDArray[np.uint8],
        digests: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.intp]:
        """`scattering`, at once."""
        return at_once(self.scattering(layer, block_ids, heads, cells, digests))

    def taking(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: MappedCells,
        digests: NDArray[np.uint64] | None = None,
    ) -> Steps[NDArray[np.intp]]:
        """As `CellWriter`."""
        return self._writer.taking(layers, block_ids, heads, cells, digests)

    def take_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: MappedCells,
        digests: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.intp]:
        """`taking`, of one layer, at once."""
        layers = range(layer, layer + 1)
        return at_once(self.taking(layers, block_ids, heads, cells, digests))

    def catcher(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        piece_blocks: int,
        digests: NDArray[np.uint64] | None = None,
    ) -> CellCatcher | None:
        """As `CellWriter`."""
        return self._writer.catcher(layers, block_ids, heads, piece_blocks, digests)
