"""The gRPC service that hands out cells by request: for repair, and for whoever wants a copy.

A request says by which right it asks: it names a live shipment, or blocks by their whole names.
How much it asks for is known, and bounded, before anything is allocated. Blocks stay where they are
while they are read: a shipment ends only after its readers, named blocks are pinned.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, Protocol

import grpc
import grpc.aio
import numpy as np

from kvcache.cells import digests_to_bytes
from kvcache.head_map import HeadInterval
from kvcache.kept_digests import BlockRotten
from kvcache.ledger import Ledger
from kvcache.ledger_row import runs
from protos import transfer_pb2_grpc
from protos.transfer_pb2 import CellRun, FetchedCells, FetchRequest
from transport import books
from transport.books import NO_CHUNK
from transport.config import TransportConfig
from transport.departure import CellSource, Departure, prove_parts
from transport.fences import ended
from transport.orders import ShipmentKey
from transport.plan import LayerCells, layer_cells
from transport.sealed_runs import Run

Context = grpc.aio.ServicerContext[FetchRequest, FetchedCells]

MAX_RUNS = 4096  # of one request
MAX_CALLS = 4  # answered at once
MAX_WAITING = 60  # more; who comes beyond that asks again
NAME_BYTES = 32


class Source(CellSource, Protocol):
    @property
    def kv_heads(self) -> HeadInterval: ...


class PinsBlocks(Protocol):
    """Who knows blocks by name: the engine of rank 0, asked from any rank."""

    def pinned(self, names: Sequence[bytes]) -> AbstractAsyncContextManager[Mapping[bytes, int]]:
        """The block ids of those that are here; they stay while the context lasts."""
        ...

    async def suspect(self, block_ids: Sequence[int]) -> None:
        """One of these blocks is not what it was when it got its name: once this has returned,
        nobody shares any of them before every rank has looked.
        """
        ...


class _Refused(Exception):
    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a requested run, small enough for a message; no block ids where it is not here."""

    run: CellRun
    found: Run | None


