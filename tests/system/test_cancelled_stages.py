"""A request cancelled at each stage of its life: both workers are free of it within half a second.

A deadline ends a call as a cancellation does: gRPC cancels the handler.
"""

import asyncio
import time

import pytest

from model.source import open_model
from tests.system.in_process import (
    decode_request,
    decode_worker,
    prefill_worker,
    work_request,
)
from tests.system.stages import FREED_S, PARAMS, STAGES, cancelled, hear, is_free
from transport.loopback_wire import LoopbackWire

SOURCE = open_model("checksum")
ROUNDS = 25  # of each stage; the slowest but one counts: once the machine itself may be away


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
        assert sorted(took)[-2] <= FREED_S
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
