"""The KV bytes of one rank: a pool of blocks per layer, read and written by whole cells.

    pool_NPHSD   one layer: N blocks, P planes (K, V), H local KV heads, S slots, D head dim

Cells go out and come in as raw bytes in the canonical order block, KV head, plane; each is
[S, D] in row order, little-endian. Heads are numbered over the whole model, so no other rank needs
to know how this one lays out its own.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import host_cells
from kernels.copy_blocks import copy_blocks
from kernels.gather_blocks import gather_cells
from kernels.scatter_blocks import scatter_cells
from kvcache.head_map import HeadInterval
from kvcache.spec import CacheSpec, LayerGroup, LayerKind, ShardAxis

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}


class KvStore:
    """Holds bytes, not ownership: which block is whose is `BlockPool`'s."""

    def __init__(
        self,
        spec: CacheSpec,
        kv_heads: HeadInterval,
        num_blocks: int,
        device: str | torch.device = "cpu",
    ) -> None:
        spec.validate()
        if not 0 <= kv_heads.start < kv_heads.stop <= spec.num_kv_heads:
            raise ValueError(f"{kv_heads} is not a run of the {spec.num_kv_heads} KV heads")
        self.spec = spec
        self.kv_heads = kv_heads
        self.num_blocks = num_blocks
        self._layers: dict[int, Tensor] = {}
        for group in spec.groups:
            shape = _pool_shape(spec, group, len(kv_heads), num_blocks)
            for layer in group.layers:
                self._layers[layer] = torch.empty(shape, dtype=DTYPES[spec.dtype], device=device)
        self._host = host_cells.load() if torch.device(device).type == "cpu" else None

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def layer(self, layer: int) -> Tensor:
        """The live pool_NPHSD of one layer."""
        return self._layers[layer]

    def gather_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
        out: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        """A copy of the cells of `heads` (ascending) in `block_ids`: [num_cells, cell_bytes].

        With `tail_tokens`, only so many slots of the last block have meaning, and the rest of it
        comes out zero, so that equal tokens give equal digests. `out` takes the cells, as many
        bytes as they are; else they come in memory of their own.
        """
        pool_NPHSD = self._layers[layer]
        runs = self._local_runs(heads)
        _, num_planes, _, num_slots, _ = pool_NPHSD.shape
        shape = (len(block_ids), len(heads), num_planes, _cell_bytes(pool_NPHSD))
        if out is None:
            out = np.empty(shape, dtype=np.uint8)
        cells_BHPC = out.reshape(shape)
        if self._host is not None:
            self._check_ids(block_ids)
            ids_B = np.array(block_ids, dtype=np.int64)
            for layout, cells in self._host_runs(pool_NPHSD, runs, cells_BHPC):
                address, stride = pool_NPHSD.data_ptr(), cells_BHPC.strides[0]
                self._host.gather(address, layout, ids_B, cells, stride)
        else:
            block_ids_B = self._ids(block_ids)
            taken = 0
            for lo, hi in runs:
                run_BHPSD = gather_cells(pool_NPHSD, block_ids_B, (lo, hi)).cpu()
                run_BHPC = (
                    run_BHPSD.view(torch.uint8).numpy().reshape(len(block_ids), hi - lo, *shape[2:])
                )
                cells_BHPC[:, taken : taken + hi - lo] = run_BHPC
                taken += hi - lo
        if tail_tokens is not None and len(block_ids):
            slot_bytes = shape[-1] // num_slots
            cells_BHPC[-1, :, :, tail_tokens * slot_bytes :] = 0
        return cells_BHPC.reshape(-1, shape[-1])

    def scatter_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: bytes | bytearray | memoryview | NDArray[np.uint8],
    ) -> None:
        """Write the cells of `heads` (ascending) into `block_ids`, in the order they are gathered.

        Raises ValueError when `cells` is not exactly as many bytes as that.
        """
        pool_NPHSD = self._layers[layer]
        runs = self._local_runs(heads)
        num_planes, _, *slots = pool_NPHSD.shape[1:]
        shape = (len(block_ids), len(heads), num_planes, *slots)
        raw = np.frombuffer(cells, dtype=np.uint8)
        want = int(np.prod(shape)) * pool_NPHSD.element_size()
        if raw.nbytes != want:
            raise ValueError(
                f"{len(block_ids)} blocks of {len(heads)} heads of layer {layer} are {want} bytes, "
                f"not {raw.nbytes}"
            )
        if self._host is not None:
            self._check_ids(block_ids)
            ids_B = np.array(block_ids, dtype=np.int64)
            cells_BHPC = raw.reshape(*shape[:3], -1)
            for layout, run_cells in self._host_runs(pool_NPHSD, runs, cells_BHPC):
                address, stride = pool_NPHSD.data_ptr(), cells_BHPC.strides[0]
                self._host.scatter(address, layout, ids_B, run_cells, stride)
            return
        owned = torch.empty(want, dtype=torch.uint8)  # aligned, and torch refuses read-only arrays
        owned.numpy()[:] = raw
        cells_BHPSD = owned.view(pool_NPHSD.dtype).view(shape).to(pool_NPHSD.device)
        block_ids_B = self._ids(block_ids)
        taken = 0
        for lo, hi in runs:
            run_BHPSD = cells_BHPSD[:, taken : taken + hi - lo].contiguous()
            scatter_cells(run_BHPSD, pool_NPHSD, block_ids_B, lo)
            taken += hi - lo

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `src` to block `dst` for each (src, dst) in turn, in every layer."""
        for run in _independent_runs(pairs):
            src_C, dst_C = (self._ids(block_ids) for block_ids in zip(*run, strict=True))
            for pool_NPHSD in self._layers.values():
                copy_blocks(pool_NPHSD, src_C, dst_C)

    def poison(self) -> None:
        """Fill every slot with what no one may read: NaN, or a telling number where there is none.

        For tests: a stale or foreign slot that takes part in anything is then seen.
        """
        for pool_NPHSD in self._layers.values():
            floating = pool_NPHSD.dtype.is_floating_point
            pool_NPHSD.fill_(float("nan") if floating else -0x0BADCAFE)

    def _host_runs(
        self, pool_NPHSD: Tensor, runs: list[tuple[int, int]], cells_BHPC: NDArray[np.uint8]
    ) -> Iterator[tuple[host_cells.Layout, NDArray[np.uint8]]]:
        """For each run of heads, where it lies in the pool, and where its first cell lies."""
        _, num_planes, num_heads, _, _ = pool_NPHSD.shape
        taken = 0
        for lo, hi in runs:
            layout = host_cells.Layout(num_planes, num_heads, cells_BHPC.shape[-1], lo, hi)
            yield layout, cells_BHPC[:, taken:]
            taken += hi - lo

    def _check_ids(self, block_ids: Sequence[int]) -> None:
        assert all(0 <= i < self.num_blocks for i in block_ids), (
            f"a block id outside 0..{self.num_blocks - 1}: {list(block_ids)}"
        )

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        self._check_ids(block_ids)
        ids_B = torch.tensor(block_ids, dtype=torch.int64)
        return ids_B.to(next(iter(self._layers.values())).device)

    def _local_runs(self, heads: Sequence[int]) -> list[tuple[int, int]]:
        """The runs [lo, hi) of consecutive local heads that make up `heads`."""
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


def _cell_bytes(pool_NPHSD: Tensor) -> int:
    *_, num_slots, head_dim = pool_NPHSD.shape
    return num_slots * head_dim * pool_NPHSD.element_size()


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
