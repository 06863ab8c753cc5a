"""What operators and tests may ask of a worker: look into its books, drain it, empty its cache."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc

from engine.engine import Engine
from protos import rank_pb2, worker_pb2, worker_pb2_grpc
from transport.orders import Identity
from transport.watch import Watch
from worker.ledgers import ReadLedgers
from worker.quarantines import reports_of
from worker.refusal import Context

RankReports = Callable[[], Awaitable[Sequence[rank_pb2.RankReport]]]


class Doors:
    """Whether the worker still takes requests. One per worker; closing it is final."""

    def __init__(self) -> None:
        self.open = True

    def close(self) -> None:
        self.open = False


class AdminServicer(worker_pb2_grpc.WorkerAdminServicer):
    def __init__(
        self,
        identity: Identity,
        role: str,
        engine: Engine,
        doors: Doors,
        reports: RankReports,
        ledgers: ReadLedgers,
    ) -> None:
        self._identity = identity
        self._role = role
        self._engine = engine
        self._doors = doors
        self._reports = reports
        self._ledgers = ledgers

    async def Inspect(
        self, request: worker_pb2.InspectRequest, context: Context
    ) -> worker_pb2.InspectResponse:
        try:
            self._engine.check()
        except AssertionError as error:
            await context.abort(grpc.StatusCode.INTERNAL, f"the books do not balance: {error}")
        books, stats = self._engine.books(), self._engine.stats()
        reports = await self._reports()
        return worker_pb2.InspectResponse(
            name=self._identity.worker,
            instance=self._identity.instance,
            epoch=self._identity.epoch,
            role=self._role,
            pool=worker_pb2.PoolBooks(
                total_blocks=books.total_blocks,
                free_blocks=books.free_blocks,
                cached_blocks=books.cached_blocks,
                used_blocks=books.used_blocks,
                reserved_blocks=books.reserved_blocks,
                promised_blocks=books.promised_blocks,
            ),
            waiting_requests=books.waiting_requests,
            running_requests=books.running_requests,
            held_requests=books.held_requests,
            open_transfers=sum(report.open_transfers for report in reports),
            asyncio_tasks=sum(report.asyncio_tasks for report in reports),
            open_files=sum(report.open_files for report in reports),
            rank_pids=[report.pid for report in reports],
            steps=stats.steps,
            preemptions=stats.preemptions,
            draining=not self._doors.open,
        )

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        self._doors.close()
        return worker_pb2.DrainResponse()

    async def FlushCache(
        self, request: worker_pb2.FlushCacheRequest, context: Context
    ) -> worker_pb2.FlushCacheResponse:
        return worker_pb2.FlushCacheResponse(num_blocks=self._engine.flush_cache())

    async def ReadLedgers(
        self, request: worker_pb2.LedgerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.LedgerPart]:
        self._engine.take_stock()
        async for part in self._ledgers(request):
            yield part


def rank_report(open_transfers: int, watch: Watch | None = None) -> rank_pb2.RankReport:
    """What this process, one rank, has open right now."""
    return rank_pb2.RankReport(
        pid=os.getpid(),
        open_transfers=open_transfers,
        asyncio_tasks=len(asyncio.all_tasks()),
        open_files=len(os.listdir("/proc/self/fd")),
        quarantines=reports_of(watch.standing()) if watch is not None else (),
    )
