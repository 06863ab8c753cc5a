"""From live blocks to the wire: the one place where the cache is read for sending."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernels.crew import Steps, at_once
from kvcache.cell_pourer import CellPourer
from kvcache.cells import digests_to_bytes
from kvcache.kept_digests import BlockRotten
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import Chunk, Frame, Open, SealAll
from transport.books import SendingBook
from transport.chunk_check import check_of, chunk_check, place_of, seal_of
from transport.link import Outlet, Pouring
from transport.orders import FirstToken, ShipmentOrder, ShipmentReport
from transport.outgoing import Outgoing
from transport.pieces import piece_blocks
from transport.port import Port
from transport.readers import Readers
from transport.sealed_runs import Part, Run
from transport.shipment import Shape

T = TypeVar("T")


class CellSource(Protocol):
    """Where cells are read: `kvcache.kv_store.KvStore`."""

    @property
    def spec(self) -> CacheSpec: ...

    def cut(self, block_size: int) -> "CellSource":
        """The same cells, in smaller blocks."""
        ...

    def prove_blocks(self, layer: int, block_ids: Sequence[int], heads: Sequence[int]) -> None: ...

    def gather_cells(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None,
        out: NDArray[np.uint8] | None = None,
        digests: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.uint8]: ...


class Pool(CellSource, Protocol):
    """Where cells come from: `kvcache.kv_store.KvStore`, too."""

    def cut(self, block_size: int) -> "Pool": ...

    def digesting(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
    ) -> Steps[NDArray[np.uint64]]: ...

    def known_digests(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None = None,
    ) -> NDArray[np.uint64] | None: ...

    def streams(self, heads: Sequence[int]) -> bool: ...

    def pourer(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        tail_tokens: int | None,
        piece_blocks: int,
        *,
        suspect: bool = False,
    ) -> CellPourer | None: ...


@dataclass(slots=True)
class Departure:
    """One transfer on its way out: what is known of it, and what runs for it."""

    order: ShipmentOrder
    shape: Shape
    outgoing: Outgoing
    result: asyncio.Future[ShipmentReport]
    renew_at: float
    book: SendingBook
    first_tokens: tuple[FirstToken, ...] = ()
    began_at: float | None = None  # when its first chunk left
    ports: dict[int, Port] = field(default_factory=dict)  # by decode rank, once dialled
    stirred: dict[int, asyncio.Event] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    readers: Readers = field(default_factory=Readers)  # of its blocks
    # Decode ranks that read blocks where they lie; each is set once it does no more.
    lookers: dict[int, asyncio.Event] = field(default_factory=dict)
    ending: bool = False
    drains: list[Port] = field(default_factory=list)  # that wait to hear of the drain
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    def open_frame(self, rank: int) -> Frame:
        pair = self.outgoing.pairs[rank]
        return Frame(
            key=self.order.key.to_proto(),
            open=Open(
                num_tokens=self.order.num_tokens,
                num_layers=self.shape.num_layers,
                heads=pair.heads,
                block_size=self.shape.block_size,
            ),
        )

    def seal_frame(self, rank: int, own_rank: int) -> Frame:
        """SealAll for `rank`; between the ranks 0 it carries what decode goes on from."""
        tokens = self.first_tokens if rank == own_rank == 0 else ()
        seal = SealAll(num_chunks=self.outgoing.pairs[rank].num_chunks, first_tokens=tokens)
        return Frame(key=self.order.key.to_proto(), seal_all=seal)

    def name_of(self, rank: int) -> str:
        return f"{self.order.target.worker} rank {rank}"

    def report(self, now: float) -> ShipmentReport:
        pairs = self.outgoing.pairs.values()
        return ShipmentReport(
            chunks=sum(pair.num_chunks for pair in pairs),
            bytes=sum(pair.bytes_sent for pair in pairs),
            transfer_ms=0.0 if self.began_at is None else (now - self.began_at) * 1000,
        )


def gather(
    source: Pool,
    departure: Departure,
    rank: int,
    heads: Sequence[int],
    part: Part,
    room: memoryview,
) -> Frame | None:
    """On a thread: build a chunk's payload in `room`, and its frame; None when it is not wanted.

    A transfer given up meanwhile is not read from: its end waits for this call to return.
    """
    work = partial(_gather, source, departure, heads, part, room)
    return at_once(_read(departure, rank, part, _call(work)))


def pouring(
    source: Pool,
    departure: Departure,
    rank: int,
    heads: Sequence[int],
    part: Part,
    num_bytes: int,
) -> Pouring:
    """As `gather`, but the payload leaves while it is built, and its frame may leave before."""
    run, key, num_digests = part.run, departure.order.key, _num_digests(departure, heads, part)
    count = piece_blocks(num_bytes // part.num_blocks, num_digests // part.num_blocks)
    chunk = _chunk(part, num_bytes, piece_blocks=count)
    place = place_of(key, chunk)
    chunk.check = check_of(place, b"")
    where = (part.layers, run.block_ids, heads, run.tail_tokens, count)
    cells, suspect = _cut(source, departure), bool(part.heads)  # they came or lie damaged
    pourer = cells.pourer(*where, suspect=suspect)
    seal = seal_of(place, pourer.digests) if pourer is not None and pourer.known else None

    def pour(outlet: Outlet) -> int | None:
        work = partial(_pour, source, departure, heads, part, chunk, place, pourer, seal, outlet)
        return at_once(_read(departure, rank, part, _call(work)))

    return Pouring(Frame(key=key.to_proto(), chunk=chunk), num_bytes, num_digests, pour)


def point(
    source: Pool, departure: Departure, rank: int, heads: Sequence[int], part: Part
) -> Steps[Frame | None]:
    """As `gather`, but no payload is built: the frame says where decode finds the cells. Where
    their digests are known, nothing is read, and it takes but a moment.
    """
    return _read(departure, rank, part, _point(source, departure, heads, part))


def _read(
    departure: Departure, rank: int, part: Part, work: Steps[tuple[Chunk, T]]
) -> Steps[T | None]:
    with departure.readers.inside() as wanted:
        if not wanted:
            return None
        departure.book.gathering(rank, part.seq)
        try:
            chunk, made = yield from work
        finally:
            departure.book.gathered(rank, part.seq)
        departure.book.sent(rank, chunk)  # before the end, which may come with leaving
    return made


def _call(work: Callable[[], T]) -> Steps[T]:
    made: T = (yield [work])[0]
    return made


def _gather(
    source: Pool, departure: Departure, heads: Sequence[int], part: Part, room: memoryview
) -> tuple[Chunk, Frame]:
    _prove_parts(source, departure, heads, part)
    source, key = _cut(source, departure), departure.order.key
    out, digests = np.frombuffer(room, dtype=np.uint8), _digests(departure, heads, part)
    for run, cells, proofs in _by_layer(part, out, digests):
        where = (run.layer, run.block_ids, heads, run.tail_tokens)
        # What came damaged, or lies damaged, is looked at.
        known = None if part.heads else source.known_digests(*where)
        if known is None:
            source.gather_cells(*where, cells, proofs)
        else:
            source.gather_cells(*where, cells)
            proofs[:] = known
    chunk = _chunk(part, room.nbytes, digests=digests_to_bytes(digests))
    chunk.check = chunk_check(key, chunk)
    return chunk, Frame(key=key.to_proto(), chunk=chunk)


def _pour(
    source: Pool,
    departure: Departure,
    heads: Sequence[int],
    part: Part,
    chunk: Chunk,
    place: bytes,
    pourer: CellPourer | None,
    seal: int | None,
    outlet: Outlet,
) -> tuple[Chunk, int]:
    _prove_parts(source, departure, heads, part)
    fd, head, piece = outlet.begin()
    digests = _digests(departure, heads, part) if pourer is None else pourer.digests
    if pourer is not None:
        try:
            outlet.gone(pourer.pour(fd, head, piece, seal))
        except BlockRotten:  # which is found out when all has left
            outlet.pieces_gone()
            raise
    if (room := outlet.rest(digests)) is not None:
        source = _cut(source, departure)
        for run, cells, proofs in _by_layer(part, room, digests):
            where = (run.layer, run.block_ids, heads, run.tail_tokens)
            source.gather_cells(*where, cells, proofs)
    return chunk, seal_of(place, digests) if seal is None else seal


def _point(
    source: Pool, departure: Departure, heads: Sequence[int], part: Part
) -> Steps[tuple[Chunk, Frame]]:
    run, key = part.run, departure.order.key
    if departure.shape.parts > 1:
        yield [partial(_prove_parts, source, departure, heads, part)]
    cells = _cut(source, departure)
    digests = yield from cells.digesting(part.layers, run.block_ids, heads, run.tail_tokens)
    num_bytes = part.num_bytes(departure.shape, heads)
    chunk = _chunk(part, num_bytes, digests=digests_to_bytes(digests))
    chunk.pool_blocks = np.array(run.block_ids, dtype="<i8").tobytes()
    chunk.tail_tokens = run.tail_tokens or 0
    chunk.check = chunk_check(key, chunk)
    return chunk, Frame(key=key.to_proto(), chunk=chunk)


def prove_parts(source: CellSource, parts: int, heads: Sequence[int], run: Run) -> None:
    """Before parts of blocks are read: raises BlockRotten. Digests are kept of whole blocks alone,
    so those are read for them; of the prompt's last part nothing is kept.
    """
    full = run.block_ids if run.tail_tokens is None else run.block_ids[:-1]
    if parts > 1 and full:
        source.prove_blocks(run.layer, sorted({part // parts for part in full}), heads)


def _prove_parts(
    source: CellSource, departure: Departure, heads: Sequence[int], part: Part
) -> None:
    for run in part.runs if departure.shape.parts > 1 else ():
        prove_parts(source, departure.shape.parts, heads, run)


def _cut(source: Pool, departure: Departure) -> Pool:
    shape = departure.shape
    return source.cut(shape.block_size) if shape.parts > 1 else source


def _num_digests(departure: Departure, heads: Sequence[int], part: Part) -> int:
    num_planes = len(departure.shape.layers[part.run.layer].planes)
    return part.num_blocks * len(heads) * num_planes


def _digests(departure: Departure, heads: Sequence[int], part: Part) -> NDArray[np.uint64]:
    return np.empty(_num_digests(departure, heads, part), dtype=np.uint64)


def _by_layer(
    part: Part, cells: NDArray[np.uint8], digests: NDArray[np.uint64]
) -> Iterable[tuple[Run, NDArray[np.uint8], NDArray[np.uint64]]]:
    """The run of each layer, and its share of both."""
    shape = (part.num_layers, -1)
    return zip(part.runs, cells.reshape(shape), digests.reshape(shape), strict=True)


def _chunk(part: Part, num_bytes: int, digests: bytes = b"", piece_blocks: int = 0) -> Chunk:
    run = part.run
    return Chunk(
        seq=part.seq,
        layer=run.layer,
        num_layers=part.num_layers if part.num_layers > 1 else 0,
        first_block=run.first_block,
        num_blocks=len(run.block_ids),
        payload_bytes=num_bytes,
        digests=digests,
        heads=part.heads,
        piece_blocks=piece_blocks,
    )
