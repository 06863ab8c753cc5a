"""A request cancelled at each stage of its life: both workers are free of it within half a second.

A deadline ends a call as a cancellation does: gRPC cancels the handler.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

from engine.sampling_params import SamplingParams
from model.source import open_model
from tests.system.in_process import (
    DecodeWorker,
    PrefillWorker,
    Worker,
    decode_request,
    decode_worker,
    prefill_request,
    prefill_worker,
    work_request,
)
from transport.loopback_wire import LoopbackWire
from worker.refusal import Refused

SOURCE = open_model("checksum")
ROUNDS = 25  # of each stage: the slowest stands for the 99th percentile
FREED_S = 0.5
PARAMS = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
Said = list[Any]
Reached = Callable[[Said, Said], bool]


def has(field: str) -> Callable[[Said], bool]:
    return lambda said: any(event.HasField(field) for event in said)


def num_tokens(said: Said) -> int:
    return sum(event.HasField("token") for event in said)


STAGES: dict[str, Reached] = {
    "queued": lambda prefill, decode: True,
    "prefilling": lambda prefill, decode: has("admitted")(prefill),
    "between the legs": lambda prefill, decode: has("first_tokens")(prefill),
    "transferring": lambda prefill, decode: has("reserved")(decode),
    "first token": lambda prefill, decode: has("adopted")(decode),
    "mid-stream": lambda prefill, decode: num_tokens(decode) >= 5,
    "after the last token": lambda prefill, decode: num_tokens(decode) == PARAMS.max_tokens,
}


async def hear(events: AsyncIterator[Any], said: Said, stirred: asyncio.Event) -> None:
    try:
        async for event in events:
            said.append(event)
            stirred.set()
    finally:
        stirred.set()


def is_free(worker: Worker) -> bool:
    books = worker.engine.books()
    requests = books.waiting_requests + books.running_requests + books.held_requests
    transfers = sum(side.open_transfers for side in worker.sides)
    blocks = books.used_blocks + books.promised_blocks
    return not requests + books.reserved_requests + blocks + transfers


async def cancelled(prefill: PrefillWorker, decode: DecodeWorker, stage: str, number: int) -> float:
    """Seconds until both workers are free of a request that was cancelled at `stage`."""
    assert prefill.prefilling is not None and decode.decoding is not None
    work = work_request([(number * 31 + i * i) % 256 for i in range(100)], PARAMS)
    transfer_id = work.request_id.encode()
    sent, received, stirred = Said(), Said(), asyncio.Event()
    calls = [
        hear(prefill.prefilling.run(prefill_request(work, transfer_id, decode, 16)), sent, stirred)
    ]
    if stage != "between the legs":
        decode_call = decode_request(work, transfer_id, prefill)
        calls.append(hear(decode.decoding.run(decode_call), received, stirred))
    legs = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while not STAGES[stage](sent, received):
            stirred.clear()
            await stirred.wait()
    began = time.monotonic()
    for leg in legs:
        leg.cancel()
    for leg in legs:
        with suppress(asyncio.CancelledError, Refused):
            await leg
    async with asyncio.timeout(10):
        while not (is_free(prefill) and is_free(decode)):
            await asyncio.sleep(0.001)
    return time.monotonic() - began


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tps", [(1, 1), (2, 3)], ids=str)
async def test_cancelling_at_any_stage_frees_both_workers_in_half_a_second(
    stage: str, tps: tuple[int, int]
) -> None:
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, tps[0], num_blocks=24) as prefill,
        decode_worker(SOURCE, wire, tps[1], num_blocks=24) as decode,
    ):
        took = [await cancelled(prefill, decode, stage, number) for number in range(ROUNDS)]
        assert max(took) <= FREED_S
        await prefill.settled()
        await decode.settled()


async def test_a_request_that_waits_for_decodes_blocks_is_cancelled_out_of_the_line() -> None:
    """Queued on decode: all blocks are promised, and stay promised to whoever came first."""
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, num_blocks=64) as prefill,
        decode_worker(SOURCE, wire, num_blocks=8) as decode,
    ):
        assert decode.decoding is not None
        legs = []
        for number in range(3):
            work = work_request([number] * 100, PARAMS)
            call = decode_request(work, work.request_id.encode(), prefill)
            events = decode.decoding.run(call)
            legs.append(asyncio.ensure_future(hear(events, [], asyncio.Event())))
        await asyncio.sleep(0.1)
        books = decode.engine.books()
        assert (books.reserved_requests, books.promised_blocks, books.used_blocks) == (1, 8, 0)
        began = time.monotonic()
        for leg in reversed(legs):
            leg.cancel()
        await asyncio.wait(legs)
        await decode.settled()
        assert time.monotonic() - began <= FREED_S
        assert is_free(decode)
