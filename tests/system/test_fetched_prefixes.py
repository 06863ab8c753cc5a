"""A prefix that another worker holds is fetched instead of computed, or computed all the same."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from kvcache.ledger_row import Account
from protos import worker_pb2 as pb
from protos.transfer_pb2 import FetchedCells, FetchRequest
from protos.transfer_pb2_grpc import CellsServicer, CellsStub, add_CellsServicer_to_server
from tests.system.in_process import (
    PrefillWorker,
    Worker,
    calls_answered,
    decode_worker,
    disaggregated,
    holder,
    open_legs,
    prefill_worker,
)
from tests.system.test_disaggregation import SOURCE, expected, greedy, prompt_of
from transport.loopback_wire import LoopbackWire

NUM_BLOCKS = 64


def fetch(held_by: Worker, addresses: list[str], timeout_ms: int = 10_000) -> pb.Fetch:
    """Of as many blocks as there are."""
    return pb.Fetch(holder=holder(held_by, addresses), num_blocks=99, timeout_ms=timeout_ms)


@pytest.mark.parametrize(("holder_tp", "tp"), [(1, 1), (1, 3), (3, 2), (2, 4)])
async def test_a_prefix_of_a_holder_of_any_tp_is_fetched_and_not_computed(
    holder_tp: int, tp: int
) -> None:
    wire, prompt = LoopbackWire(), prompt_of(100)
    async with (
        prefill_worker(SOURCE, wire, holder_tp, num_blocks=NUM_BLOCKS) as warm,
        prefill_worker(SOURCE, wire, tp, num_blocks=NUM_BLOCKS) as cold,
        decode_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as decode,
        calls_answered(warm) as addresses,
    ):
        await disaggregated(warm, decode, prompt, greedy(3))
        decode.engine.flush_cache()
        answer = await disaggregated(cold, decode, prompt, greedy(5), 0, fetch(warm, addresses))
        assert answer.tokens == [expected(prompt, 5)]
        assert (answer.cached_tokens, answer.fetched_tokens) == (96, 96)
        again = await disaggregated(cold, decode, prompt, greedy(5), 0, fetch(warm, addresses))
        assert (again.cached_tokens, again.fetched_tokens) == (96, 0)
        for worker in (warm, cold, decode):
            await worker.settled()
        assert cold.engine.stats().computed_tokens == 4 + 4


async def test_only_what_is_not_here_is_fetched_and_a_decode_group_may_hold_it() -> None:
    wire, prompt = LoopbackWire(), prompt_of(100)
    async with (
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as cold,
        decode_worker(SOURCE, wire, 3, num_blocks=NUM_BLOCKS) as decode,
        calls_answered(decode) as addresses,
    ):
        await disaggregated(cold, decode, prompt, greedy(3))
        cold.engine.flush_cache()
        await disaggregated(cold, decode, prompt[:40], greedy(3))
        answer = await disaggregated(cold, decode, prompt, greedy(5), 0, fetch(decode, addresses))
        assert answer.tokens == [expected(prompt, 5)]
        assert (answer.cached_tokens, answer.fetched_tokens) == (96, 64)
        await cold.settled()


class _Dies(CellsServicer):
    """Hands on the first answers of a holder, then nothing more; one of them damaged."""

    def __init__(
        self, address: str, num_answers: int, *, hangs: bool = False, damaged: int | None = None
    ) -> None:
        self._address, self._num_answers, self._hangs = address, num_answers, hangs
        self._damaged = damaged

    async def Fetch(
        self, request: FetchRequest, context: "grpc.aio.ServicerContext[object, FetchedCells]"
    ) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            left = self._num_answers
            async for part in CellsStub(channel).Fetch(request):
                if not left:
                    break
                if left == self._damaged:
                    part.payload = part.payload[:-1] + bytes([part.payload[-1] ^ 1])
                await context.write(part)
                left -= 1
        if self._hangs:
            await asyncio.Event().wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the holder is gone")


@asynccontextmanager
async def failing(worker: PrefillWorker, num_answers: int, **how: Any) -> AsyncIterator[list[str]]:
    """The holder's address, where it fails in the middle of an answer."""
    async with calls_answered(worker) as (address,):
        server = grpc.aio.server()
        add_CellsServicer_to_server(_Dies(address, num_answers, **how), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield [f"127.0.0.1:{port}"]
        await server.stop(0)


@pytest.mark.parametrize(("num_answers", "hangs"), [(0, False), (9, False), (9, True)])
async def test_a_holder_that_fails_midway_costs_computing_and_no_token(
    num_answers: int, hangs: bool
) -> None:
    """Of six blocks in four layers, four calls for one to two blocks each: eight answers are whole
    blocks, and the ninth is a part of the next.
    """
    wire, prompt = LoopbackWire(), prompt_of(100)
    async with (
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as warm,
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as cold,
        decode_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as decode,
        failing(warm, num_answers, hangs=hangs) as addresses,
    ):
        await disaggregated(warm, decode, prompt, greedy(3))
        decode.engine.flush_cache()
        told = fetch(warm, addresses, timeout_ms=300)
        answer = await disaggregated(cold, decode, prompt, greedy(5), 0, told)
        assert answer.tokens == [expected(prompt, 5)]
        assert answer.fetched_tokens == answer.cached_tokens < 96
        assert (answer.cached_tokens > 0) == (num_answers > 0)
        for worker in (warm, cold, decode):
            await worker.settled()


async def test_a_damaged_cell_is_never_cached_and_its_block_is_computed() -> None:
    wire, prompt = LoopbackWire(), prompt_of(100)
    async with (
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as warm,
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as cold,
        decode_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as decode,
        failing(warm, 100, damaged=90) as addresses,
    ):
        await disaggregated(warm, decode, prompt, greedy(3))
        decode.engine.flush_cache()
        answer = await disaggregated(cold, decode, prompt, greedy(5), 0, fetch(warm, addresses))
        assert answer.tokens == [expected(prompt, 5)]
        assert 0 < answer.cached_tokens < 96
        for worker in (warm, cold, decode):
            await worker.settled()


async def test_who_leaves_in_mid_fetch_leaves_no_block_behind() -> None:
    wire, prompt = LoopbackWire(), prompt_of(100)
    async with (
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as warm,
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as cold,
        decode_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as decode,
        failing(warm, 9, hangs=True) as addresses,
    ):
        await disaggregated(warm, decode, prompt, greedy(3))
        told = fetch(warm, addresses, timeout_ms=300)
        legs = open_legs(cold, decode, prompt, greedy(5), 0, told)
        async with asyncio.timeout(5):
            while not cold.engine.books().reserved_requests:
                await asyncio.sleep(0.005)
        for leg in legs:
            leg.cancel()
        await asyncio.gather(*legs, return_exceptions=True)
        for worker in (warm, cold, decode):
            await worker.settled()


async def test_prompts_that_begin_alike_wait_for_one_fetch() -> None:
    wire, prompt = LoopbackWire(), prompt_of(100)
    async with (
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as warm,
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as cold,
        decode_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as decode,
        calls_answered(warm) as addresses,
    ):
        await disaggregated(warm, decode, prompt, greedy(3))
        decode.engine.flush_cache()
        told = fetch(warm, addresses)
        answers = await asyncio.gather(
            disaggregated(cold, decode, prompt, greedy(5), 0, told),
            disaggregated(cold, decode, prompt, greedy(5), 0, told),
            disaggregated(cold, decode, [*prompt, 1], greedy(5)),
        )
        assert [each.cached_tokens for each in answers] == [96, 96, 96]
        assert sorted(each.fetched_tokens for each in answers) == [0, 0, 96]


async def test_prompts_that_begin_alike_do_not_all_try_a_holder_that_fails() -> None:
    wire, prompt = LoopbackWire(), prompt_of(100)
    async with (
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as warm,
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as cold,
        decode_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as decode,
        failing(warm, 0) as addresses,
    ):
        await disaggregated(warm, decode, prompt, greedy(3))
        decode.engine.flush_cache()
        told = fetch(warm, addresses)
        answers = await asyncio.gather(
            *(disaggregated(cold, decode, prompt, greedy(5), 0, told) for _ in range(3))
        )
        assert [each.tokens for each in answers] == [[expected(prompt, 5)]] * 3
        assert [each.fetched_tokens for each in answers] == [0, 0, 0]
        rows = cold.ledgers[0].extract().rows
        began = (rows["target"] == Account.RESERVED) & (rows["decode_epoch"] == 0)
        assert began.sum() == 1
        await cold.settled()


async def test_a_worker_without_room_for_a_copy_computes() -> None:
    wire, prompt = LoopbackWire(), prompt_of(100)
    async with (
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as warm,
        prefill_worker(SOURCE, wire, num_blocks=7, max_running=1) as cold,
        decode_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as decode,
        calls_answered(warm) as addresses,
    ):
        await disaggregated(warm, decode, prompt, greedy(3))
        told = fetch(warm, addresses)
        one, two = await asyncio.gather(
            disaggregated(cold, decode, prompt_of(60, seed=5), greedy(2)),
            disaggregated(cold, decode, prompt, greedy(5), 0, told),
        )
        assert one.tokens == [expected(prompt_of(60, seed=5), 2)]
        assert two.tokens == [expected(prompt, 5)]
        await cold.settled()
