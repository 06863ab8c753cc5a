"""The ledgers of running workers, asked for over their admin service.

Workers are asked twice. A transfer that had ended in the numbers of the first round is in every
ledger of the second; one that ended between is only held against what is there.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import grpc.aio
import numpy as np

from kvcache.ledger_row import ROW, Extract, Origin
from prefix_index.index import WorkerRecord
from protos.worker_pb2 import LedgerPart, LedgerRequest
from protos.worker_pb2_grpc import WorkerAdminStub
from transport.grpc_options import channel_options

READ_TIMEOUT_S = 30.0
Answer = dict[Origin, tuple[int, Extract]]  # by rank: the last number, and the rows


async def read_workers(workers: Sequence[WorkerRecord]) -> tuple[list[Extract], list[str]]:
    """The ledgers of all ranks that answer, and why others do not."""
    numbers = await asyncio.gather(*(_read(worker, only_numbers=True) for worker in workers))
    before = {
        origin: last
        for answer in numbers
        if not isinstance(answer, str)
        for origin, (last, _) in answer.items()
    }
    answers = await asyncio.gather(*(_read(worker) for worker in workers))
    extracts, missing = [], []
    for worker, answer in zip(workers, answers, strict=True):
        if isinstance(answer, str):
            missing.append(f"{worker.name} does not answer: {answer}")
            continue
        for origin, (_, extract) in answer.items():
            extracts.append(replace(extract, common_seq=before.get(origin, 0)))
    return extracts, missing


async def _read(worker: WorkerRecord, *, only_numbers: bool = False) -> Answer | str:
    """By rank: the last number, and the rows; or why there are none."""
    parts: dict[Origin, list[LedgerPart]] = {}
    request = LedgerRequest(only_numbers=only_numbers)
    async with grpc.aio.insecure_channel(worker.address, options=channel_options()) as channel:
        try:
            call = WorkerAdminStub(channel).ReadLedgers(request, timeout=READ_TIMEOUT_S)
            async for part in call:
                whose = (part.worker, part.instance, part.epoch, part.role, part.rank, part.tp)
                parts.setdefault(Origin(*whose), []).append(part)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return {origin: (some[0].last_seq, _joined(origin, some)) for origin, some in parts.items()}


def _joined(origin: Origin, parts: Sequence[LedgerPart]) -> Extract:
    rows = np.frombuffer(b"".join(part.rows for part in parts), dtype=ROW)
    return Extract(origin, rows, parts[0].first_seq)


def absent_ranks(origins: Sequence[Origin]) -> list[str]:
    """Ranks of lives of which another rank is here."""
    lives = {(o.worker, o.instance, o.tp) for o in origins}
    there = {(o.worker, o.instance, o.rank) for o in origins}
    return [
        f"the ledger of {worker} rank {rank} is not here"
        for worker, instance, tp in sorted(lives)
        for rank in range(tp)
        if (worker, instance, rank) not in there
    ]
