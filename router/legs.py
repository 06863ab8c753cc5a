"""The two calls that serve one attempt: prefill's and decode's, read into one queue.

    open     both calls are made at once, under a transfer id used only here
    read     `next` gives whatever either leg says, and how each of them ends, once
    closed   both calls are cancelled and their readers have ended; workers free what they held

A leg also ends when its worker's lease lapses, which a silent connection never says.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self, cast

import grpc.aio
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from prefix_index.index import WorkerRecord
from protos import worker_pb2 as wpb
from protos import worker_pb2_grpc as rpc
from router.errors import RequestFailed
from router.worker import Worker
from transport.plain_words import plain_words

UNREAD_EVENTS = 256  # of both legs; a client that reads slowly then holds its workers back
STATUS_DETAILS = "grpc-status-details-bin"


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a leg ended. `connected` says whether its worker still answered then, `heard` what gRPC
    said in place of a worker: for logs.
    """

    role: Role
    worker: Worker
    code: grpc.StatusCode
    details: str
    connected: bool = True
    retry_after_s: float | None = None
    heard: str = ""

    @property
    def ok(self) -> bool:
        return self.code is grpc.StatusCode.OK

    def __str__(self) -> str:
        said = f": {self.details}" if self.details else ""
        return f"{self.worker.name} failed with {self.code.name}{said}"


Said = wpb.PrefillEvent | wpb.DecodeEvent | Ended


@dataclass(frozen=True, slots=True)
class Work:
    """What both legs are asked for. `prefill` is None where decode computes the prompt."""

    request: wpb.WorkRequest
    prefill: Worker | None
    decode: Worker
    wires: tuple[str, ...]  # the first is meant; another only where that is in quarantine
    transfer_id: bytes
    attempt: int
    max_chunk_tokens: int = 0
    holders: tuple[WorkerRecord, ...] = ()  # others that hold some of the prompt's blocks
    fetch: wpb.Fetch | None = None  # what prefill takes from another worker first
    holder: Worker | None = None  # that worker

    def prefill_request(self) -> wpb.PrefillRequest:
        assert self.prefill is not None
        target = self.decode.record
        request = wpb.PrefillRequest(
            transfer_id=self.transfer_id,
            attempt=self.attempt,
            expected_instance=self.prefill.record.instance,
            target=wpb.DecodeTarget(
                worker=target.name,
                instance=target.instance,
                epoch=target.epoch,
                rank_addresses=target.rank_addresses,
                kv_head_starts=[start for start, _ in target.kv_intervals],
                kv_head_stops=[stop for _, stop in target.kv_intervals],
                block_size=target.manifest.block_size,
            ),
            wire=self.wires[0],
            max_chunk_tokens=self.max_chunk_tokens,
            other_wires=self.wires[1:],
            fetch=self.fetch,
        )
        _copy(self.request, request.work)
        return request

    def decode_request(self) -> wpb.DecodeRequest:
        request = wpb.DecodeRequest(
            expected_instance=self.decode.record.instance, attempt=self.attempt
        )
        _copy(self.request, request.work)
        if self.prefill is not None:
            source = self.prefill.record
            request.transfer_id = self.transfer_id
            request.holders.extend(map(holder_of, self.holders))
            request.source.CopyFrom(
                wpb.PrefillSource(
                    worker=source.name,
                    instance=source.instance,
                    epoch=source.epoch,
                    kv_head_starts=[start for start, _ in source.kv_intervals],
                    kv_head_stops=[stop for _, stop in source.kv_intervals],
                    block_size=source.manifest.block_size,
                    rank_addresses=source.rank_addresses,
                    wires=self.wires,
                )
            )
        return request


def _copy(work: wpb.WorkRequest, into: wpb.WorkRequest) -> None:
    """As CopyFrom, for which a long prompt takes forty times as long as for MergeFrom."""
    for known, value in work.ListFields():
        empty = getattr(into, known.name)
        if hasattr(empty, "MergeFrom"):
            empty.MergeFrom(value)
        else:
            setattr(into, known.name, value)


def holder_of(record: WorkerRecord) -> wpb.Holder:
    return wpb.Holder(
        instance=record.instance,
        rank_addresses=record.rank_addresses,
        kv_head_starts=[start for start, _ in record.kv_intervals],
        kv_head_stops=[stop for _, stop in record.kv_intervals],
        block_size=record.manifest.block_size,
        worker=record.name,
        epoch=record.epoch,
    )


class _Call(Protocol):
    """What this file needs of a `grpc.aio` server-streaming call."""

    def cancel(self) -> bool: ...

    def __aiter__(self) -> AsyncIterator[Any]: ...


