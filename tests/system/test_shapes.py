"""Two ends of different shapes give the tokens of one process: block sizes, TP degrees, layouts."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvcache.layout import KvLayout
from tests.system.in_process import decode_worker, disaggregated, prefill_worker
from tests.system.test_disaggregation import SOURCE, expected, greedy, prompt_of
from transport.loopback_wire import LoopbackWire

HEAD, TOKEN, PLANE = KvLayout
SIZES = [(16, 16), (32, 16), (16, 32), (64, 16), (16, 64), (8, 64), (128, 16)]
WAYS = [  # TP degrees and layouts, prefill then decode
    ((1, 1), (HEAD, TOKEN)),
    ((2, 3), (TOKEN, HEAD)),
    ((3, 2), (TOKEN, PLANE)),
    ((9, 4), (PLANE, HEAD)),
]
CELL_BYTES_PER_TOKEN = 4 * 3 * 2 * 4 * 8  # layers, heads, planes, head dim, int64


def reusable(num_tokens: int, block_size: int) -> int:
    """Tokens of a repeated prompt that lie in whole blocks; the last one is computed anyway."""
    return (num_tokens - 1) // block_size * block_size


@pytest.mark.parametrize(("theirs", "ours"), SIZES)
async def test_any_two_shapes_give_the_tokens_of_one_process(theirs: int, ours: int) -> None:
    for (prefill_tp, decode_tp), (from_layout, to_layout) in WAYS:
        wire = LoopbackWire()
        async with (
            prefill_worker(
                SOURCE, wire, prefill_tp, num_blocks=64, block_size=theirs, kv_layout=from_layout
            ) as prefill,
            decode_worker(
                SOURCE, wire, decode_tp, num_blocks=64, block_size=ours, kv_layout=to_layout
            ) as decode,
        ):
            for length, chunk in ((1, 0), (ours - 1, 7), (theirs + 1, 0), (133, 0), (150, 48)):
                prompt = prompt_of(length, seed=prefill_tp + length)
                answer = await disaggregated(prefill, decode, prompt, greedy(20), chunk)
                assert answer.tokens == [expected(prompt, 20)]
                assert answer.shipped_blocks == -(-length // ours)
            await decode.settled()
            await prefill.settled()


@pytest.mark.parametrize(("theirs", "ours"), SIZES)
async def test_each_side_counts_the_prefix_it_holds_in_its_own_blocks(
    theirs: int, ours: int
) -> None:
    """What decode holds is not sent again, to the token; what prefill holds is not computed."""
    wire, length, unit = LoopbackWire(), 150, min(theirs, ours)
    async with (
        prefill_worker(SOURCE, wire, 2, num_blocks=64, block_size=theirs) as prefill,
        decode_worker(SOURCE, wire, 3, num_blocks=64, block_size=ours, kv_layout=TOKEN) as decode,
    ):
        prompt = prompt_of(length)
        cold = await disaggregated(prefill, decode, prompt, greedy(4))
        warm = await disaggregated(prefill, decode, prompt, greedy(4))
        longer = await disaggregated(prefill, decode, [*prompt, *range(40)], greedy(4))
        assert (cold.cached_tokens, cold.decode_cached_blocks) == (0, 0)
        assert warm.cached_tokens == reusable(length, theirs)
        assert warm.decode_cached_blocks == length // ours
        assert longer.cached_tokens == length // theirs * theirs
        assert longer.decode_cached_blocks == length // ours
        sent = -(-length // unit) * unit
        for answer, num_tokens, held in (
            (cold, sent, 0),
            (warm, sent, length // ours * ours),
            (longer, -(-(length + 40) // unit) * unit, length // ours * ours),
        ):
            assert answer.shipped_bytes == (num_tokens - held) * CELL_BYTES_PER_TOKEN
        assert cold.tokens == warm.tokens == [expected(prompt, 4)]
        assert longer.tokens == [expected([*prompt, *range(40)], 4)]
        await decode.settled()
        await prefill.settled()


async def test_decode_groups_of_every_size_are_fed_by_one_prefill_worker_at_once() -> None:
    wire, sizes = LoopbackWire(), (8, 16, 32, 64)
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            prefill_worker(SOURCE, wire, num_blocks=128, block_size=16)
        )
        decodes = [
            await stack.enter_async_context(
                decode_worker(SOURCE, wire, 2, num_blocks=64, block_size=size)
            )
            for size in sizes
        ]
        prompts = [prompt_of(70 + 9 * number, seed=number) for number in range(4)]
        answers = await asyncio.gather(
            *(
                disaggregated(prefill, decode, prompt, greedy(12))
                for prompt in prompts
                for decode in decodes
            )
        )
        want = [[expected(prompt, 12)] for prompt in prompts for _ in decodes]
        assert [answer.tokens for answer in answers] == want
        for worker in (prefill, *decodes):
            await worker.settled()
