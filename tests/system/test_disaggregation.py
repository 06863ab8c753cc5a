"""Prefill, transfer and decode together, against the model's own definition; in one process."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest

from engine.sampling_params import SamplingParams, choice_seed
from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from model.source import open_model
from tests.system.in_process import (
    decode_worker,
    disaggregated,
    prefill_request,
    prefill_worker,
    work_request,
)
from transport.loopback_wire import LoopbackWire

SOURCE = open_model("checksum")
assert isinstance(SOURCE.config, ChecksumConfig)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * i * 7 + i) % 256 for i in range(length)]


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    assert isinstance(SOURCE.config, ChecksumConfig)
    return checksum_continuation(SOURCE.config, prompt, num_tokens)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("prefill_tp", range(1, 10))
async def test_any_pair_of_tensor_parallel_degrees_gives_the_same_tokens(prefill_tp: int) -> None:
    wire = LoopbackWire()
    async with prefill_worker(SOURCE, wire, tp=prefill_tp, num_blocks=64) as prefill:
        for decode_tp in range(1, 10):
            async with decode_worker(SOURCE, wire, tp=decode_tp, num_blocks=64) as decode:
                for length in (1, 16, 37, 50):
                    prompt = prompt_of(length, seed=decode_tp)
                    answer = await disaggregated(prefill, decode, prompt, greedy(5))
                    assert answer.tokens == [expected(prompt, 5)]
                await decode.settled()
        await prefill.settled()


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 0])
async def test_chunks_of_any_size_ship_the_same_cells(chunk: int) -> None:
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, tp=2, num_blocks=64) as prefill,
        decode_worker(SOURCE, wire, tp=3, num_blocks=64) as decode,
    ):
        for length in (1, 15, 16, 17, 100):
            prompt = prompt_of(length, seed=length)
            answer = await disaggregated(prefill, decode, prompt, greedy(20), chunk)
            assert answer.tokens == [expected(prompt, 20)]
            assert answer.shipped_blocks == -(-length // 16)
        await decode.settled()
        await prefill.settled()


async def test_a_warm_prompt_is_neither_computed_nor_shipped_twice() -> None:
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, num_blocks=64) as prefill,
        decode_worker(SOURCE, wire, tp=2, num_blocks=64) as decode,
    ):
        prompt = prompt_of(64)
        cold = await disaggregated(prefill, decode, prompt, greedy(4))
        warm = await disaggregated(prefill, decode, prompt, greedy(4))
        longer = await disaggregated(prefill, decode, [*prompt, 1, 2, 3], greedy(4))
        assert (cold.cached_tokens, cold.decode_cached_blocks, cold.shipped_blocks) == (0, 0, 4)
        assert (warm.cached_tokens, warm.decode_cached_blocks, warm.shipped_blocks) == (48, 4, 0)
        assert (longer.cached_tokens, longer.shipped_blocks) == (64, 1)
        assert cold.tokens == warm.tokens == [expected(prompt, 4)]
        assert longer.tokens == [expected([*prompt, 1, 2, 3], 4)]


@pytest.mark.parametrize("n", [2, 4, 8])
async def test_n_choices_share_one_shipment_and_equal_n_seeded_runs(n: int) -> None:
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, tp=3, num_blocks=64) as prefill,
        decode_worker(SOURCE, wire, tp=2, num_blocks=64) as decode,
    ):
        prompt = prompt_of(40)
        sampled = SamplingParams(max_tokens=20, temperature=2.0, seed=7, n=n, ignore_eos=True)
        together = await disaggregated(prefill, decode, prompt, sampled)
        assert together.shipped_blocks == 3
        alone = [
            (await disaggregated(prefill, decode, prompt, replace(sampled, n=1, seed=seed))).tokens
            for seed in (choice_seed(7, choice) for choice in range(n))
        ]
        assert [[tokens] for tokens in together.tokens] == alone
        await decode.settled()
        await prefill.settled()


async def test_many_prompts_at_once_through_small_pools_all_come_out_right() -> None:
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, num_blocks=24, max_tokens_per_step=32) as prefill,
        decode_worker(SOURCE, wire, tp=2, num_blocks=24, max_tokens_per_step=16) as decode,
    ):
        prompts = [prompt_of(5 + 9 * i % 90, seed=i) for i in range(30)]
        answers = await asyncio.gather(
            *(disaggregated(prefill, decode, prompt, greedy(30)) for prompt in prompts)
        )
        assert [answer.tokens for answer in answers] == [[expected(p, 30)] for p in prompts]
        await decode.settled()
        await prefill.settled()


async def test_legs_cut_at_random_moments_leave_both_pools_whole() -> None:
    wire = LoopbackWire()
    random = Random(5)
    async with (
        prefill_worker(SOURCE, wire, tp=2, num_blocks=32, max_tokens_per_step=16) as prefill,
        decode_worker(SOURCE, wire, num_blocks=32) as decode,
    ):

        async def cut(prompt: list[int]) -> None:
            with suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(random.random() * 0.2):
                    await disaggregated(prefill, decode, prompt, greedy(50))

        for _ in range(10):
            await asyncio.gather(*(cut(prompt_of(random.randrange(1, 120))) for _ in range(10)))
        await decode.settled()
        await prefill.settled()
        prompt = prompt_of(33, seed=99)
        answer = await disaggregated(prefill, decode, prompt, greedy(9))
        assert answer.tokens == [expected(prompt, 9)]


async def test_a_first_token_that_is_the_last_needs_no_shipment() -> None:
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, num_blocks=32) as prefill,
        decode_worker(SOURCE, wire, num_blocks=32) as decode,
    ):
        prompt = prompt_of(20)
        work = work_request(prompt, SamplingParams(max_tokens=1, temperature=0.0))
        assert prefill.prefilling is not None
        call = prefill_request(work, bytes(16), decode)
        events = [event async for event in prefill.prefilling.run(call)]
        (token,) = events[1].first_tokens.tokens
        assert (token.token_id, token.finish_reason) == (expected(prompt, 1)[0], "length")
        assert events[2].HasField("done")
        await prefill.settled()