class Leg:
    """One call and the task that reads it."""

    def __init__(
        self, role: Role, worker: Worker, call: _Call, queue: "asyncio.Queue[Said | None]"
    ) -> None:
        self.role = role
        self.worker = worker
        self._call = call
        self._queue = queue
        self._lost = ""
        worker.legs.add(self)
        self._reader = asyncio.create_task(self._read(), name=f"{role.value}-leg-{worker.name}")

    def lose(self, reason: str) -> None:
        """End the leg as if its worker had said UNAVAILABLE."""
        self._lost = self._lost or reason
        self._call.cancel()

    def cancel(self) -> None:
        """End the leg; nothing more is heard of it."""
        self._call.cancel()
        self._reader.cancel()

    async def closed(self) -> None:
        if not self._reader.done():
            await asyncio.wait([self._reader])

    async def _read(self) -> None:
        try:
            await self._queue.put(await self._until_end())
        finally:
            self.worker.legs.discard(self)

    async def _until_end(self) -> Ended:
        try:
            async for event in self._call:
                await self._queue.put(event)
        except grpc.aio.AioRpcError as error:
            heard = error.details() or ""
            details = plain_words(heard)
            return Ended(
                self.role,
                self.worker,
                error.code(),
                details,
                connected=self.worker.connected,
                retry_after_s=retry_hint(error),
                heard=heard if heard != details else "",
            )
        except asyncio.CancelledError:
            reader = asyncio.current_task()
            if not self._lost or reader is None or reader.cancelling():
                raise  # the attempt is being closed
            return _unreachable(self.role, self.worker, self._lost)
        return Ended(self.role, self.worker, grpc.StatusCode.OK, "")


class Legs:
    """An async context manager around the calls of one attempt."""

    def __init__(self, work: Work, remaining_s: float) -> None:
        self._work = work
        self._remaining_s = remaining_s
        self._queue: asyncio.Queue[Said | None] = asyncio.Queue(UNREAD_EVENTS)
        self._legs: dict[Role, Leg] = {}
        self._interruption: RequestFailed | None = None

    async def __aenter__(self) -> Self:
        """Decode first: it has to reserve before prefill can ship."""
        work = self._work
        self._open(Role.DECODE, work.decode, rpc.DecodeWorkerStub, work.decode_request())
        if work.prefill is not None:
            self._open(Role.PREFILL, work.prefill, rpc.PrefillWorkerStub, work.prefill_request())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        for leg in self._legs.values():
            await leg.closed()

    def _open(
        self,
        role: Role,
        worker: Worker,
        stub: Callable[[grpc.aio.Channel], Any],
        request: wpb.PrefillRequest | wpb.DecodeRequest,
    ) -> None:
        name = role.value.capitalize()
        if name not in worker.calls:
            worker.calls[name] = getattr(stub(worker.channel), name)
        try:
            call: _Call = worker.calls[name](request, timeout=self._remaining_s)
        except grpc.aio.UsageError:  # the worker went since it was chosen
            self._queue.put_nowait(_unreachable(role, worker, "its channel is closed"))
        else:
            self._legs[role] = Leg(role, worker, call, self._queue)

    async def next(self, timeout_s: float) -> Said | None:
        """The next event of either leg, or None when neither says anything for `timeout_s`."""
        said = await self._get(timeout_s)
        if self._interruption is not None:
            raise self._interruption
        return said

    def next_if_there(self) -> Said | None:
        """What either leg has said already."""
        if self._interruption is not None or self._queue.empty():
            return None
        return self._queue.get_nowait()

    async def _get(self, timeout_s: float) -> Said | None:
        if not self._queue.empty():
            return self._queue.get_nowait()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        except TimeoutError:
            return None

    def interrupt(self, failure: RequestFailed) -> None:
        """End both legs now, even while the client does not read; `next` raises `failure`."""
        self._interruption = failure
        self.cancel()
        if not self._queue.full():
            self._queue.put_nowait(None)

    def cancel(self, role: Role | None = None) -> None:
        """End one leg, or both."""
        for leg in self._legs.values():
            if role in (None, leg.role):
                leg.cancel()


def _unreachable(role: Role, worker: Worker, reason: str) -> Ended:
    return Ended(role, worker, grpc.StatusCode.UNAVAILABLE, reason, connected=False)


def retry_hint(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds after which the same call may pass, where the worker said so."""
    metadata: Iterable[tuple[str, bytes]] = cast(Any, error.trailing_metadata() or ())
    for key, value in metadata:
        if key == STATUS_DETAILS:
            for detail in Status.FromString(value).details:
                retry = RetryInfo()
                if detail.Unpack(retry):
                    delay: float = retry.retry_delay.ToTimedelta().total_seconds()
                    return delay
    return None
