"""Who has cells land: the copying threads, or the thread that reads them."""

import asyncio
from collections.abc import Sequence
from functools import partial

from kvcache.cells import digests_from_bytes
from protos.transfer_pb2 import CellRun, Chunk
from transport.cell_runs import layers_of
from transport.chunk_check import place_of
from transport.copiers import Copiers
from transport.landing import Landed, Landing
from transport.landing_cells import Catcher, CatchingSink, CellSink, Given, catch, land
from transport.link import Inlet
from transport.pieces import piece_blocks


class Lander:
    """Of one sink."""

    def __init__(self, sink: CellSink, copiers: Copiers) -> None:
        self._sink = sink
        self._catching = sink if isinstance(sink, CatchingSink) else None
        self._copiers = copiers

    def land(
        self, landing: Landing, runs: Sequence[CellRun], digests: bytes, payload: Given
    ) -> "asyncio.Future[Landed]":
        """As `land`. The caller takes the job off `landing.jobs` when it is done."""
        job = self._copiers.go_through(land(self._sink, landing, runs, digests, payload))
        landing.jobs.add(job)
        return job

    def catches(self, heads: Sequence[int]) -> bool:
        """Whether chunks of these heads land while they are read, where the wire tells of them."""
        return self._catching is not None and self._catching.streams(heads)

    def catcher(
        self, landing: Landing, heads: Sequence[int], chunk: Chunk, inlet: Inlet
    ) -> Catcher | None:
        """What lets a chunk land while it is read, for `catch`; None when it is to be staged."""
        sink, shape, layers = self._catching, landing.incoming.shape, layers_of(chunk)
        first, last = chunk.first_block, chunk.first_block + chunk.num_blocks
        if sink is None or layers.stop > shape.num_layers or not first < last <= shape.num_blocks:
            return None
        if shape.parts > 1:
            sink = sink.cut(shape.block_size)
        ids = shape.part_ids(landing.order.block_table, first, last)
        count, digests = chunk.piece_blocks, None
        if not count:
            whole = len(chunk.digests) // 8 * 8
            digests = digests_from_bytes(chunk.digests[:whole])
            count = piece_blocks(inlet.nbytes // (len(layers) * len(ids)), 0)
        made = sink.catcher(layers, ids, heads, count, digests)
        fits = made is not None and made.num_bytes == inlet.nbytes
        if made is None or not fits:
            return None
        return Catcher(made, inlet, place_of(landing.order.key, chunk))

    def catch(
        self, landing: Landing, runs: Sequence[CellRun], chunk: Chunk, catcher: Catcher
    ) -> "asyncio.Future[Landed]":
        """As `land`, by the thread that reads the payload, while it does."""
        job = catcher.inlet.take(partial(catch, landing, runs, chunk, catcher))
        landing.jobs.add(job)
        landing.inlets[job] = catcher.inlet
        return job
