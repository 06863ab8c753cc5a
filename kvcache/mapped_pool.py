"""The pool of another process of this host, whose cells are read where they lie.

Its owner says where its cells are (`PoolMap`), which is checked against the size of the memory
before it is believed. Nor is what is read: the owner may have given its blocks to somebody else
meanwhile, so a cell is taken only if it is what its digest says (`PoolCells.taking`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kernels import host_cells
from kernels.crew import CCall
from kvcache.head_map import HeadInterval
from kvcache.shared_memory import SharedMemory
from kvcache.spec import CacheSpec

Place = tuple[int, host_cells.Layout]  # where some heads of a layer lie in a pool


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where the first cell of a layer begins, and how far apart the others are, all in bytes."""

    offset: int
    block_stride: int
    plane_stride: int
    head_stride: int
    slot_stride: int

    @property
    def strides(self) -> tuple[int, int, int, int]:
        return self.block_stride, self.plane_stride, self.head_stride, self.slot_stride


@dataclass(frozen=True, slots=True)
class PoolMap:
    """Of one rank: the memory's size, what it holds, and where."""

    num_bytes: int
    num_blocks: int
    block_size: int
    kv_heads: HeadInterval
    layers: tuple[LayerPlace, ...]

    def check(self, spec: CacheSpec) -> None:
        """Raises ValueError unless every cell of `spec` that can be named lies in the memory."""
        planes = {layer: group.planes for group in spec.groups for layer in group.layers}
        heads = self.kv_heads
        if len(self.layers) != len(planes) or not 0 <= heads.start < heads.stop:
            raise ValueError(f"{len(self.layers)} layers of {heads} do not make a pool")
        if min(self.num_blocks, self.block_size) < 1 or self.block_size > spec.block_size << 16:
            raise ValueError(f"{self.num_blocks} blocks of {self.block_size} do not make a pool")
        for layer, place in enumerate(self.layers):
            slot_bytes = spec.cell_bytes(planes[layer][0]) // spec.block_size
            counts = (self.num_blocks, len(planes[layer]), len(heads), self.block_size)
            last = place.offset + slot_bytes
            for stride, count in zip(place.strides, counts, strict=True):
                last += stride * (count - 1)
            if min(place.offset, *place.strides) < 0 or last > self.num_bytes:
                raise ValueError(f"layer {layer} ends at {last} of {self.num_bytes} bytes")


@dataclass(frozen=True, slots=True)
class ShownPool:
    """What its owner shows of a pool."""

    memory: SharedMemory
    map: PoolMap


class MappedPool:
    """Reads cells of a pool that a `PoolMap` describes, which has been checked against `spec`."""

    def __init__(self, memory: SharedMemory, pool: PoolMap, spec: CacheSpec) -> None:
        """`spec` is the reader's own; only the size of its blocks may differ."""
        pool.check(spec)
        self.pool = pool
        self._memory = memory
        self._spec = replace(spec, block_size=pool.block_size)
        self._planes = {layer: g.planes for g in spec.groups for layer in g.layers}

    def cells(
        self, block_ids: bytes, block_size: int, tail_tokens: int | None
    ) -> "MappedCells | None":
        """Cells in blocks, or equal parts of them, of `block_size` tokens, whose ids are i64,
        little-endian; None when there are no such blocks.
        """
        parts, rest = divmod(self.pool.block_size, max(1, block_size))
        if rest or not parts or len(block_ids) % 8:
            return None
        ids_B = np.frombuffer(block_ids, dtype="<i8").astype(np.int64)
        inside = not len(ids_B) or 0 <= ids_B.min() <= ids_B.max() < self.pool.num_blocks * parts
        if not inside or not 0 <= (tail_tokens or 0) < block_size:
            return None
        return MappedCells(self, ids_B, parts, tail_tokens)

    def place(self, layer: int, first: int, stop: int, parts: int) -> Place | None:
        """Where the heads `first` to `stop` - 1 lie; None when this pool does not hold them."""
        held, at = self.pool.kv_heads, self.pool.layers[layer]
        if not held.start <= first < stop <= held.stop:
            return None
        planes = self._planes[layer]
        slot_bytes = self._spec.cell_bytes(planes[0]) // self._spec.block_size
        cell = (len(planes), self.pool.block_size // parts, slot_bytes, parts)
        layout = host_cells.Layout(*at.strides, *cell, first - held.start, stop - held.start)
        return self._memory.array.ctypes.data + at.offset, layout


@dataclass(frozen=True, slots=True)
class MappedCells:
    """Cells of some blocks that have not been read yet."""

    source: MappedPool
    ids_B: NDArray[np.int64]
    parts: int
    tail_tokens: int | None  # that the last block holds, when it is not full

    def fit(
        self, first_head: int, ours: Mapping[int, Sequence[Place]], ids_B: NDArray[np.int64]
    ) -> bool:
        """Whether there is a cell there for each of ours, by layer, and of its size."""
        return len(self.ids_B) == len(ids_B) and all(
            theirs is not None
            and (theirs[1].num_slots, theirs[1].slot_bytes) == (layout.num_slots, layout.slot_bytes)
            for layer, own in ours.items()
            for theirs, (_, layout) in zip(self._places(layer, first_head, own), own, strict=True)
        )

    def moves(
        self,
        host: host_cells.HostCells,
        first_head: int,
        ours: Mapping[int, Sequence[Place]],
        ids_B: NDArray[np.int64],
        digests_BN: NDArray[np.uint64] | None,
        bad_BN: NDArray[np.bool_],
    ) -> list[CCall]:
        """Into each of `ours`, by layer runs of heads of a rank that begins with `first_head`; they
        `fit`. What is written, and what is bad, is as `HostCells.moving` has it, of one layer after
        the other.
        """
        calls, row, tail_slots = [], 0, self.tail_tokens or 0
        for layer, own in ours.items():
            rows, first = slice(row, row + len(ids_B)), 0
            for place, (address, layout) in zip(
                self._places(layer, first_head, own), own, strict=True
            ):
                assert place is not None
                proofs_BN = None if digests_BN is None else digests_BN[rows, first:]
                source, target = (*place, self.ids_B), (address, layout, ids_B)
                misses_BN = bad_BN[rows, first:]
                calls.append(host.moving(source, target, tail_slots, proofs_BN, misses_BN))
                first += (layout.hi - layout.lo) * layout.num_planes
            row += len(ids_B)
        return calls

    def _places(self, layer: int, first_head: int, ours: Sequence[Place]) -> list[Place | None]:
        return [
            self.source.place(layer, first_head + layout.lo, first_head + layout.hi, self.parts)
            for _, layout in ours
        ]
