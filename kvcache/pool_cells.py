"""Cells of a pool, as raw bytes in one order whatever the pool's memory looks like.

Cells go out and come in by block, KV head and plane; each is [S, D] in row order, little-endian.
Heads are numbered over the whole model, so no other rank needs to know how this one lays out its
own. Blocks may be those of the pool or equal parts of them: two workers whose block sizes differ
speak of parts as large as the smaller of the two, so both know each cell by the same bytes.

    pool_NPHSD   one layer: N blocks, P planes (K, V), H local KV heads, S slots, D head dim
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import host_cells
from kernels.gather_blocks import gather_cells
from kernels.scatter_blocks import scatter_cells
from kvcache.cell_catcher import CellCatcher
from kvcache.cell_pourer import CellPourer
from kvcache.cells import bad_cells, cell_digests
from kvcache.device_cells import DeviceCells
from kvcache.head_map import HeadInterval
from kvcache.kept_digests import BlockRotten, KeptDigests
from kvcache.mapped_pool import MappedCells
from kvcache.shared_memory import SharedMemory
from kvcache.spec import CacheSpec

_NO_CELLS = np.empty((0, 0, 0, 0), dtype=np.uint8)


class _Way(NamedTuple):
    """Where the cells of some heads lie in a layer, and how many a block has."""

    pool: int
    layout: host_cells.Layout
    num_cells: int
    block_bytes: int


class PoolCells:
    """Reads and writes the live `layers` of a pool of `num_blocks` blocks of `spec`."""

    def __init__(
        self,
        spec: CacheSpec,
        kv_heads: HeadInterval,
        layers: Mapping[int, Tensor],
        num_blocks: int,
        parts: int = 1,
        kept: KeptDigests | None = None,
        on_device: DeviceCells | None = None,
        shared: SharedMemory | None = None,
        settled_NL: NDArray[np.bool_] | None = None,
    ) -> None:
        """With `parts`, part p of block b counts as block b * parts + p, of S / parts slots.

        `kept` are the digests of whole blocks: those of parts are not kept. `on_device` does the
        work where the layers are a device's. `shared` is the memory they lie in, if others read it;
        what is known to lie in huge pages there is noted in `settled_NL`.
        """
        self.spec = replace(spec, block_size=spec.block_size // parts)
        self._whole = spec
        self._kv_heads = kv_heads
        self._layers = layers
        self._num_blocks = num_blocks * parts
        self._parts = parts
        self._kept = kept
        self._on_device = on_device
        self._shared = shared
        if settled_NL is None:
            settled_NL = np.zeros((num_blocks, len(layers)), np.bool_)
        self._settled_NL = settled_NL  # by whole blocks
        self._ways: dict[tuple[int, ...], _Way | None] = {}
        self._noters: dict[int, Callable[[Sequence[int]], None]] = {}  # by layer
        self._host = host_cells.load() if on_device is None else None

    def cut(self, block_size: int) -> "PoolCells":
        """The same cells, in blocks of fewer tokens. Raises ValueError for what does not divide."""
        parts, rest = divmod(self.spec.block_size, block_size)
        if parts < 1 or rest:
            raise ValueError(f"blocks of {self.spec.block_size} tokens have none of {block_size}")
        whole, num_blocks = self._whole, self._num_blocks // self._parts
        parts *= self._parts
        return PoolCells(
            whole,
            self._kv_heads,
            self._layers,
            num_blocks,
            parts,
            self._kept,
            self._on_device,
            self._shared,
            self._settled_NL,
        )

    @property
    def takes_cells(self) -> bool:
        """Whether `take_cells` can read them where another process has them."""
        return self._host is not None

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
        pool_NPHSD = self._layers[layer]
        runs = self._local_runs(heads)
        ids_B = self._checked(block_ids)
        compare = self._comparison(layer, ids_B, heads, tail_tokens)
        slot_bytes = pool_NPHSD.shape[4] * pool_NPHSD.element_size()
        cell_bytes = self.spec.block_size * slot_bytes
        shape = (len(block_ids), len(heads), pool_NPHSD.shape[1], cell_bytes)
        if out is None:
            out = np.empty(shape, dtype=np.uint8)
        cells_BHPC = out.reshape(shape)
        digests_BN = _by_block(digests, shape)
        if self._host is not None:
            for layout, cells, first in self._host_runs(pool_NPHSD, runs, cells_BHPC):
                address, stride = pool_NPHSD.data_ptr(), cells_BHPC.strides[0]
                own_BN = None if digests_BN is None else digests_BN[:, first:]
                self._host.gather(address, layout, ids_B, cells, stride, own_BN)
        elif self._on_device is not None:
            self._on_device.gather(layer, pool_NPHSD, block_ids, runs, self._parts, cells_BHPC)
        else:
            block_ids_B = torch.from_numpy(ids_B).to(pool_NPHSD.device)
            taken = 0
            for lo, hi in runs:
                run_BHPSD = gather_cells(pool_NPHSD, block_ids_B, (lo, hi), self._parts)
                run_BHPC = (
                    run_BHPSD.view(torch.uint8).numpy().reshape(len(block_ids), hi - lo, *shape[2:])
                )
                cells_BHPC[:, taken : taken + hi - lo] = run_BHPC
                taken += hi - lo
        if tail_tokens is not None and len(block_ids):
            cells_BHPC[-1, :, :, tail_tokens * slot_bytes :] = 0
            if digests_BN is not None and self._host is not None:  # they were made before
                digests_BN[-1] = cell_digests(cells_BHPC[-1].reshape(-1, cell_bytes))
        if digests is not None and self._host is None:
            digests[:] = cell_digests(cells_BHPC.reshape(-1, cell_bytes))
        if digests is not None:
            compare(digests)
        return cells_BHPC.reshape(-1, cell_bytes)

    def pourer(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None,
        piece_blocks: int,
        *,
        suspect: bool = False,
    ) -> CellPourer | None:
        """What sends the cells that `gather_cells` would give through a socket, `piece_blocks` at a
        time; None where it cannot be done so. They are sent while they are gathered; or from where
        they lie, if their digests are known, and they are not `suspect`.
        """
        way, ids_B = self._way(layer, heads), self._checked(block_ids)
        if self._host is None or way is None or not len(ids_B):
            return None
        known = None if suspect else self._known(layer, ids_B, heads, tail_tokens)
        fresh = known is None
        compare = self._comparison(layer, ids_B, heads, tail_tokens) if fresh else _nothing
        made = (way.layout, ids_B, tail_tokens or 0, way.block_bytes, way.num_cells, piece_blocks)
        return CellPourer(self._host, way.pool, *made, known, compare)

    def catcher(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        piece_blocks: int,
        digests: NDArray[np.uint64] | None = None,
    ) -> CellCatcher | None:
        """What writes the cells of `heads` (ascending) into `block_ids` as they come out of a
        socket, where it can be done so; they come as `pourer` has them sent, and then a u64. With
        `digests` [num_cells], only cells come.
        """
        way, ids_B = self._way(layer, heads), self._checked(block_ids)
        if self._host is None or way is None or not len(ids_B) or piece_blocks < 1:
            return None
        if digests is not None and len(digests) != len(ids_B) * way.num_cells:
            return None
        cells = (way.layout, ids_B, way.block_bytes, way.num_cells, piece_blocks, digests)
        made = CellCatcher(self._host, way.pool, *cells)
        if self._kept is not None:
            touched = np.unique(ids_B // self._parts) if self._parts > 1 else ids_B
            made.keep_in(self._kept, layer, self._locals(heads), touched, self._parts == 1)
        return made

    def streams(self, heads: Sequence[int]) -> bool:
        """Whether there is a `pourer` and a `catcher` for cells of these heads."""
        return self._host is not None and bool(heads) and len(self._local_runs(heads)) == 1

    def _way(self, layer: int, heads: Sequence[int]) -> "_Way | None":
        """The same as before for the same heads, which are those of a pair of ranks; None where
        they are no run. Raises ValueError for heads of other ranks.
        """
        key = (layer, *heads)
        if key not in self._ways:
            pool_NPHSD, runs = self._layers[layer], self._local_runs(heads)
            found = [layout for layout, _, _ in self._host_runs(pool_NPHSD, runs, _NO_CELLS)]
            made = _Way(pool_NPHSD.data_ptr(), found[0], *self._block(layer, heads))
            self._ways[key] = made if len(runs) == 1 else None
        return self._ways[key]

    def _block(self, layer: int, heads: Sequence[int]) -> tuple[int, int]:
        """How many cells of `heads` a block has, and their bytes."""
        _, num_planes, _, _, head_dim = self._layers[layer].shape
        num_cells = len(heads) * num_planes
        item_bytes = self._layers[layer].element_size()
        return num_cells, num_cells * self.spec.block_size * head_dim * item_bytes

    def digest_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
    ) -> NDArray[np.uint64]:
        """The digests that `gather_cells` would make, [num_cells], for who reads the cells itself
        and holds them against these. What is kept of whole blocks is not made anew.
        """
        ids_B = self._checked(block_ids)
        self.settle_cells(layer, ids_B)
        known = self.known_digests(layer, block_ids, heads, tail_tokens)
        return known if known is not None else self._fresh_digests(layer, ids_B, heads, tail_tokens)

    def prove_blocks(self, layer: int, block_ids: Sequence[int], heads: Sequence[int]) -> None:
        """Read these whole blocks: raises BlockRotten for those that are not what is kept of them.
        For who goes on to read parts of them, of which nothing is kept.
        """
        self._fresh_digests(layer, self._checked(block_ids), heads, None)

    def known_digests(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
    ) -> NDArray[np.uint64] | None:
        """As `digest_cells`, if that takes but a moment: of whole blocks those that are kept, and
        only a tail is read. None if some are not.
        """
        return self._known(layer, self._checked(block_ids), heads, tail_tokens)

    def _known(
        self, layer: int, ids_B: NDArray[np.int64], heads: Sequence[int], tail_tokens: int | None
    ) -> NDArray[np.uint64] | None:
        """As `known_digests`."""
        if self._kept is None or self._parts > 1:
            return None
        whole_B = ids_B if tail_tokens is None else ids_B[:-1]
        known = self._kept.known(layer, whole_B, self._locals(heads))
        if known is None or tail_tokens is None:
            return None if known is None else known.reshape(-1)
        tail = self._fresh_digests(layer, ids_B[-1:], heads, tail_tokens)
        return np.concatenate((known.reshape(-1), tail))

    def note_cells(self, layer: int, block_ids: Sequence[int]) -> None:
        """These blocks have just been written, whole, and lie in a cache still: what they hold is
        kept from now on, and costs nobody another look. Nothing where that is a device's work.
        """
        if self._host is None or self._kept is None or self._parts > 1:
            return
        assert min(block_ids) >= 0 and max(block_ids) < self._num_blocks, f"blocks {block_ids}"
        noter = self._noters.get(layer)
        if noter is None:
            noter = self._noters[layer] = self._noter(self._host, layer, self._kept)
        self._kept.fill(noter, block_ids)

    def _noter(
        self, host: host_cells.HostCells, layer: int, kept: KeptDigests
    ) -> Callable[[Sequence[int]], None]:
        pool_NPHSD, runs = self._layers[layer], [(0, len(self._kv_heads))]
        ((layout, _, _),) = self._host_runs(pool_NPHSD, runs, _NO_CELLS)
        return host.noter(pool_NPHSD.data_ptr(), layout, *kept.arrays(layer))

    def _fresh_digests(
        self, layer: int, ids_B: NDArray[np.int64], heads: Sequence[int], tail_tokens: int | None
    ) -> NDArray[np.uint64]:
        """Made now, whatever is kept, and compared with that or kept; of a tail they are not."""
        digests = np.empty(len(ids_B) * self._block(layer, heads)[0], dtype=np.uint64)
        if self._host is None:
            self.gather_cells(layer, ids_B.tolist(), heads, tail_tokens, digests=digests)
            return digests
        compare = self._comparison(layer, ids_B, heads, tail_tokens)
        self._digest(self._host, layer, ids_B, heads, tail_tokens, digests)
        compare(digests)
        return digests

    def _digest(
        self,
        host: host_cells.HostCells,
        layer: int,
        ids_B: NDArray[np.int64],
        heads: Sequence[int],
        tail_tokens: int | None,
        digests: NDArray[np.uint64],
    ) -> None:
        """Into `digests`, of cells as they lie there now."""
        pool_NPHSD = self._layers[layer]
        digests_BN, tail = digests.reshape(len(ids_B), -1), tail_tokens or 0
        for layout, _, first in self._host_runs(pool_NPHSD, self._local_runs(heads), _NO_CELLS):
            pool, own_BN = pool_NPHSD.data_ptr(), digests_BN[:, first:]
            host.digest_blocks(pool, layout, ids_B, tail, own_BN)

    def are_settled(self, layer: int, block_ids: Sequence[int] | NDArray[np.int64]) -> bool:
        """Whether `settle_cells` has nothing left to do for these."""
        if self._shared is None:
            return True
        ids_B = np.asarray(block_ids, dtype=np.int64) // self._parts
        return bool(self._settled_NL[ids_B, layer].all())

    def settle_cells(self, layer: int, block_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Whoever is about to read these blocks in a shown pool shall find them in huge pages."""
        if (shared := self._shared) is None or self.are_settled(layer, block_ids):
            return
        ids_B = np.asarray(block_ids, dtype=np.int64) // self._parts
        pool_NPHSD = self._layers[layer]
        block, plane, *_ = (stride * pool_NPHSD.itemsize for stride in pool_NPHSD.stride())
        begin = pool_NPHSD.data_ptr() - shared.array.ctypes.data
        planes_P = begin + plane * np.arange(pool_NPHSD.shape[1])
        shared.settle((planes_P[:, None] + block * ids_B).reshape(-1))
        self._settled_NL[ids_B, layer] = True

    def take_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: MappedCells,
        digests: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.intp]:
        """As `scatter_cells`, with the cells of another process's pool, whatever becomes of that
        meanwhile: what is written is what has been digested. Of cells that do not lie there, or
        not in this shape, none is written.
        """
        pool_NPHSD, ids_B = self._layers[layer], self._checked(block_ids)
        runs, host = self._local_runs(heads), self._host
        shape = (len(ids_B), len(heads), pool_NPHSD.shape[1])
        at = [
            (pool_NPHSD.data_ptr(), layout)
            for layout, _, _ in self._host_runs(pool_NPHSD, runs, _NO_CELLS)
        ]
        if host is None or not cells.fit(layer, self._kv_heads.start, at, ids_B):
            return np.arange(math.prod(shape))

        def write() -> NDArray[np.intp]:
            proofs_BN = _by_block(digests, shape)
            bad_BN = np.zeros((shape[0], shape[1] * shape[2]), dtype=np.bool_)
            cells.move(host, layer, self._kv_heads.start, at, ids_B, proofs_BN, bad_BN)
            return np.flatnonzero(bad_BN)

        return self._noted(layer, ids_B, heads, digests, write)

    def _comparison(
        self, layer: int, ids_B: NDArray[np.int64], heads: Sequence[int], tail_tokens: int | None
    ) -> Callable[[NDArray[np.uint64]], None]:
        """Made before blocks are read, called with the digests of what was read: raises BlockRotten
        for whole blocks whose kept digests are others.
        """
        kept = self._kept
        if kept is None or self._parts > 1:
            return _nothing
        whole = ids_B if tail_tokens is None else ids_B[:-1]
        written, local = kept.written(whole), self._locals(heads)
        shape = (len(ids_B), len(heads), self._layers[layer].shape[1])

        def compare(digests: NDArray[np.uint64]) -> None:
            digests_BHP = digests.reshape(shape)[: len(whole)]
            rotten = kept.compare(layer, whole, local, digests_BHP, written)
            if rotten:
                raise BlockRotten(rotten, layer)

        return compare

    def scatter_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: bytes | bytearray | memoryview | NDArray[np.uint8],
        digests: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.intp]:
        """Write the cells of `heads` (ascending) into `block_ids`, in the order they are gathered.

        With `digests` [num_cells], only the cells that are what these say are written; returned
        are the others, as rows of [num_cells, cell_bytes]. Raises ValueError when `cells` is not
        exactly as many bytes as that.
        """
        ids_B = self._checked(block_ids)
        runs = self._local_runs(heads)
        return self._noted(
            layer,
            ids_B,
            heads,
            digests,
            lambda: self._scatter(layer, ids_B, heads, runs, cells, digests),
        )

    def _noted(
        self,
        layer: int,
        ids_B: NDArray[np.int64],
        heads: Sequence[int],
        digests: NDArray[np.uint64] | None,
        write: Callable[[], NDArray[np.intp]],
    ) -> NDArray[np.intp]:
        """Have `write` write these cells; it answers which are bad, and what is good is kept."""
        if self._kept is None:
            return write()
        touched = np.unique(ids_B // self._parts) if self._parts > 1 else ids_B
        local = self._locals(heads)
        self._kept.forget_cells(layer, touched, local)
        bad = write()
        if digests is None or self._parts > 1:
            self._kept.forget_cells(layer, touched, local)
        else:
            shape = (len(ids_B), len(heads), -1)
            good_BH = np.ones(shape[:2], np.bool_)
            if len(bad):
                good = np.ones(len(digests), np.bool_)
                good[bad] = False
                good_BH = np.asarray(good.reshape(shape).all(axis=2))
            self._kept.keep(layer, ids_B, local, digests.reshape(shape), good_BH)
        return bad

    def _scatter(
        self,
        layer: int,
        ids_B: NDArray[np.int64],
        heads: Sequence[int],
        runs: list[tuple[int, int]],
        cells: bytes | bytearray | memoryview | NDArray[np.uint8],
        digests: NDArray[np.uint64] | None,
    ) -> NDArray[np.intp]:
        pool_NPHSD = self._layers[layer]
        num_planes, head_dim = pool_NPHSD.shape[1], pool_NPHSD.shape[4]
        shape = (len(ids_B), len(heads), num_planes, self.spec.block_size, head_dim)
        raw = np.frombuffer(cells, dtype=np.uint8)
        want = math.prod(shape) * pool_NPHSD.element_size()
        if raw.nbytes != want:
            raise ValueError(
                f"{len(ids_B)} blocks of {len(heads)} heads of layer {layer} are {want} bytes, "
                f"not {raw.nbytes}"
            )
        if self._host is not None:
            cells_BHPC = raw.reshape(*shape[:3], -1)
            digests_BN = _by_block(digests, shape)
            bad_BN = np.zeros((shape[0], shape[1] * shape[2]), dtype=np.bool_)
            for layout, run_cells, first in self._host_runs(pool_NPHSD, runs, cells_BHPC):
                address, stride = pool_NPHSD.data_ptr(), cells_BHPC.strides[0]
                proofs_BN = None if digests_BN is None else digests_BN[:, first:]
                misses_BN = None if digests_BN is None else bad_BN[:, first:]
                self._host.scatter(address, layout, ids_B, run_cells, stride, proofs_BN, misses_BN)
            return np.flatnonzero(bad_BN)
        cell_bytes = self.spec.block_size * head_dim * pool_NPHSD.element_size()
        rows = raw.reshape(math.prod(shape[:3]), cell_bytes)
        bad = np.empty(0, dtype=np.intp)
        if digests is not None:
            bad = bad_cells(rows, digests)
        if len(bad):  # put what is there in place of what is not to be written
            rows = rows.copy()
            rows[bad] = self.gather_cells(layer, ids_B.tolist(), heads)[bad]
        if self._on_device is not None:
            cells_BHPC = rows.reshape(*shape[:3], cell_bytes)
            self._on_device.scatter(pool_NPHSD, ids_B.tolist(), runs, self._parts, cells_BHPC)
            return bad
        owned = torch.empty(want, dtype=torch.uint8)  # aligned, and torch refuses read-only arrays
        owned.numpy()[:] = rows.reshape(-1)
        cells_BHPSD = owned.view(pool_NPHSD.dtype).view(shape)
        block_ids_B = torch.from_numpy(ids_B).to(pool_NPHSD.device)
        taken = 0
        for lo, hi in runs:
            run_BHPSD = cells_BHPSD[:, taken : taken + hi - lo].contiguous()
            scatter_cells(run_BHPSD, pool_NPHSD, block_ids_B, lo, self._parts)
            taken += hi - lo
        return bad

    def _host_runs(
        self, pool_NPHSD: Tensor, runs: list[tuple[int, int]], cells_BHPC: NDArray[np.uint8]
    ) -> Iterator[tuple[host_cells.Layout, NDArray[np.uint8], int]]:
        """For each run of heads, where it lies in the pool, and where its first cell lies: in
        memory, and counted within its block.
        """
        item_bytes, head_dim = pool_NPHSD.element_size(), pool_NPHSD.shape[4]
        *strides, _ = (stride * item_bytes for stride in pool_NPHSD.stride())
        cell = (pool_NPHSD.shape[1], self.spec.block_size, head_dim * item_bytes, self._parts)
        taken = 0
        for lo, hi in runs:
            first = taken * pool_NPHSD.shape[1]
            yield host_cells.Layout(*strides, *cell, lo, hi), cells_BHPC[:, taken:], first
            taken += hi - lo

    def _checked(self, block_ids: Sequence[int]) -> NDArray[np.int64]:
        ids_B = np.array(block_ids, dtype=np.int64)
        assert not len(ids_B) or 0 <= ids_B.min() <= ids_B.max() < self._num_blocks, (
            f"a block id outside 0..{self._num_blocks - 1}: {list(block_ids)}"
        )
        return ids_B

    def _locals(self, heads: Sequence[int]) -> list[int]:
        return [head - self._kv_heads.start for head in heads]

    def _local_runs(self, heads: Sequence[int]) -> list[tuple[int, int]]:
        """The runs [lo, hi) of consecutive local heads that make up `heads`."""
        runs: list[tuple[int, int]] = []
        for head in heads:
            if head not in self._kv_heads:
                raise ValueError(
                    f"KV head {head} is not on this rank, which holds {self._kv_heads}"
                )
            local = head - self._kv_heads.start
            if runs and runs[-1][1] == local:
                runs[-1] = (runs[-1][0], local + 1)
            else:
                assert not runs or local > runs[-1][1], f"heads out of order: {list(heads)}"
                runs.append((local, local + 1))
        assert runs, "no heads asked for"
        return runs


def _nothing(digests: NDArray[np.uint64]) -> None:
    """None are kept."""


def _by_block(
    digests: NDArray[np.uint64] | None, shape_BHPC: Sequence[int]
) -> NDArray[np.uint64] | None:
    """Digests [num_cells] as [blocks, cells of a block], in the same memory."""
    if digests is None:
        return None
    num_blocks, num_heads, num_planes = shape_BHPC[:3]
    assert digests.dtype == np.uint64 and digests.flags.c_contiguous
    return digests.reshape(num_blocks, num_heads * num_planes)
