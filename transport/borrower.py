"""Whole blocks taken from another worker by their names, for a rank that would compute them else.

    asked     a stretch of blocks at a time, each head of the rank that holds it
    landing   what comes is verified, and only what is as it was cached is written into our blocks
    counted   blocks from the first on whose every cell is there; a gap ends it

Our blocks belong to nobody else meanwhile: `borrow` returns when no thread writes to them any more,
whether all has come, the holder has failed, or the time is up. What comes damaged is held against
the rank that gave it; who is in quarantine for it is not asked at all. Every cell is in the books.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.crew import at_once
from kvcache.cells import digests_from_bytes
from kvcache.head_map import HeadInterval
from kvcache.ledger import Ledger
from protos import rank_pb2
from protos.transfer_pb2 import CellRun, FetchedCells, FetchRequest
from transport.books import ReceivingBook
from transport.cell_runs import Cell, cells_of
from transport.cells_servicer import MAX_RUNS
from transport.config import TransportConfig
from transport.fences import ended
from transport.landing_cells import CellSink
from transport.orders import Holder, Identity, Lender, ShipmentKey
from transport.pull import Pull, Puller, PullFailed
from transport.quarantine import LinkName
from transport.shipment import Shape
from transport.watch import Watch

LEAST_GROUPS = 4  # of blocks, of one call: the earlier ones are whole while the later ones come


@dataclass(frozen=True, slots=True)
class BorrowOrder:
    """For one rank: its heads of these blocks, which have `names` at the holder, too."""

    key: ShipmentKey  # of the fetch: without a decode epoch
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


Lenders = Mapping[Lender, Sequence[int]]  # and the heads that each is asked for
Job = asyncio.Future[frozenset[Cell]]  # a thread that writes; what it found damaged


@dataclass(slots=True)
class _Landed:
    """What of one order has come, and what is being written."""

    order: BorrowOrder
    book: ReceivingBook
    came_BLH: NDArray[np.bool_]  # cells, whatever they were; what comes again is not wanted
    here_BLH: NDArray[np.bool_]  # the good ones
    num_bytes: int = 0
    why: str = ""
    jobs: dict[Job, tuple[Lender, list[Cell]]] = field(default_factory=dict)

    @property
    def num_whole(self) -> int:
        return int(np.cumprod(self.here_BLH.all(axis=(1, 2))).sum())

    def claim(self, run: CellRun, columns: Sequence[int]) -> bool:
        """Whether none of these cells, in these columns, has come before; then they have now."""
        blocks = slice(run.first_block, run.first_block + run.num_blocks)
        if self.came_BLH[blocks, run.layer][:, columns].any():
            return False
        self.came_BLH[blocks, run.layer, columns] = True
        return True

    def is_whole(self, blocks: range) -> bool:
        return bool(self.here_BLH[blocks.start : blocks.stop].all())


class Borrower:
    """One rank's."""

    def __init__(
        self,
        identity: Identity,
        kv_heads: HeadInterval,
        sink: CellSink,
        puller: Puller,
        writers: Executor,
        config: TransportConfig,
        watch: Watch,
        ledger: Ledger,
    ) -> None:
        self._rank = identity.rank
        self._heads = list(kv_heads)
        self._sink = sink
        self._puller = puller
        self._writers = writers
        self._config = config
        self._watch = watch
        self._ledger = ledger
        self._layers = Shape.of(sink.spec, 1).layers

    async def borrow(self, order: BorrowOrder) -> Borrowed:
        """Raises nothing for what the holder does or does not do."""
        lenders = self._lenders(order.holder)
        why = self._against(order, lenders)
        if why:
            return Borrowed(0, 0, why)
        shape_BLH = (len(order.names), len(self._layers), len(self._heads))
        none_BLH = np.zeros(shape_BLH, np.bool_)
        landed = _Landed(order, self._book(order, lenders), none_BLH, none_BLH.copy())
        who = order.holder.worker or order.holder.instance
        for lender in lenders:
            self._watch.calls(lender, order.key)
        try:
            async with asyncio.timeout(order.timeout_s):
                await self._take_all(landed, lenders)
        except TimeoutError:
            landed.why = landed.why or f"{who} took more than {order.timeout_s:.3f} s"
        except PullFailed as failed:
            landed.why = landed.why or str(failed)
        finally:
            try:
                await ended(landed.jobs)
            finally:
                self._close(landed, lenders)
        if landed.num_whole < len(order.names):
            landed.why = landed.why or f"some of it is not at {who} any more"
        return Borrowed(landed.num_whole, landed.num_bytes, landed.why)

    def _lenders(self, holder: Holder) -> Lenders:
        """Whom to ask for which heads; nobody where one head is not to be had."""
        heads: dict[Lender, list[int]] = defaultdict(list)
        for head in self._heads:
            lender = holder.lender(head, self._rank)
            if lender is None:
                return {}
            heads[lender].append(head)
        return heads

    def _against(self, order: BorrowOrder, lenders: Lenders) -> str:
        """Why nobody is asked; empty when they are."""
        holder = order.holder
        if not lenders:
            return f"{holder.instance} lacks heads of {self._heads}"
        for lender in lenders:
            if reason := self._watch.against(lender, order.key):
                return f"{holder.worker} rank {lender.rank} is in quarantine: {reason}"
        return ""

    def _book(self, order: BorrowOrder, lenders: Lenders) -> ReceivingBook:
        shape = Shape.of(self._sink.spec, len(order.names) * self._sink.spec.block_size)
        heads = {lender.rank: theirs for lender, theirs in lenders.items()}
        book = ReceivingBook(self._ledger, order.key, heads, shape, 0, order.holder.instance)
        book.bound(0, order.block_ids)
        return book

    def _close(self, landed: _Landed, lenders: Lenders) -> None:
        """No thread writes any more: say what has come."""
        for job in list(landed.jobs):
            self._settle(landed, job)
        key, whole = landed.order.key, landed.num_whole
        landed.book.came(whole)
        links = [LinkName.by_call(lender) for lender in lenders if lender.worker]
        self._watch.ended(links, key, committed=whole == len(landed.order.names))

    async def _take_all(self, landed: _Landed, lenders: Lenders) -> None:
        """Stretch by stretch, up to the first one with a gap. Raises PullFailed."""
        for stretch in self._stretches(len(landed.order.names)):
            failures: list[PullFailed] = []
            async with asyncio.TaskGroup() as calls:
                for lender, heads in lenders.items():
                    pull = self._pull(landed.order, stretch, lender, heads)
                    calls.create_task(self._take(pull, landed, failures))
            if failures:
                raise failures[0]
            if not landed.is_whole(stretch):
                return

    def _stretches(self, num_blocks: int) -> Iterator[range]:
        """As many blocks as one call may be asked for."""
        block_bytes = sum(layer.block_bytes(len(self._heads)) for layer in self._layers)
        most = max(1, self._config.max_call_bytes // block_bytes)
        for start in range(0, num_blocks, most):
            yield range(start, min(num_blocks, start + most))

    def _pull(
        self, order: BorrowOrder, stretch: range, lender: Lender, heads: Sequence[int]
    ) -> Pull:
        """Runs are in the order of their answers: some blocks in all layers, then some more."""
        layer_bytes = max(layer.block_bytes(len(heads)) for layer in self._layers)
        step = max(1, self._config.chunk_bytes // layer_bytes)
        step = min(step, max(1, len(stretch) // LEAST_GROUPS))
        most_steps = max(1, MAX_RUNS // len(self._layers))
        step = max(step, -(-len(stretch) // most_steps))
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

    async def _take(self, pull: Pull, landed: _Landed, failures: list[PullFailed]) -> None:
        loop, order, lender = asyncio.get_running_loop(), landed.order, pull.lender
        try:
            async with aclosing(self._puller.fetch(pull)) as parts:
                async for run, part in parts:
                    if not landed.claim(run, [head - self._heads[0] for head in run.heads]):
                        continue
                    ids = order.block_ids[run.first_block : run.first_block + run.num_blocks]
                    cells = list(cells_of(run))
                    landed.book.fetched(lender.rank, cells)
                    job = loop.run_in_executor(self._writers, self._write, run, ids, part)
                    landed.jobs[job] = lender, cells
                    await asyncio.shield(job)
                    self._settle(landed, job)
        except PullFailed as failed:
            failures.append(failed)

    def _settle(self, landed: _Landed, job: Job) -> None:
        """A thread has verified some cells, and written the good ones."""
        lender, cells = landed.jobs.pop(job)
        if job.cancelled() or job.exception() is not None:
            landed.book.not_mended(lender.rank, cells)
            return
        bad = job.result()
        self._watch.lent(lender, len(cells), len(bad))
        if bad:
            who = f"{lender.worker or lender.instance} rank {lender.rank}"
            landed.why = landed.why or f"{min(bad)} came damaged from {who}"
        good = [cell for cell in cells if cell not in bad]
        landed.book.mended(lender.rank, cells, bad)
        landed.book.borrowed(landed.order.key, lender, good)
        for cell in good:
            landed.here_BLH[cell.block, cell.layer, cell.head - self._heads[0]] = True
            landed.num_bytes += self._layers[cell.layer].block_bytes(1)

    def _write(self, run: CellRun, block_ids: Sequence[int], part: FetchedCells) -> frozenset[Cell]:
        """In a writing thread: every cell that is what its digest says goes into its block.
        Returns the others.
        """
        layer, heads = self._layers[run.layer], list(run.heads)
        num_planes, every = len(layer.planes), list(cells_of(run))
        num_rows = len(every) * num_planes
        if len(part.digests) != 8 * num_rows or len(part.payload) != num_rows * layer.cell_bytes:
            return frozenset(every)
        cells = np.frombuffer(part.payload, dtype=np.uint8)
        proofs = digests_from_bytes(part.digests)
        bad = at_once(self._sink.scattering(run.layer, block_ids, heads, cells, proofs))
        return frozenset(every[row // num_planes] for row in bad.tolist())
