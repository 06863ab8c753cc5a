"""A deadline that ends at each stage of a request's life, over real calls: both workers are free of
it within half a second of it.

Steps are made slow, so that each stage lasts; when a deadline was met at another stage than was
meant, the next is later or earlier.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from model.checksum import ChecksumModel
from model.source import open_model
from protos import worker_pb2, worker_pb2_grpc
from tests.system.in_process import (
    DecodeWorker,
    PrefillWorker,
    decode_request,
    decode_worker,
    prefill_request,
    prefill_worker,
    work_request,
)
from tests.system.stages import FREED_S, PARAMS, STAGES, Said, hear, is_free
from transport.loopback_wire import LoopbackWire
from worker.admin import Doors
from worker.serving import serve_call

SOURCE = open_model("checksum")
STEP_S = 0.01
BETWEEN, LAST = "between the legs", "after the last token"
BY_PREFILL = ("queued", "prefilling", BETWEEN)  # what each leg shows of where a request is
BY_DECODE = ("queued", "transferring", "first token", "mid-stream", LAST)
# About where the middle of each stage is, from the call on.
GUESSES_S = dict(zip(STAGES, (0.2, 0.04, 0.3, 0.07, 0.14, 0.3, 1.0), strict=True))
TRIES = 12

Context = grpc.aio.ServicerContext[Any, Any]


class Served(worker_pb2_grpc.PrefillWorkerServicer, worker_pb2_grpc.DecodeWorkerServicer):
    """Both calls, as the sides answer them, over workers whose ranks are threads."""

    def __init__(self, prefill: PrefillWorker, decode: DecodeWorker) -> None:
        self._prefill, self._decode = prefill, decode

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: Context) -> None:
        assert self._prefill.prefilling is not None
        await serve_call(context, Doors(), "", "", self._prefill.prefilling.run(request))

    async def Decode(self, request: worker_pb2.DecodeRequest, context: Context) -> None:
        assert self._decode.decoding is not None
        events = self._decode.decoding.run(request, context.time_remaining())
        await serve_call(context, Doors(), "", "", events)


class Caller:
    """A client of both workers, which sets deadlines."""

    def __init__(
        self, channel: grpc.aio.Channel, prefill: PrefillWorker, decode: DecodeWorker
    ) -> None:
        self.workers = (prefill, decode)
        self._to_prefill: Any = worker_pb2_grpc.PrefillWorkerStub(channel)
        self._to_decode: Any = worker_pb2_grpc.DecodeWorkerStub(channel)
        self._number = 0

    async def call(self, stage: str, deadline_s: float | None) -> tuple[Said, Said, list[str]]:
        """What both legs said until they ended, and how each ended."""
        prefill, decode = self.workers
        self._number += 1
        work = work_request([(self._number * 31 + i * i) % 256 for i in range(100)], PARAMS)
        transfer_id = work.request_id.encode()
        sent, received, stirred = Said(), Said(), asyncio.Event()
        request = prefill_request(work, transfer_id, decode, 16)
        legs = [hear(self._to_prefill.Prefill(request, timeout=deadline_s), sent, stirred)]
        if stage != BETWEEN:
            call = self._to_decode.Decode(
                decode_request(work, transfer_id, prefill), timeout=deadline_s
            )
            legs.append(hear(call, received, stirred))
        ends = await asyncio.gather(*legs, return_exceptions=True)
        return sent, received, [_code(end) for end in ends]

    @property
    def free(self) -> bool:
        return all(map(is_free, self.workers))


def _code(end: BaseException | None) -> str:
    if isinstance(end, grpc.aio.AioRpcError):
        return end.code().name
    return "OK" if end is None else repr(end)


def furthest(stage: str, sent: Said, received: Said) -> str:
    """The last stage that a request has come to, of those of the leg that `stage` is about."""
    names = BY_PREFILL if stage in BY_PREFILL else BY_DECODE
    return [name for name in names if STAGES[name](sent, received)][-1]


@asynccontextmanager
async def caller(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Caller]:
    quick = ChecksumModel.forward

    def slow(self: ChecksumModel, *arguments: Any) -> Any:
        time.sleep(STEP_S)
        return quick(self, *arguments)

    monkeypatch.setattr(ChecksumModel, "forward", slow)
    wire = LoopbackWire()
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(prefill_worker(SOURCE, wire, num_blocks=24))
        decode = await stack.enter_async_context(decode_worker(SOURCE, wire, 2, num_blocks=24))
        server = grpc.aio.server()
        served = Served(prefill, decode)
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(served, server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(served, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        yield Caller(channel, prefill, decode)


@asynccontextmanager
async def full_pool(calling: Caller) -> AsyncIterator[None]:
    """Prompts that wait for a decode leg hold all of prefill's blocks but three."""
    prefill, _ = calling.workers
    holding = [asyncio.ensure_future(calling.call(BETWEEN, None)) for _ in range(3)]
    async with asyncio.timeout(10):
        while prefill.engine.books().held_requests < 3:
            await asyncio.sleep(0.005)
    try:
        yield
    finally:
        for each in holding:
            each.cancel()
        await asyncio.wait(holding)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_deadline_at_any_stage_frees_both_workers_in_half_a_second(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline_s, found = GUESSES_S[stage], list[str]()
    order = list(STAGES)
    async with caller(monkeypatch) as calling:
        while stage not in found and len(found) < TRIES:
            async with AsyncExitStack() as stack:
                if stage == "queued":
                    await stack.enter_async_context(full_pool(calling))
                ends_at = time.monotonic() + deadline_s
                sent, received, ends = await calling.call(stage, deadline_s)
                found.append(furthest(stage, sent, received))
            async with asyncio.timeout(10):
                while not calling.free:
                    await asyncio.sleep(0.001)
            assert time.monotonic() - ends_at <= FREED_S
            if stage == found[-1] == LAST:
                assert set(ends) == {"OK"}  # and nobody waits for the deadline any more
                await asyncio.sleep(max(0.0, ends_at - time.monotonic()))
                assert calling.free
            elif found[-1] != LAST:
                # One worker notices first, and its other end may hear of it before its own time.
                assert (
                    {"DEADLINE_EXCEEDED"} <= set(ends) <= {"DEADLINE_EXCEEDED", "CANCELLED", "OK"}
                )
            deadline_s *= 1.3 if order.index(found[-1]) < order.index(stage) else 0.8
        assert found[-1] == stage, f"a deadline was met at {found}"
        for worker in calling.workers:
            await worker.settled()
