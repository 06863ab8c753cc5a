"""The KV bytes of one rank: a pool of blocks per layer, read and written by whole cells.

    pool_NPHSD   one layer: N blocks, P planes (K, V), H local KV heads, S slots, D head dim

That is how everybody indexes a pool; in which order its memory runs is the layout's to say. Two
workers may have different ones, since what passes between them is cells.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.copy_blocks import copy_blocks
from kernels.launch import sent
from kvcache import host_memory
from kvcache.cell_places import CellPlaces
from kvcache.device_cells import DeviceCells
from kvcache.head_map import HeadInterval
from kvcache.kept_digests import BlockRotten, KeptDigests
from kvcache.layout import MEMORY_ORDER, KvLayout
from kvcache.mapped_pool import LayerPlace, PoolMap, ShownPool
from kvcache.pool_cells import PoolCells
from kvcache.settled_blocks import SettledBlocks
from kvcache.shared_memory import SharedMemory
from kvcache.spec import CacheSpec, LayerGroup, LayerKind, ShardAxis
from kvcache.streams import CudaDevice

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}

RECHECK_BLOCKS = 16  # read at once: of them one layer lies in memory a second time


class KvStore(PoolCells):
    """The memory, and its cells by whole blocks.

    Holds bytes, not ownership: which block is whose is `BlockPool`'s.
    """

    def __init__(
        self,
        spec: CacheSpec,
        kv_heads: HeadInterval,
        num_blocks: int,
        device: str | torch.device = "cpu",
        layout: KvLayout = KvLayout.HEAD_MAJOR,
        on_device: DeviceCells | None = None,
        *,
        share: bool = False,
    ) -> None:
        """`on_device` moves cells where it is given, or else on a CUDA device by itself.

        With `share`, other processes of this host may be shown the pool (`shown`), to read it, if
        it lies in host memory and the system can do that.
        """
        spec.validate()
        if not 0 <= kv_heads.start < kv_heads.stop <= spec.num_kv_heads:
            raise ValueError(f"{kv_heads} is not a run of the {spec.num_kv_heads} KV heads")
        self.kv_heads = kv_heads
        self.num_blocks = num_blocks
        shapes = {
            layer: _pool_shape(spec, group, len(kv_heads), num_blocks)
            for group in spec.groups
            for layer in group.layers
        }
        on_host = torch.device(device).type == "cpu"
        self._shared = _shared(spec, shapes) if share and on_host and on_device is None else None
        self._layers: dict[int, Tensor] = {}
        room = self._shared.array if self._shared is not None else None
        for layer, shape in shapes.items():
            memory = None
            if room is not None:
                memory, room = np.split(room, [_num_bytes(spec, shape)])
            self._layers[layer] = _pool(shape, layout, DTYPES[spec.dtype], device, memory)
        num_planes = {layer: len(g.planes) for g in spec.groups for layer in g.layers}
        kept = KeptDigests(num_blocks, len(kv_heads), num_planes)
        if on_device is None and torch.device(device).type == "cuda":
            on_device = DeviceCells(CudaDevice(self._layers[0].device))  # with its number
        settled = None
        if self._shared is not None:
            settled = SettledBlocks(self._shared, self._layers, num_blocks)
        super().__init__(
            CellPlaces(spec, kv_heads, self._layers, num_blocks), kept, on_device, settled
        )

    @property
    def shown(self) -> ShownPool | None:
        """The pool, as others may be shown it."""
        if self._shared is None:
            return None
        base, places = self._shared.array.ctypes.data, []
        for layer in range(self.num_layers):
            pool_NPHSD = self._layers[layer]
            *strides, _ = (stride * pool_NPHSD.itemsize for stride in pool_NPHSD.stride())
            places.append(LayerPlace(pool_NPHSD.data_ptr() - base, *strides))
        num_bytes, block_size = self._shared.array.nbytes, self.spec.block_size
        pool = PoolMap(num_bytes, self.num_blocks, block_size, self.kv_heads, tuple(places))
        return ShownPool(self._shared, pool)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def layer(self, layer: int) -> Tensor:
        """The live pool_NPHSD of one layer. Who writes to it says so (`kept.forget`)."""
        return self._layers[layer]

    @property
    def follows_layers(self) -> bool:
        """Whether `layer_written` does anything."""
        return self._on_device is not None

    def layer_written(self, layer: int) -> None:
        """Said by who computes a step, once it has asked for all of the layer's KV: what is
        gathered of the layer from now on has it in.
        """
        if self._on_device is not None:
            self._on_device.layer_written([layer])

    def step_ended(self) -> None:
        """Said by who computes a step, once it has asked for all of it: what is scattered from now
        on comes after it.
        """
        if self._on_device is not None:
            self._on_device.step_ended()

    def recheck(self, block_ids: Sequence[int]) -> list[int]:
        """Digest these blocks anew; returns those that are not what they were when cached.

        Of a cell without a digest it is kept.
        """
        rotten: set[int] = set()
        heads = list(self.kv_heads)
        for start in range(0, len(block_ids), RECHECK_BLOCKS):
            some = block_ids[start : start + RECHECK_BLOCKS]
            for layer, pool_NPHSD in self._layers.items():
                digests = np.empty(len(some) * len(heads) * pool_NPHSD.shape[1], np.uint64)
                try:
                    self._reader.gather_cells(layer, some, heads, digests=digests)
                except BlockRotten as found:
                    rotten.update(found.block_ids)
        return sorted(rotten)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `src` to block `dst` for each (src, dst) in turn, in every layer."""
        self.kept.forget([dst for _, dst in pairs])
        for run in _independent_runs(pairs):
            src_C, dst_C = (self._ids(block_ids) for block_ids in zip(*run, strict=True))
            for pool_NPHSD in self._layers.values():
                copy_blocks(pool_NPHSD, src_C, dst_C)
        if pairs and self._on_device is not None:
            self._on_device.layer_written(list(self._layers))

    def poison(self) -> None:
        """Fill every slot with what no one may read: NaN, or a telling number where there is none.

        For tests: a stale or foreign slot that takes part in anything is then seen.
        """
        self.kept.forget_all()
        for pool_NPHSD in self._layers.values():
            floating = pool_NPHSD.dtype.is_floating_point
            pool_NPHSD.fill_(float("nan") if floating else -0x0BADCAFE)
        if self._on_device is not None:
            self._on_device.layer_written(list(self._layers))
            self._on_device.step_ended()

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        assert all(0 <= i < self.num_blocks for i in block_ids), (
            f"a block id outside 0..{self.num_blocks - 1}: {list(block_ids)}"
        )
        ids_B = torch.tensor(block_ids, dtype=torch.int64)
        return sent(ids_B, next(iter(self._layers.values())).device)


