"""The seven stages of a request's life at which it may be cancelled, and what is left then."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from engine.sampling_params import SamplingParams
from model.source import open_model
from tests.system.in_process import (
    DecodeWorker,
    PrefillWorker,
    Worker,
    decode_request,
    prefill_request,
    work_request,
)
from worker.refusal import Refused

SOURCE = open_model("checksum")
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


async def cancelled(
    prefill: PrefillWorker, decode: DecodeWorker, stage: str, number: int, after_s: float = 0.0
) -> float:
    """Seconds until both workers are free of a request that was cancelled at `stage`.

    Cancelled `after_s` later, that is, for all but the last stages.
    """
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
    if after_s:
        await asyncio.sleep(after_s)
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
