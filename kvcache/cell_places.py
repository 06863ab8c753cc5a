"""Where the cells of a pool lie, whatever its memory looks like.

Cells are told by block, KV head and plane; each is [S, D] in row order, little-endian. Heads are
numbered over the whole model, so no other rank needs to know how this one lays out its own. Blocks
may be those of the pool or equal parts of them: two workers whose block sizes differ speak of parts
as large as the smaller of the two, so both know each cell by the same bytes.

    pool_NPHSD   one layer: N blocks, P planes (K, V), H local KV heads, S slots, D head dim
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.host_cells import Layout
from kvcache.head_map import HeadInterval
from kvcache.spec import CacheSpec


class HeadRun(NamedTuple):
    """Where the cells of consecutive heads lie in some layers that are alike, and how many of them
    a block has in each. Whoever has it may read and write there: it holds the layers.
    """

    pools: NDArray[np.intp]  # [layers]: their addresses
    held: tuple[Tensor, ...]  # what lies there
    layout: Layout
    num_cells: int
    block_bytes: int


class CellPlaces:
    """Of the heads `kv_heads` in the live `layers` of a pool of `num_whole` blocks of `whole`.

    spec         as `whole`, in the blocks that are counted here
    num_blocks   of these
    parts        that make up a block of the pool: part p of block b counts as block b * parts + p,
                 of S / parts slots
    """

    def __init__(
        self,
        whole: CacheSpec,
        kv_heads: HeadInterval,
        layers: Mapping[int, Tensor],
        num_whole: int,
        parts: int = 1,
    ) -> None:
        self.spec = replace(whole, block_size=whole.block_size // parts)
        self.kv_heads = kv_heads
        self.layers = layers
        self.num_blocks = num_whole * parts
        self.parts = parts
        self._whole = whole
        self._num_whole = num_whole
        self._head_runs: dict[tuple[int, int, tuple[int, ...]], HeadRun | None] = {}

    def cut(self, block_size: int) -> "CellPlaces":
        """The same cells, in blocks of fewer tokens. Raises ValueError for what does not divide."""
        parts, rest = divmod(self.spec.block_size, block_size)
        if parts < 1 or rest:
            raise ValueError(f"blocks of {self.spec.block_size} tokens have none of {block_size}")
        parts *= self.parts
        return CellPlaces(self._whole, self.kv_heads, self.layers, self._num_whole, parts)

    def checked(self, block_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        ids_B = np.array(block_ids, dtype=np.int64)
        assert not len(ids_B) or 0 <= ids_B.min() <= ids_B.max() < self.num_blocks, (
            f"a block id outside 0..{self.num_blocks - 1}: {list(block_ids)}"
        )
        return ids_B

    def whole_ids(self, ids_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """The blocks of the pool that these are, or are parts of: each once."""
        return np.unique(ids_B // self.parts) if self.parts > 1 else ids_B

    def local(self, heads: Sequence[int]) -> list[int]:
        return [head - self.kv_heads.start for head in heads]

    def local_runs(self, heads: Sequence[int]) -> list[tuple[int, int]]:
        """The runs [lo, hi) of consecutive local heads that make up `heads` (ascending). Raises
        ValueError for heads of other ranks.
        """
        runs: list[tuple[int, int]] = []
        for head in heads:
            if head not in self.kv_heads:
                raise ValueError(f"KV head {head} is not on this rank, which holds {self.kv_heads}")
            local = head - self.kv_heads.start
            if runs and runs[-1][1] == local:
                runs[-1] = (runs[-1][0], local + 1)
            else:
                assert not runs or local > runs[-1][1], f"heads out of order: {list(heads)}"
                runs.append((local, local + 1))
        assert runs, "no heads asked for"
        return runs

    def layouts(
        self, layer: int, runs: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[Layout, int, int]]:
        """For each run of local heads where it lies in the pool, and how many heads, and how many
        cells of a block, come before it.
        """
        pool_NPHSD, taken = self.layers[layer], 0
        num_planes, item_bytes = pool_NPHSD.shape[1], pool_NPHSD.element_size()
        *strides, _ = (stride * item_bytes for stride in pool_NPHSD.stride())
        cell = (num_planes, self.spec.block_size, pool_NPHSD.shape[4] * item_bytes, self.parts)
        for lo, hi in runs:
            yield Layout(*strides, *cell, lo, hi), taken, taken * num_planes
            taken += hi - lo

    def at(self, layer: int, runs: Sequence[tuple[int, int]]) -> list[tuple[int, Layout]]:
        """The address of the layer, and how each run of local heads lies there."""
        address = self.layers[layer].data_ptr()
        return [(address, layout) for layout, _, _ in self.layouts(layer, runs)]

    def head_run(self, layers: range, heads: Sequence[int]) -> HeadRun | None:
        """The same as before for the same heads, which are those of a pair of ranks; None where
        they are no run, or these layers are not alike. Raises ValueError for heads of other ranks.
        """
        key = (layers.start, layers.stop, tuple(heads))
        if key not in self._head_runs:
            self._head_runs[key] = self._find_run(layers, heads)
        return self._head_runs[key]

    def _find_run(self, layers: range, heads: Sequence[int]) -> HeadRun | None:
        runs = self.local_runs(heads)
        if len(runs) > 1 or not all(layer in self.layers for layer in layers):
            return None
        layouts = [next(self.layouts(layer, runs))[0] for layer in layers]
        if len({bytes(layout) for layout in layouts}) != 1:
            return None
        held = tuple(self.layers[layer] for layer in layers)
        pools = np.array([pool_NPHSD.data_ptr() for pool_NPHSD in held], dtype=np.intp)
        return HeadRun(pools, held, layouts[0], *self.block(layers[0], heads))

    def block(self, layer: int, heads: Sequence[int]) -> tuple[int, int]:
        """How many cells of `heads` a block has, and their bytes."""
        num_cells = len(heads) * self.layers[layer].shape[1]
        return num_cells, num_cells * self.cell_bytes(layer)

    def cell_bytes(self, layer: int) -> int:
        pool_NPHSD = self.layers[layer]
        return self.spec.block_size * pool_NPHSD.shape[4] * pool_NPHSD.element_size()


def by_block(
    digests: NDArray[np.uint64] | None, shape_BHPC: Sequence[int]
) -> NDArray[np.uint64] | None:
    """Digests [num_cells] as [blocks, cells of a block], in the same memory."""
    if digests is None:
        return None
    num_blocks, num_heads, num_planes = shape_BHPC[:3]
    assert digests.dtype == np.uint64 and digests.flags.c_contiguous
    return digests.reshape(num_blocks, num_heads * num_planes)
