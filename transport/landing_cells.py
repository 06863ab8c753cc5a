"""Into live blocks, from staging, out of another pool, or past a room that stays in a cache: the
one place where received bytes touch them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kernels.crew import Steps, at_once, together
from kvcache.cell_catcher import CellCatcher
from kvcache.cells import bad_cells, digests_from_bytes
from kvcache.mapped_pool import MappedCells
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import CellRun, Chunk
from transport.cell_runs import Cell, cells_of, runs_of
from transport.chunk_check import seal_of
from transport.landing import Landed, Landing
from transport.link import Inlet, LinkClosed
from transport.pieces import GIVEN_UP

Given = memoryview | MappedCells | None  # cells that came, or where they lie


class CellSink(Protocol):
    """Where cells land: `kvcache.kv_store.KvStore`."""

    @property
    def spec(self) -> CacheSpec: ...

    def cut(self, block_size: int) -> "CellSink":
        """The same cells, in smaller blocks."""
        ...

    def scattering(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: NDArray[np.uint8],
        digests: NDArray[np.uint64] | None = None,
    ) -> Steps[NDArray[np.intp]]: ...

    def taking(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: MappedCells,
        digests: NDArray[np.uint64],
    ) -> Steps[NDArray[np.intp]]: ...


@runtime_checkable
class CatchingSink(CellSink, Protocol):
    """One whose cells may land while they are read."""

    def cut(self, block_size: int) -> "CatchingSink": ...

    def streams(self, heads: Sequence[int]) -> bool: ...

    def catcher(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        piece_blocks: int,
        digests: NDArray[np.uint64] | None = None,
    ) -> CellCatcher | None: ...


class Catcher(NamedTuple):
    """What lets one payload land while it is read."""

    cells: CellCatcher
    inlet: Inlet
    place: bytes  # of its chunk


def catch(landing: Landing, runs: Sequence[CellRun], chunk: Chunk, catcher: Catcher) -> Landed:
    """On the thread that reads: verify cells and write the good ones, as they come.

    A transfer that is given up is not written to any more after a few milliseconds, however slowly
    cells come; an abort waits for this call to return. Raises LinkClosed when no more will come.
    """
    cells, inlet, place = catcher
    room, whole = inlet.piece(cells.room_bytes), False
    try:
        while not whole:
            if landing.incoming.failure is not None:
                return Landed(written=False)
            whole = cells.turn(inlet.fd, room)
            inlet.came(cells.num_taken)
    except OSError as error:
        raise LinkClosed(f"a payload did not come: {error}") from error
    finally:
        if not whole:
            cells.forget()
    if chunk.piece_blocks:
        if cells.seal == GIVEN_UP:
            cells.forget()
            return Landed(written=False)
        if cells.seal != seal_of(place, cells.digests):
            cells.forget()
            rows = np.arange(len(cells.digests))
            return _landed(landing, runs, rows, "its digests are not those that were sent")
    cells.keep()
    return _landed(landing, runs, cells.bad_rows(), "")


def land(
    sink: CellSink, landing: Landing, runs: Sequence[CellRun], digests: bytes, payload: Given
) -> Steps[Landed]:
    """By the copying threads: verify the cells of these runs, of the same blocks and heads in
    layers that are alike, and scatter the good ones.

    A transfer given up before is not written to, and an abort waits for the end of these steps.
    """
    if landing.incoming.failure is not None:
        return Landed(written=False)
    if isinstance(payload, MappedCells):
        return (yield from _take(sink, landing, runs, payload, digests))
    came = payload if payload is not None else memoryview(b"")
    given = [_share_of(landing, runs, i, digests, came) for i in range(len(runs))]
    lands = [_land(sink, landing, run, *own) for run, own in zip(runs, given, strict=True)]
    landed = yield from together(lands)
    damage = next((one.damage for one in landed if one.damage), "")
    return Landed(damage=damage, bad={cell: why for one in landed for cell, why in one.bad.items()})


def _share_of(
    landing: Landing, runs: Sequence[CellRun], i: int, digests: bytes, payload: memoryview
) -> tuple[bytes, memoryview]:
    """Digests and cells of the `i`th run; the last has what is too much, or too little."""
    run, layer = runs[i], landing.incoming.shape.layers[runs[i].layer]
    num_rows, last = run.num_blocks * len(run.heads) * len(layer.planes), i == len(runs) - 1
    proofs = digests[8 * num_rows * i : None if last else 8 * num_rows * (i + 1)]
    num_bytes = num_rows * layer.cell_bytes
    return proofs, payload[num_bytes * i : None if last else num_bytes * (i + 1)]


def _land(
    sink: CellSink, landing: Landing, run: CellRun, digests: bytes, payload: memoryview
) -> Steps[Landed]:
    """As `land`, of one run. One pass over the payload: each plane of a cell goes into its block if
    it is what its digest says.
    """
    layer = landing.incoming.shape.layers[run.layer]
    num_rows = run.num_blocks * len(run.heads) * len(layer.planes)
    if (len(digests), payload.nbytes) != (8 * num_rows, num_rows * layer.cell_bytes):
        odd: Landed = (yield [partial(_land_odd, sink, landing, run, digests, payload)])[0]
        return odd
    sink, ids = _place(sink, landing, run)
    cells, proofs = np.frombuffer(payload, dtype=np.uint8), digests_from_bytes(digests)
    rows = yield from sink.scattering(run.layer, ids, run.heads, cells, proofs)
    return (yield from _noting(landing, [run], rows))


def _take(
    sink: CellSink,
    landing: Landing,
    runs: Sequence[CellRun],
    cells: MappedCells,
    digests: bytes,
) -> Steps[Landed]:
    """As `land`, out of the pool in which the cells lie."""
    run, layer = runs[0], landing.incoming.shape.layers[runs[0].layer]
    num_rows = len(runs) * run.num_blocks * len(run.heads) * len(layer.planes)
    if len(digests) != 8 * num_rows:
        rows, why = bad_rows(memoryview(b""), digests, num_rows, layer.cell_bytes)
        return (yield from _noting(landing, runs, rows, why))
    sink, ids = _place(sink, landing, run)
    layers = range(run.layer, run.layer + len(runs))
    rows = yield from sink.taking(layers, ids, run.heads, cells, digests_from_bytes(digests))
    return (yield from _noting(landing, runs, rows))


def _noting(
    landing: Landing, runs: Sequence[CellRun], rows: NDArray[np.intp], why: str = ""
) -> Steps[Landed]:
    """As `_landed`, which may take long if there are such rows."""
    if not len(rows):
        return Landed()
    landed: Landed = (yield [partial(_landed, landing, runs, rows, why)])[0]
    return landed


def _land_odd(
    sink: CellSink, landing: Landing, run: CellRun, digests: bytes, payload: memoryview
) -> Landed:
    """As `land`, of a payload that is not of the right size, or whose digests are not."""
    layer = landing.incoming.shape.layers[run.layer]
    num_rows = run.num_blocks * len(run.heads) * len(layer.planes)
    rows, size = bad_rows(payload, digests, num_rows, layer.cell_bytes)
    landed = _landed(landing, [run], rows, size)
    _scatter(sink, landing, run, payload, landed.bad)
    return landed


def _landed(landing: Landing, runs: Sequence[CellRun], rows: NDArray[np.intp], why: str) -> Landed:
    """What becomes of runs of which these rows are not written: why all of them are not, if so."""
    if not len(rows) and not why:
        return Landed()
    run = runs[0]
    layer, bad = landing.incoming.shape.layers[run.layer], {}
    for row in reversed(rows.tolist()):  # of a cell's planes the first is named
        place, plane = divmod(row, len(layer.planes))
        place, head = divmod(place, len(run.heads))
        number, block = divmod(place, run.num_blocks)
        run = runs[number]
        cell = Cell(run.layer, run.first_block + block, run.heads[head])
        bad[cell] = f"{cell}, plane {layer.planes[plane]}: {why or 'the digest does not match'}"
    where = f"layer {runs[0].layer}, block {runs[0].first_block}"
    damage = next(reversed(bad.values()), f"{where}: {why}" if why else "")
    return Landed(damage=damage, bad=bad)


def bad_rows(
    payload: memoryview, digests: bytes, num_rows: int, cell_bytes: int
) -> tuple[NDArray[np.intp], str]:
    """The rows of [num_rows, cell_bytes] that are not proved, and what is wrong with the sizes."""
    want = num_rows * cell_bytes
    if len(digests) != 8 * num_rows:
        return np.arange(num_rows), f"{len(digests)} bytes of digests for {num_rows} cells"
    whole = min(payload.nbytes, want) // cell_bytes
    cells = np.frombuffer(payload[: whole * cell_bytes], dtype=np.uint8).reshape(whole, cell_bytes)
    bad = bad_cells(cells, digests_from_bytes(digests)[:whole])
    size = "" if payload.nbytes == want else f"{payload.nbytes} bytes came where {want} belong"
    return np.concatenate((bad, np.arange(whole, num_rows))), size


def _place(sink: CellSink, landing: Landing, run: CellRun) -> tuple[CellSink, Sequence[int]]:
    """What a run is written to, and in which of its blocks."""
    shape, first = landing.incoming.shape, run.first_block
    if shape.parts > 1:
        sink = sink.cut(shape.block_size)
    return sink, shape.part_ids(landing.order.block_table, first, first + run.num_blocks)


def _scatter(
    sink: CellSink, landing: Landing, run: CellRun, payload: memoryview, bad: Mapping[Cell, str]
) -> None:
    """Write every cell of a run of the wrong size that is not bad into its block."""
    shape, table, first = landing.incoming.shape, landing.order.block_table, run.first_block
    if shape.parts > 1:
        sink = sink.cut(shape.block_size)
    width = shape.layers[run.layer].block_bytes(1)
    columns = {head: column for column, head in enumerate(run.heads)}
    for good in runs_of(cell for cell in cells_of(run) if cell not in bad):
        rows = [
            (block - first) * len(run.heads) + columns[head] for _, block, head in cells_of(good)
        ]
        cells = np.concatenate(
            [np.frombuffer(payload[row * width : (row + 1) * width], np.uint8) for row in rows]
        )
        ids = shape.part_ids(table, good.first_block, good.first_block + good.num_blocks)
        at_once(sink.scattering(good.layer, ids, good.heads, cells))
