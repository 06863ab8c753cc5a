"""Cells in host memory, at the speed of memory: gather, scatter and digest without Python's loops.

`cells.c` is compiled at first use. Calls hold no interpreter lock, so they run beside others.
Where there is no compiler, `load` answers None and the references in `gather_blocks`,
`scatter_blocks` and `kvcache.cells` do the work.
"""

import ctypes
import functools
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kernels.compiled import Unfit, loaded
from kernels.crew import CCall

SOURCE = Path(__file__).with_name("cells.c")
SAMPLE = bytes(range(256)) * 5


class Layout(ctypes.Structure):
    """How one layer's pool is laid out, in bytes, and which of its heads are meant; see cells.c."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "block_stride",
            "plane_stride",
            "head_stride",
            "slot_stride",
            "num_planes",
            "num_slots",
            "slot_bytes",
            "parts",
            "lo",
            "hi",
        )
    ]


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    """Of addresses and numbers, all 64 bits wide; see cells.c."""
    pairs = [(field, ctypes.c_int64) for field in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": pairs})


_Scattering = _structure(
    "_Scattering",
    "pool at blocks num_blocks cells block_stride digest digests digest_stride bad",
)
_Moving = _structure(
    "_Moving",
    "from_pool theirs from_blocks to_pool ours to_blocks num_blocks tail_slots room digest digests "
    "digest_stride bad",
)
_Digesting = _structure(
    "_Digesting",
    "pool at blocks num_blocks tail_slots room digest digests digest_stride",
)


class HostCells(NamedTuple):
    """The compiled functions. Those whose names end in -ing answer what makes the call."""

    library: ctypes.CDLL
    digest: ctypes.c_void_p

    def gather(
        self,
        pool: int,
        layout: Layout,
        block_ids: NDArray[np.int64],
        cells: NDArray[np.uint8],
        block_stride: int,
        digests: NDArray[np.uint64] | None = None,
    ) -> None:
        """From the pool at address `pool` into `cells`, `block_stride` bytes a block.

        `digests` [blocks, cells of a block], if given, takes xxh3-64 of each cell.
        """
        self.library.gather_cells(
            ctypes.c_void_p(pool),
            ctypes.byref(layout),
            ctypes.c_void_p(block_ids.ctypes.data),
            ctypes.c_int64(len(block_ids)),
            ctypes.c_void_p(cells.ctypes.data),
            ctypes.c_int64(block_stride),
            self.digest,
            *_rows_at(digests),
        )

    def pour(
        self,
        fd: int,
        head: bytes,
        pools: NDArray[np.intp],
        layout: Layout,
        block_ids: NDArray[np.int64],
        tail_slots: int,
        piece_blocks: int,
        room: NDArray[np.uint8],
        patience_ms: int,
        digests: NDArray[np.uint64] | None,
    ) -> int:
        """Gather from the layers that lie at `pools`, one after the other, the same blocks of each,
        and send it through the socket `fd` behind `head`, `piece_blocks` at a time in `room`, which
        must hold as many: their digests, then their cells. Of the last block `tail_slots` slots
        have meaning, 0: all. `digests` [layers, blocks, cells of a block], if given, is dense; else
        what is sent of them is 0.

        Returns how many bytes have left: fewer than all where the socket takes none for
        `patience_ms`. Raises OSError.
        """
        where = (fd, head, len(head), pools.ctypes.data, len(pools), ctypes.byref(layout))
        blocks = (block_ids.ctypes.data, len(block_ids), tail_slots, piece_blocks)
        proofs = None if digests is None else digests.ctypes.data
        pour, through = self.library.pour_cells, room.ctypes.data
        return _count(pour(*where, *blocks, through, patience_ms, self.digest, proofs))

    def send(
        self,
        fd: int,
        head: bytes,
        pools: NDArray[np.intp],
        layout: Layout,
        block_ids: NDArray[np.int64],
        tail_slots: int,
        piece_blocks: int,
        room: NDArray[np.uint8],
        patience_ms: int,
        digests: NDArray[np.uint64],
        seal: int,
    ) -> int:
        """As `pour`, of cells whose `digests` are known: they leave from where they lie, and `seal`
        behind them, a u64.
        """
        num_cells = digests.size // (len(pools) * len(block_ids))  # of a block
        views = np.empty(2 * (piece_blocks * num_cells + 4), np.uintp)
        where = (fd, head, len(head), pools.ctypes.data, len(pools), ctypes.byref(layout))
        blocks = (block_ids.ctypes.data, len(block_ids), tail_slots, piece_blocks)
        send, through = self.library.send_cells, room.ctypes.data
        proofs = (views.ctypes.data, digests.ctypes.data, seal)
        return _count(send(*where, *blocks, through, patience_ms, *proofs))

    def catch(
        self,
        fd: int,
        pools: NDArray[np.intp],
        layout: Layout,
        block_ids: NDArray[np.int64],
        piece_blocks: int,
        room: NDArray[np.uint8],
        taken: int,
        turn_ms: int,
        led: bool,
        proved: bool,
        digests: NDArray[np.uint64],
        bad: NDArray[np.bool_],
        seal: NDArray[np.uint64],
    ) -> int:
        """The other way: read from the socket `fd` and scatter into the layers that lie at `pools`,
        `piece_blocks` at a time in `room`, which must hold as many and be the same from call to
        call. With `led`, `digests` and `seal` come, too; else `digests` are given. With `proved`,
        only cells that are what these say are written, and `bad` becomes true for the others.

        `taken` bytes came before; returns how many have now: fewer than all after `turn_ms`.
        Raises OSError, of which a BrokenPipeError says that no more will come.
        """
        return _count(
            self.library.catch_cells(
                ctypes.c_int(fd),
                ctypes.c_void_p(pools.ctypes.data),
                ctypes.c_int64(len(pools)),
                ctypes.byref(layout),
                ctypes.c_void_p(block_ids.ctypes.data),
                ctypes.c_int64(len(block_ids)),
                ctypes.c_int64(piece_blocks),
                ctypes.c_void_p(room.ctypes.data),
                ctypes.c_int64(taken),
                ctypes.c_int(turn_ms),
                self.digest,
                ctypes.c_int(led),
                ctypes.c_int(proved),
                ctypes.c_void_p(digests.ctypes.data),
                ctypes.c_void_p(bad.ctypes.data),
                ctypes.c_void_p(seal.ctypes.data),
            )
        )

    def scattering(
        self,
        pool: int,
        layout: Layout,
        block_ids: NDArray[np.int64],
        cells: NDArray[np.uint8],
        block_stride: int,
        digests: NDArray[np.uint64] | None = None,
        bad: NDArray[np.bool_] | None = None,
    ) -> CCall:
        """The other way of `gather`. With `digests`, only cells that are what these say; `bad`, of
        the same shape, becomes true for the others.
        """
        assert (digests is None) == (bad is None)
        where = (pool, ctypes.addressof(layout), block_ids.ctypes.data, len(block_ids))
        proofs, stride = _rows_at(digests)
        misses = 0 if bad is None else bad.ctypes.data
        came = (cells.ctypes.data, block_stride, self.digest.value)
        about = _Scattering(*where, *came, proofs, stride, misses)
        held = (layout, block_ids, cells, digests, bad)
        return CCall(self.library.run_scattering, about, *held)

    def moving(
        self,
        theirs: tuple[int, Layout, NDArray[np.int64]],
        ours: tuple[int, Layout, NDArray[np.int64]],
        tail_slots: int,
        digests: NDArray[np.uint64] | None,
        bad: NDArray[np.bool_],
    ) -> CCall:
        """Cells of another pool into ours, each given as address, layout and blocks: as many heads
        of as many blocks, of cells of one size. With `digests` [blocks, cells of a block], only
        cells that are what these say are written, whatever becomes of the other pool meanwhile;
        `bad`, of the same shape, becomes true for the others. `tail_slots` as in `pour`.
        """
        (from_pool, from_layout, from_ids), (to_pool, to_layout, to_ids) = theirs, ours
        assert len(from_ids) == len(to_ids) == len(bad)
        room = np.empty(to_layout.num_slots * to_layout.slot_bytes, dtype=np.uint8)
        source = (from_pool, ctypes.addressof(from_layout), from_ids.ctypes.data)
        target = (to_pool, ctypes.addressof(to_layout), to_ids.ctypes.data)
        through = (len(to_ids), tail_slots, room.ctypes.data, self.digest.value)
        about = _Moving(*source, *target, *through, *_rows_at(digests), bad.ctypes.data)
        return CCall(self.library.run_moving, about, theirs, ours, room, digests, bad)

    def digesting(
        self,
        pool: int,
        layout: Layout,
        block_ids: NDArray[np.int64],
        tail_slots: int,
        digests: NDArray[np.uint64],
    ) -> CCall:
        """Into `digests` [blocks, cells of a block], of cells that are only read. `tail_slots` as
        in `pour`.
        """
        room = np.empty(layout.num_slots * layout.slot_bytes, dtype=np.uint8)
        where = (pool, ctypes.addressof(layout), block_ids.ctypes.data, len(block_ids))
        through = (tail_slots, room.ctypes.data, self.digest.value)
        about = _Digesting(*where, *through, *_rows_at(digests))
        return CCall(self.library.run_digesting, about, layout, block_ids, room, digests)

    def noter(
        self,
        pool: int,
        layout: Layout,
        digests: NDArray[np.uint64],
        known: NDArray[np.bool_],
        written: NDArray[np.uint32],
    ) -> Callable[[Sequence[int]], None]:
        """What digests blocks, whose ids it is given, and enters that into `digests` [N, H, P],
        `known` [N, H] and `written` [N] of all blocks of the pool. Whoever calls it has just
        computed, and Python is in no cache: so all is prepared here but the ids.
        """
        assert known.strides[1] == 1 and digests.flags.c_contiguous
        room = np.empty(layout.num_slots * layout.slot_bytes, dtype=np.uint8)
        behind = (
            ctypes.c_void_p(room.ctypes.data),
            self.digest,
            ctypes.c_void_p(digests.ctypes.data),
            ctypes.c_int64(digests[0].size),
            ctypes.c_void_p(known.ctypes.data),
            ctypes.c_int64(known.strides[0]),
            ctypes.c_void_p(written.ctypes.data),
        )
        ahead, call = (ctypes.c_void_p(pool), ctypes.byref(layout)), self.library.note_blocks
        alive, number = (room, digests, known, written), ctypes.c_int64

        def note(block_ids: Sequence[int], _: object = alive) -> None:
            count = len(block_ids)
            call(*ahead, (number * count)(*block_ids), number(count), *behind)

        return note

    def digests(self, cells: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """xxh3-64 of each row of a contiguous [num_cells, cell_bytes]."""
        num_cells, cell_bytes = cells.shape
        found = np.empty(num_cells, dtype=np.uint64)
        self.library.digest_cells(
            self.digest,
            ctypes.c_void_p(cells.ctypes.data),
            ctypes.c_int64(num_cells),
            ctypes.c_int64(cell_bytes),
            ctypes.c_void_p(found.ctypes.data),
        )
        return found


def _count(result: int) -> int:
    """Raises OSError for what is -errno."""
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def _rows_at(digests: NDArray[np.uint64] | None) -> tuple[int, int]:
    """Where the digests are, and how many cells on those of the next block."""
    if digests is None:
        return 0, 0
    assert digests.strides[1] == digests.itemsize
    return digests.ctypes.data, digests.strides[0] // digests.itemsize


@functools.cache
def load() -> HostCells | None:
    """The compiled functions, or None where they cannot be had or do not do what they should."""
    address, count = ctypes.c_void_p, ctypes.c_int64
    cells = [address, address, address, count, address, count, address, address, count]
    number = ctypes.c_int
    layers = [address, count, *cells[1:4]]
    pour = [number, ctypes.c_char_p, count, *layers, count, count, address, number]
    catch = [number, *layers, count, address, count, number, address, number, number]
    return loaded(
        SOURCE,
        signatures={
            "gather_cells": (None, cells),
            "note_blocks": (None, [*cells[:4], address, *cells[6:], address, count, address]),
            "digest_cells": (None, [address, address, count, count, address]),
            "pour_cells": (count, [*pour, address, address]),
            "send_cells": (count, [*pour, address, address, ctypes.c_uint64]),
            "catch_cells": (count, [*catch, address, address, address]),
            **{f"run_{name}": (None, [address]) for name in ("scattering", "moving", "digesting")},
        },
        make=_tried,
        otherwise="cells are gathered, scattered and digested by numpy, slower",
    )


def _tried(library: ctypes.CDLL) -> HostCells:
    # The very code that the package `xxhash` runs, for what `cells.h` leaves to it.
    own = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    function = getattr(own, "XXH3_64bits", None)
    if function is None:
        raise Unfit("the package xxhash shows no XXH3_64bits")
    made = HostCells(library, ctypes.cast(function, ctypes.c_void_p))
    samples = [np.frombuffer(SAMPLE, dtype=np.uint8).reshape(rows, -1) for rows in (1, 5, 20)]
    want = [xxhash.xxh3_64_intdigest(row.tobytes()) for sample in samples for row in sample]
    if [digest for sample in samples for digest in made.digests(sample).tolist()] != want:
        raise Unfit(f"{SOURCE.name} computes other digests than xxhash")
    return made