def _shared(spec: CacheSpec, shapes: Mapping[int, Sequence[int]]) -> SharedMemory | None:
    """For the pools of all layers, one after another; None where the system has none."""
    num_bytes = sum(_num_bytes(spec, shape) for shape in shapes.values())
    with contextlib.suppress(OSError, AttributeError):
        return SharedMemory.create(num_bytes)
    return None


def _num_bytes(spec: CacheSpec, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[spec.dtype].itemsize


def _pool(
    shape_NPHSD: Sequence[int],
    layout: KvLayout,
    dtype: torch.dtype,
    device: str | torch.device,
    room: NDArray[np.uint8] | None,
) -> Tensor:
    """Memory in the layout's order, seen as NPHSD: `room`, or fresh."""
    dims, order = "NPHSD", MEMORY_ORDER[layout]
    memory = [shape_NPHSD[dims.index(dim)] for dim in order]
    if room is not None:
        pool = torch.from_numpy(room).view(dtype).view(memory)
    elif torch.device(device).type == "cpu":
        pool = host_memory.empty(memory, dtype)
    else:
        pool = torch.empty(memory, dtype=dtype, device=device)
    return pool.permute([order.index(dim) for dim in dims])


def _independent_runs(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """`pairs` in order, cut wherever one writes what its run read or wrote, or reads its writes.

    It happens when a block is let go and taken again while one step is planned.
    """
    runs: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for src, dst in pairs:
        if not runs or src in written or dst in written or dst in read:
            runs.append([])
            read, written = set(), set()
        runs[-1].append((src, dst))
        read.add(src)
        written.add(dst)
    return runs


def _pool_shape(
    spec: CacheSpec, group: LayerGroup, num_heads: int, num_blocks: int
) -> tuple[int, int, int, int, int]:
    """The shape of one layer's pool; raises ValueError for what cannot be executed yet."""
    if group.kind is not LayerKind.FULL:
        raise ValueError(
            f"layers {list(group.layers)} cache as {group.kind.value!r}, "
            f"which can be planned but not yet run"
        )
    widths = {plane.width for plane in group.planes}
    by_head = all(plane.axis is ShardAxis.KV_HEAD for plane in group.planes)
    own_dtype = any(plane.dtype not in (None, spec.dtype) for plane in group.planes)
    if len(widths) != 1 or not by_head or own_dtype or spec.dtype not in DTYPES:
        raise ValueError(
            f"layers {list(group.layers)} need planes of one width, by KV head, in one of "
            f"{', '.join(DTYPES)}, to be run"
        )
    return (num_blocks, len(group.planes), num_heads, spec.block_size, widths.pop())
