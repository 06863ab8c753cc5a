"""The ledgers of a worker: one a rank, as its settings want it, and how they are read from afar."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import grpc.aio
import structlog

from kvcache.ledger import Ledger
from kvcache.ledger_pages import PageConfig
from kvcache.ledger_row import Origin
from protos.rank_pb2_grpc import RankLifeStub
from protos.worker_pb2 import LedgerPart, LedgerRequest
from transport.orders import Identity
from worker.settings import WorkerSettings

log = structlog.get_logger()

PART_BYTES = 1 << 20  # whole rows
READ_TIMEOUT_S = 10.0

ReadLedgers = Callable[[LedgerRequest], AsyncIterator[LedgerPart]]


def open_ledger(settings: WorkerSettings, identity: Identity, role: str) -> Ledger:
    """Raises OSError where the folder cannot be written to."""
    me = identity
    origin = Origin(me.worker, me.instance, me.epoch, role, me.rank, settings.tp)
    config = PageConfig(folder=settings.ledger_dir, num_kept=settings.ledger_pages)
    return Ledger(
        origin, config, lambda error: log.warning("ledger_page_not_in_folder", reason=str(error))
    )


def parts_of(ledger: Ledger, request: LedgerRequest) -> Iterator[LedgerPart]:
    """What one rank answers: at least one part, with or without rows."""
    origin, first_seq, rows = ledger.origin, 0, b""
    if not request.only_numbers:
        extract = ledger.extract(request.since)
        first_seq, rows = extract.first_seq, extract.rows.tobytes()
    for start in range(0, max(1, len(rows)), PART_BYTES):
        yield LedgerPart(
            worker=origin.worker,
            instance=origin.instance,
            epoch=origin.epoch,
            role=origin.role,
            rank=origin.rank,
            tp=origin.tp,
            first_seq=first_seq,
            last_seq=ledger.num_rows,
            rows=rows[start : start + PART_BYTES],
        )


def reading(ledger: Ledger, others: Sequence[grpc.aio.Channel]) -> ReadLedgers:
    """All ranks' ledgers, rank 0's first. A rank that does not answer is left out, and missed."""

    async def read(request: LedgerRequest) -> AsyncIterator[LedgerPart]:
        for part in parts_of(ledger, request):
            yield part
        for rank, channel in enumerate(others, start=1):
            try:
                call = RankLifeStub(channel).ReadLedger(request, timeout=READ_TIMEOUT_S)
                async for part in call:
                    yield part
            except grpc.aio.AioRpcError as error:
                log.warning("ledger_not_read", rank=rank, code=error.code().name)

    return read
