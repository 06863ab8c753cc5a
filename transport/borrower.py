"""Whole blocks taken from another worker by their names, for a rank that would compute them else.

    asked     a stretch of blocks at a time, each head of the rank that holds it
    landing   what comes is verified, and only what is as it was cached is written into our blocks
    counted   blocks from the first on whose every cell is there; a gap ends it

Our blocks belong to nobody else meanwhile: `borrow` returns when no thread writes to them any more,
whether all has come, the holder has failed, or the time is up.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from kvcache.head_map import HeadInterval
from protos import rank_pb2
from protos.transfer_pb2 import CellRun, FetchedCells, FetchRequest
from transport.cells_servicer import MAX_RUNS
from transport.config import TransportConfig
from transport.landing import CellSink
from transport.orders import Holder, Lender, ShipmentKey
from transport.plan import layer_cells
from transport.pull import Pull, Puller, PullFailed

LEAST_GROUPS = 4  # of blocks, of one call: the earlier ones are whole while the later ones come


@dataclass(frozen=True, slots=True)
class BorrowOrder:
    """For one rank: its heads of these blocks, which have `names` at the holder, too."""

    key: ShipmentKey  # of nothing that is shipped: for the books
    names: tuple[bytes, ...]
    block_ids: tuple[int, ...]  # ours
    holder: Holder
    timeout_s: float

    @classmethod
    def from_proto(cls, order: rank_pb2.BorrowOrder) -> "BorrowOrder":
        return cls(
            ShipmentKey.from_proto(order.key),
            tuple(order.names),
            tuple(order.block_ids),
            Holder.from_proto(order.holder),
            order.timeout_ms / 1000,
        )

    def to_proto(self) -> rank_pb2.BorrowOrder:
        return rank_pb2.BorrowOrder(
            key=self.key.to_proto(),
            names=self.names,
            block_ids=self.block_ids,
            holder=self.holder.to_proto(),
            timeout_ms=round(1000 * self.timeout_s),
        )


@dataclass(frozen=True, slots=True)
class Borrowed:
    """`num_whole` of the blocks, from the first on, hold every cell; why not all of them do."""

    num_whole: int
    num_bytes: int
    why: str = ""

    @classmethod
    def from_proto(cls, answer: rank_pb2.Borrowed) -> "Borrowed":
        return cls(answer.whole_blocks, answer.bytes, answer.why)

    def to_proto(self) -> rank_pb2.Borrowed:
        return rank_pb2.Borrowed(whole_blocks=self.num_whole, bytes=self.num_bytes, why=self.why)


@dataclass(slots=True)
class _Landed:
    """What of one order has come, and what is being written."""

    cells_each: int  # of a block
    num_bytes: int = 0
    why: str = ""
    cells: dict[int, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    jobs: set["asyncio.Future[_Written]"] = field(default_factory=set)

    def count(self, layer: int, written: "_Written") -> None:
        self.num_bytes += written.num_bytes
        for block, head in written.good:
            self.cells[block].add((layer, head))

    def num_whole(self, num_blocks: int) -> int:
        lacking = (at for at in range(num_blocks) if len(self.cells[at]) < self.cells_each)
        return next(lacking, num_blocks)


@dataclass(frozen=True, slots=True)
class _Written:
    good: Sequence[tuple[int, int]]  # block and head
    num_bytes: int


class Borrower:
    """One rank's."""

    def __init__(
        self,
        rank: int,
        kv_heads: HeadInterval,
        sink: CellSink,
        puller: Puller,
        writers: Executor,
        config: TransportConfig,
    ) -> None:
        self._rank = rank
        self._heads = list(kv_heads)
        self._sink = sink
        self._puller = puller
        self._writers = writers
        self._config = config
        self._layers = layer_cells(sink.spec)

    async def borrow(self, order: BorrowOrder) -> Borrowed:
        """Raises nothing for what the holder does or does not do."""
        landed = _Landed(len(self._layers) * len(self._heads))
        lenders = self._lenders(order.holder)
        if not lenders:
            return Borrowed(0, 0, f"{order.holder.instance} lacks heads of {self._heads}")
        try:
            async with asyncio.timeout(order.timeout_s):
                for stretch in self._stretches(len(order.names)):
                    await self._take_stretch(order, stretch, lenders, landed)
                    if landed.num_whole(stretch.stop) < stretch.stop:
                        landed.why = landed.why or "some of it is not there any more"
                        break
        except TimeoutError:
            landed.why = f"{order.holder.instance} took more than {order.timeout_s:.3f} s"
        except PullFailed as failed:
            landed.why = str(failed)
        finally:
            await _ended(landed.jobs)
        return Borrowed(landed.num_whole(len(order.names)), landed.num_bytes, landed.why)

    def _lenders(self, holder: Holder) -> dict[Lender, list[int]]:
        """Whom to ask for which heads; nobody where one head is not to be had."""
        heads: dict[Lender, list[int]] = defaultdict(list)
        for head in self._heads:
            lender = holder.lender(head, self._rank)
            if lender is None:
                return {}
            heads[lender].append(head)
        return heads

    def _stretches(self, num_blocks: int) -> Iterator[range]:
        """As many blocks as one call may be asked for."""
        block_bytes = sum(layer.block_bytes(len(self._heads)) for layer in self._layers)
        most = max(1, self._config.max_call_bytes // block_bytes)
        for start in range(0, num_blocks, most):
            yield range(start, min(num_blocks, start + most))

    async def _take_stretch(
        self,
        order: BorrowOrder,
        stretch: range,
        lenders: dict[Lender, list[int]],
        landed: _Landed,
    ) -> None:
        async with asyncio.TaskGroup() as calls:
            failures: list[PullFailed] = []
            for lender, heads in lenders.items():
                pull = self._pull(order, stretch, lender, heads)
                calls.create_task(self._take(order, pull, landed, failures))
        if failures:
            raise failures[0]

    def _pull(
        self, order: BorrowOrder, stretch: range, lender: Lender, heads: Sequence[int]
    ) -> Pull:
        """Runs are in the order of their answers: some blocks in all layers, then some more."""
        layer_bytes = max(layer.block_bytes(len(heads)) for layer in self._layers)
        step = max(1, self._config.chunk_bytes // layer_bytes)
        step = min(step, max(1, len(stretch) // LEAST_GROUPS))
        step = max(step, -(-len(stretch) * len(self._layers) // MAX_RUNS))
        asked: list[CellRun] = []
        runs: list[CellRun] = []
        for first in range(0, len(stretch), step):
            count = min(step, len(stretch) - first)
            for layer in range(len(self._layers)):
                for there, place in ((asked, 0), (runs, stretch.start)):
                    at = place + first
                    run = CellRun(layer=layer, first_block=at, num_blocks=count, heads=heads)
                    there.append(run)
        request = FetchRequest(
            names=[order.names[at] for at in stretch],
            runs=asked,
            lacks=order.key.to_proto(),
            places=stretch,
            decode_rank=self._rank,
        )
        return Pull(lender, request, runs)

    async def _take(
        self, order: BorrowOrder, pull: Pull, landed: _Landed, failures: list[PullFailed]
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with aclosing(self._puller.fetch(pull)) as parts:
                async for run, part in parts:
                    ids = order.block_ids[run.first_block : run.first_block + run.num_blocks]
                    job = loop.run_in_executor(self._writers, self._write, run, ids, part)
                    landed.jobs.add(job)
                    landed.count(run.layer, await asyncio.shield(job))
                    landed.jobs.discard(job)
        except PullFailed as failed:
            failures.append(failed)

    def _write(self, run: CellRun, block_ids: Sequence[int], part: FetchedCells) -> _Written:
        """In a writing thread: every cell that is what its digest says goes into its block."""
        layer, heads = self._layers[run.layer], list(run.heads)
        num_planes = len(layer.planes)
        num_rows = run.num_blocks * len(heads) * num_planes
        if len(part.digests) != 8 * num_rows or len(part.payload) != num_rows * layer.cell_bytes:
            return _Written((), 0)
        cells = np.frombuffer(part.payload, dtype=np.uint8)
        proofs = np.frombuffer(part.digests, dtype="<u8").astype(np.uint64, copy=False)
        bad = self._sink.scatter_cells(run.layer, block_ids, heads, cells, proofs)
        spoiled = {row // num_planes for row in bad.tolist()}
        blocks = range(run.first_block, run.first_block + run.num_blocks)
        places = [(block, head) for block in blocks for head in heads]
        good = [place for at, place in enumerate(places) if at not in spoiled]
        return _Written(good, len(good) * num_planes * layer.cell_bytes)


async def _ended(jobs: set["asyncio.Future[_Written]"]) -> None:
    """Wait for threads that write, whoever cancels the waiting."""
    cancelled = False
    while running := {job for job in jobs if not job.done()}:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
