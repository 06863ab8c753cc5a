"""Fetches damaged cells again: over their link, by a call of its own, from whoever else has them.

`repairs` decides whose turn it is; this asks, and lets what comes back land like everything else:
verified by a copying thread, and only then written. When nobody is left to ask, the transfer is a
loss of data, and says which cell could not be had.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import aclosing

import structlog

from protos.transfer_pb2 import CellRun, CellsAgain, Frame
from transport.arrivals import Arrivals
from transport.cell_runs import Cell, runs_of
from transport.cells_servicer import MAX_RUNS
from transport.clock import Clock
from transport.config import TransportConfig
from transport.lander import Lander
from transport.landing import Landed, Landing
from transport.orders import Code, Lender
from transport.pull import Names, Pull, Puller, PullFailed, by_name, by_shipment
from transport.quarantine import LinkName
from transport.reaper import each
from transport.repairs import Ask, Offers, Source

log = structlog.get_logger()

MAX_PULLS = 8  # at once, of one transfer: more would crowd its lender's line, and be refused


class Mender:
    def __init__(
        self,
        arrivals: Arrivals,
        lander: Lander,
        puller: Puller,
        clock: Clock,
        config: TransportConfig,
    ) -> None:
        self._arrivals = arrivals
        self._lander = lander
        self._puller = puller
        self._clock = clock
        self._config = config
        self._counts = arrivals.counts
        self._tasks: set[asyncio.Task[None]] = set()

    def tick(self) -> None:
        """Ask again for what nobody has sent in time."""
        each(self._arrivals.live.values(), self.mend)

    def mend(self, landing: Landing) -> None:
        """Ask for every cell that is due; fails the transfer when one cannot be had."""
        incoming, now = landing.incoming, self._clock.now()
        if incoming.over or not len(incoming.repairs):
            return
        asks: dict[Ask, list[Cell]] = defaultdict(list)
        offers = {rank: self._offers(landing, rank) for rank in incoming.pairs}
        most_called = MAX_RUNS * (MAX_PULLS - len(landing.pulls))
        for cell, wanted in incoming.repairs.due(now - self._config.repair_wait_s):
            ask = wanted.next_ask(cell.block, offers[wanted.rank])
            if ask is None:
                reason = f"{wanted.reason}, after {wanted.num_asks} attempts to fetch it again"
                self._arrivals.fail(landing, Code.DATA_LOSS, reason)
                return
            if ask.source is not Source.LINK:
                if most_called <= 0:
                    continue
                most_called -= 1
            wanted.book(ask, now)
            asks[ask].append(cell)
        for ask, cells in asks.items():
            self._ask(landing, ask, cells)

    def take(
        self,
        landing: Landing,
        rank: int,
        run: CellRun,
        digests: bytes,
        payload: memoryview | None,
        lender: Lender | None = None,
    ) -> "asyncio.Future[Landed] | None":
        """Let cells that were asked for land; None when they are not wanted (any more). `lender`
        gave them by a call.
        """
        cells = landing.incoming.offer_again(rank, run)
        if not cells:
            return None
        num_bytes = payload.nbytes if payload is not None else 0
        landing.book.fetched(rank, cells)
        job = self._lander.land(landing, [run], digests, payload)

        def landed(done: asyncio.Future[Landed]) -> None:
            landing.jobs.remove(done)
            cancelled = asyncio.CancelledError("the worker stops")
            error = cancelled if done.cancelled() else done.exception()
            if error is not None or not done.result().written:
                landing.book.not_mended(rank, cells)
            if error is not None:
                reason = f"layer {run.layer} was not written: {error!r}"
                landing.incoming.fail(Code.INTERNAL, reason)
            elif done.result().written:
                bad = done.result().bad
                self._counts.repaired_cells += len(cells) - len(bad)
                landing.book.mended(rank, cells, bad)
                if lender is not None:
                    self._arrivals.watch.lent(lender, len(cells), len(bad))
                    good = [cell for cell in cells if cell not in bad]
                    landing.book.borrowed(landing.order.key, lender, good)
                landing.incoming.landed_again(rank, cells, bad, num_bytes)
            self._arrivals.review(landing)

        job.add_done_callback(landed)
        return job

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _offers(self, landing: Landing, rank: int) -> Offers:
        config, order = self._config, landing.order
        pair, port = landing.incoming.pairs[rank], landing.ports.get(rank)
        lender = self._source(landing, rank)
        answers = lender is not None and not self._arrivals.watch.against(lender, order.key)
        calls = config.max_calls if answers else 0
        fit = port is not None and port.open
        if calls or order.holders:  # else a link that damages is better than none
            fit = fit and pair.num_damaged < config.max_link_damages
            fit = fit and port is not None and not port.retired
        return Offers(
            link_asks=config.max_link_asks if fit else 0,
            calls=calls,
            num_holders=len(order.holders),
            num_named=len(order.block_names) * landing.incoming.shape.parts,
        )

    def _ask(self, landing: Landing, ask: Ask, cells: Sequence[Cell]) -> None:
        key = landing.order.key
        if ask.source is Source.LINK:
            again = CellsAgain(runs=runs_of(cells))
            landing.ports[ask.rank].post(Frame(key=key.to_proto(), cells_again=again))
            self._counts.resent_cells += len(cells)
            return
        if ask.source is Source.CALL:
            lender = self._source(landing, ask.rank)
            assert lender is not None, f"{ask} without an address"
            for some in self._batches(landing, cells):
                pull = by_shipment(lender, key, runs_of(some), self._arrivals.identity.rank)
                self._start(landing, ask, pull, some)
        else:
            self._ask_holder(landing, ask, cells)

    def _ask_holder(self, landing: Landing, ask: Ask, cells: Sequence[Cell]) -> None:
        """Each of its ranks for the heads that it holds."""
        order, own_rank = landing.order, self._arrivals.identity.rank
        holder, shape = order.holders[ask.holder], landing.incoming.shape
        own_size = shape.block_size * shape.parts
        asked: dict[Lender | None, list[Cell]] = defaultdict(list)
        for cell in cells:
            asked[holder.lender(cell.head, own_rank)].append(cell)
        for lender, theirs in asked.items():
            if lender is None:
                why = f"lacks {theirs[0]}"
            elif holder.block_size not in (0, own_size):
                why = f"names blocks of {holder.block_size} tokens, not of {own_size}"
            else:
                why = self._arrivals.watch.against(lender, order.key)
            if why or lender is None:
                self._pass_over(landing, theirs, f"{holder.instance}: {why}")
                continue
            names = Names(order.block_names, shape.parts, own_size)
            for some in self._batches(landing, theirs):
                pull = by_name(lender, order.key, names, runs_of(some), own_rank)
                self._start(landing, ask, pull, some)

    def _batches(self, landing: Landing, cells: Sequence[Cell]) -> Iterator[list[Cell]]:
        """As many as one call may be asked for, one batch after another."""
        layers, most = landing.incoming.shape.layers, self._config.max_call_bytes
        batch, num_bytes = list[Cell](), 0
        for cell in sorted(cells):
            width = layers[cell.layer].block_bytes(1)
            if batch and (num_bytes + width > most or len(batch) == MAX_RUNS):
                yield batch
                batch, num_bytes = [], 0
            batch.append(cell)
            num_bytes += width
        if batch:
            yield batch

    def _pass_over(self, landing: Landing, cells: Sequence[Cell], why: str) -> None:
        """Who is not worth asking has been asked: the next one is, at once."""
        landing.incoming.repairs.end_call(cells, why)
        asyncio.get_running_loop().call_soon(self.mend, landing)

    def _source(self, landing: Landing, rank: int) -> Lender | None:
        """The prefill rank, if it can be called."""
        order, port = landing.order, landing.ports.get(rank)
        if rank >= len(order.source_addresses):
            return None
        worker = port.link.hello.prefill_worker if port is not None else ""
        address, epoch = order.source_addresses[rank], order.key.prefill_epoch
        return Lender(order.prefill_instance, rank, address, worker, epoch)

    def _start(self, landing: Landing, ask: Ask, pull: Pull, cells: Sequence[Cell]) -> None:
        if len(landing.pulls) >= MAX_PULLS:
            landing.incoming.repairs.put_off(cells, ask)
            return
        self._arrivals.watch.calls(pull.lender, landing.order.key)
        if pull.lender.worker:
            landing.lenders.add(LinkName.by_call(pull.lender))
        task = asyncio.create_task(self._pull(landing, ask.rank, pull, cells))
        for tasks in (self._tasks, landing.pulls):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: self.mend(landing))

    async def _pull(self, landing: Landing, rank: int, pull: Pull, cells: Sequence[Cell]) -> None:
        failure = ""
        jobs = []
        try:
            async with aclosing(self._puller.fetch(pull)) as parts:
                async for run, part in parts:
                    self._counts.pulled_cells += run.num_blocks * len(run.heads)
                    payload = memoryview(part.payload)
                    job = self.take(landing, rank, run, part.digests, payload, pull.lender)
                    jobs += [job] if job is not None else []
        except PullFailed as failed:
            failure = f"{cells[0]} was not to be had from {pull.lender.address}: {failed}"
            log.warning("pull_failed", transfer=str(landing.order.key), reason=failure)
        finally:
            try:
                if jobs:
                    await asyncio.wait(jobs)  # `gather` would cancel them: no end to who writes
            finally:
                landing.incoming.repairs.end_call(cells, failure)