class CellsServicer(transfer_pb2_grpc.CellsServicer):
    """One rank's. Without `lend` nothing is shipped from here, without `blocks` none has a name."""

    def __init__(
        self,
        source: Source,
        copiers: Executor,
        config: TransportConfig,
        lend: Callable[[ShipmentKey], Departure | None] = lambda key: None,
        blocks: PinsBlocks | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._source = source
        self._copiers = copiers
        self._config = config
        self._lend = lend
        self._blocks = blocks
        self._ledger = ledger
        self._layers = layer_cells(source.spec)
        self._num_calls = 0
        self._turns = asyncio.Semaphore(MAX_CALLS)

    async def Fetch(self, request: FetchRequest, context: Context) -> None:
        try:
            self._check(request)
            self._num_calls += 1
            try:
                async with asyncio.timeout(self._config.call_timeout_s), self._turns:
                    departure = self._lent(request)  # it may have ended while this call waited
                    async with aclosing(self._answers(request, departure)) as answers:
                        async for answer in answers:
                            self._note(request, answer)
                            await context.write(answer)
            finally:
                self._num_calls -= 1
        except _Refused as refused:
            await _abort(context, refused.code, str(refused))
        except TimeoutError:
            reason = f"not read within {self._config.call_timeout_s:g} s"
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, reason)

    def _note(self, request: FetchRequest, answer: FetchedCells) -> None:
        """Into the ledger, in the blocks of the prompt that lacks these cells."""
        named = bool(request.names)
        if self._ledger is None or answer.missing:
            return
        if named and len(request.places) != len(request.names) * _parts(request):
            return  # whoever it is keeps no books
        key = ShipmentKey.from_proto(request.lacks if named else request.key)
        first = answer.run.first_block
        blocks = range(first, first + answer.run.num_blocks)
        for start, count in runs(request.places[block] if named else block for block in blocks):
            layer, heads = answer.run.layer, answer.run.heads
            run = CellRun(layer=layer, first_block=start, num_blocks=count, heads=heads)
            books.lent(self._ledger, key, request.decode_rank & 0xFFFF, run)

    @asynccontextmanager
    async def _pins(self, request: FetchRequest, ids: Mapping[bytes, int]) -> AsyncIterator[None]:
        """Into the ledger: these blocks are read, and must stay."""
        if self._ledger is None or not ids:
            yield
            return
        key, pinned = ShipmentKey.from_proto(request.lacks), sorted(set(ids.values()))
        books.pinned(self._ledger, key, request.decode_rank & 0xFFFF, pinned)
        try:
            yield
        finally:
            books.unpinned(self._ledger, key, request.decode_rank & 0xFFFF, pinned)

    def _check(self, request: FetchRequest) -> None:
        """Raises _Refused unless the request is well-formed and small enough, has a right, and
        finds a place in the line.
        """
        invalid, full = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
        if bool(request.names) == request.HasField("key"):
            raise _Refused(invalid, "name either a shipment or blocks")
        if any(len(name) != NAME_BYTES for name in request.names):
            raise _Refused(
                grpc.StatusCode.PERMISSION_DENIED, f"a block's whole name has {NAME_BYTES} bytes"
            )
        if self._num_calls >= MAX_CALLS + MAX_WAITING:
            raise _Refused(full, f"{self._num_calls} calls wait or are being answered; ask again")
        if not 0 < len(request.runs) <= MAX_RUNS:
            raise _Refused(invalid, f"{len(request.runs)} runs, 1 to {MAX_RUNS} may be asked for")
        for run in request.runs:
            self._check_run(run)
        departure = self._lent(request)
        layers = self._layers_of(request, departure)
        num_bytes = sum(
            run.num_blocks * layers[run.layer].block_bytes(len(run.heads)) for run in request.runs
        )
        most = self._config.max_call_bytes
        if num_bytes > most:
            raise _Refused(full, f"{num_bytes} bytes are asked for, at most {most} may be")
        last = max(run.first_block + run.num_blocks for run in request.runs)
        named = len(request.names) * _parts(request)
        if request.names and last > named:
            raise _Refused(invalid, f"block {last - 1} has no name among {named}")

    def _lent(self, request: FetchRequest) -> Departure | None:
        """The shipment that is asked for, if it is one."""
        if not request.HasField("key"):
            return None
        key = ShipmentKey.from_proto(request.key)
        departure = self._lend(key)
        if departure is None:
            reason = f"no shipment {key} is under way here"
            raise _Refused(grpc.StatusCode.PERMISSION_DENIED, reason)
        return departure

    def _layers_of(
        self, request: FetchRequest, departure: Departure | None
    ) -> Sequence[LayerCells]:
        """The blocks that are asked for may be smaller than ours, never larger."""
        if departure is not None:
            return departure.shape.layers
        if (parts := _parts(request)) == 1 and not request.block_size:
            return self._layers
        own, asked = self._source.spec.block_size, request.block_size
        if asked not in (0, own) or own % parts:
            size = f"{parts} parts of blocks of {asked or own} tokens"
            reason = f"{size} are asked for, this worker names blocks of {own} tokens"
            raise _Refused(grpc.StatusCode.FAILED_PRECONDITION, reason)
        return layer_cells(replace(self._source.spec, block_size=own // parts))

    def _check_run(self, run: CellRun) -> None:
        invalid, heads = grpc.StatusCode.INVALID_ARGUMENT, list(run.heads)
        if run.layer >= len(self._layers):
            raise _Refused(invalid, f"layer {run.layer} of {len(self._layers)}")
        if not run.num_blocks or not heads or heads != sorted(set(heads)):
            raise _Refused(invalid, f"{run.num_blocks} blocks of heads {heads}")
        if any(head not in self._source.kv_heads for head in heads):
            reason = f"heads {heads} are asked for, this rank holds {self._source.kv_heads}"
            raise _Refused(grpc.StatusCode.FAILED_PRECONDITION, reason)

    async def _answers(
        self, request: FetchRequest, departure: Departure | None
    ) -> AsyncGenerator[FetchedCells, None]:
        layers = self._layers_of(request, departure)
        if departure is not None:
            for piece in self._pieces(request, layers, departure.outgoing.places.find):
                answer = await self._read(piece, departure)
                if answer.missing:
                    await self._suspect(piece, departure.shape.parts)
                yield answer
        elif self._blocks is None:
            reason = "nobody here knows blocks by name"
            raise _Refused(grpc.StatusCode.FAILED_PRECONDITION, reason)
        else:
            async with self._blocks.pinned(list(request.names)) as ids, self._pins(request, ids):
                parts = _parts(request)
                find = partial(_named, request.names, ids, parts)
                for piece in self._pieces(request, layers, find):
                    answer = await self._read(piece, parts=parts)
                    if answer.missing:
                        await self._suspect(piece, parts)
                    yield answer

    async def _suspect(self, piece: _Piece, parts: int) -> None:
        """What is here, and is missing all the same, has changed."""
        if self._blocks is not None and piece.found is not None:
            await self._blocks.suspect(sorted({part // parts for part in piece.found.block_ids}))

    def _pieces(
        self,
        request: FetchRequest,
        layers: Sequence[LayerCells],
        find: Callable[[int, int, int], Run | None],
    ) -> "list[_Piece]":
        """The requested runs, cut to messages; where part of one is missing, block by block."""
        pieces = []
        for run in request.runs:
            width = layers[run.layer].block_bytes(len(run.heads))
            step = max(1, self._config.chunk_bytes // width)
            for first in range(run.first_block, run.first_block + run.num_blocks, step):
                count = min(step, run.first_block + run.num_blocks - first)
                found = find(run.layer, first, count)
                singly = range(first, first + count) if found is None and count > 1 else [first]
                size = 1 if found is None else count
                for block in singly:
                    part = CellRun(
                        layer=run.layer, first_block=block, num_blocks=size, heads=run.heads
                    )
                    pieces.append(_Piece(part, found or find(run.layer, block, 1)))
        return pieces

    async def _read(
        self, piece: _Piece, departure: Departure | None = None, parts: int = 1
    ) -> FetchedCells:
        if piece.found is None:
            return FetchedCells(run=piece.run, missing=True)
        if departure is not None and not departure.readers.enter():
            raise _Refused(grpc.StatusCode.UNAVAILABLE, "the shipment has ended")
        if departure is not None:
            parts = departure.shape.parts
        num_planes = len(self._layers[piece.run.layer].planes)
        work = partial(_gather, self._source, piece, num_planes, parts)
        job = asyncio.get_running_loop().run_in_executor(self._copiers, work)
        if departure is not None:
            departure.book.gathering(0, NO_CHUNK)
            job.add_done_callback(lambda _: departure.book.gathered(0, NO_CHUNK))
            job.add_done_callback(lambda _: departure.readers.leave())
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            await ended([job])  # the blocks must stay as long as they are read
            raise


def _gather(source: CellSource, piece: _Piece, num_planes: int, parts: int) -> FetchedCells:
    """In a copying thread. What is not what it was when it was cached counts as missing."""
    assert piece.found is not None
    run, found = piece.run, piece.found
    digests = np.empty(len(found.block_ids) * len(run.heads) * num_planes, dtype=np.uint64)
    ids, tail = found.block_ids, found.tail_tokens
    try:
        prove_parts(source, parts, run.heads, found)
        if parts > 1:
            source = source.cut(source.spec.block_size // parts)
        cells = source.gather_cells(run.layer, ids, run.heads, tail, digests=digests)
    except BlockRotten:
        return FetchedCells(run=run, missing=True)
    proofs = digests_to_bytes(digests)
    return FetchedCells(run=run, digests=proofs, payload=cells.tobytes())


def _parts(request: FetchRequest) -> int:
    """What each named block counts as."""
    return max(1, request.parts)


def _named(
    names: Sequence[bytes],
    ids: Mapping[bytes, int],
    parts: int,
    layer: int,
    first: int,
    count: int,
) -> Run | None:
    places = [divmod(block, parts) for block in range(first, first + count)]
    found = [(ids.get(names[block]), part) for block, part in places]
    block_ids = tuple(whole * parts + part for whole, part in found if whole is not None)
    return Run(layer, first, block_ids) if len(block_ids) == count else None


async def _abort(context: Context, code: grpc.StatusCode, reason: str) -> NoReturn:
    await context.abort(code, reason)
