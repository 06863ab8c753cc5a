"""Real processes whose blocks differ in size and whose pools differ in layout."""

import asyncio
from itertools import product
from pathlib import Path

import pytest

from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from protos import inference_pb2 as pb
from tests.system.live_cluster import Changes, LiveCluster, Reply, live_cluster

pytestmark = pytest.mark.cluster


async def greedy(cluster: LiveCluster, prompt: list[int], pins: pb.Pins) -> Reply:
    reply = await cluster.generate(prompt, pins, max_tokens=8, temperature=0, ignore_eos=True)
    journey = reply.usage.journey
    assert (journey.prefill, journey.decode, journey.attempts) == (pins.prefill, pins.decode, 1)
    return reply


async def test_workers_of_any_shape_serve_each_other_and_count_what_they_hold(
    tmp_path: Path,
) -> None:
    prefill: dict[str, Changes] = {
        "p16": {"tp": 2},
        "p64": {"block_size": 64, "kv_layout": "token-major"},
    }
    decode: dict[str, Changes] = {
        "d32": {"tp": 3, "block_size": 32, "kv_layout": "plane-major"},
        "d8": {"block_size": 8},
    }
    async with live_cluster(tmp_path, "checksum", prefill, decode) as cluster:
        for number, (source, target) in enumerate(product(prefill, decode)):
            await cluster.flush()
            prompt = [(7 * i * i + 31 * number) % 256 for i in range(150)]
            pins = pb.Pins(prefill=source, decode=target, wire="tcp" if number % 2 else "shm")
            cold, warm = await greedy(cluster, prompt, pins), await greedy(cluster, prompt, pins)
            assert cold.output == warm.output == checksum_continuation(ChecksumConfig(), prompt, 8)
            theirs, ours = int(source[1:]), int(target[1:])
            held = (warm.usage.cached_tokens, warm.usage.journey.decode_cached_blocks)
            assert held == (149 // theirs * theirs, 150 // ours)
            assert warm.usage.journey.prefill_cached_blocks == 149 // theirs
            sizes = warm.usage.journey.prefill_block_size, warm.usage.journey.decode_block_size
            assert sizes == (theirs, ours)
        await cluster.settled()


async def test_the_router_finds_a_prefix_whatever_the_size_of_its_blocks(tmp_path: Path) -> None:
    """Its holder is chosen for it, by names of the holder's own size."""
    sizes = {"p16": 16, "p64": 64}
    prefill = {name: {"block_size": size} for name, size in sizes.items()}
    async with live_cluster(tmp_path, "checksum", prefill, {"d32": {"block_size": 32}}) as cluster:
        for number, (holder, size) in enumerate(sizes.items()):
            prompt = [(11 * i + 5 * number) % 251 for i in range(400)]
            await greedy(cluster, prompt, pb.Pins(prefill=holder, decode="d32"))
            want = 400 // size * size
            async with asyncio.timeout(5):
                while await matched(cluster, prompt, holder) != want:
                    await asyncio.sleep(0.05)


async def matched(cluster: LiveCluster, prompt: list[int], prefill: str) -> int:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
    answer = await cluster.stub.Explain(request)
    (found,) = [each for each in answer.explanation.candidates if each.prefill == prefill]
    assert not found.refused
    return int(found.prefill_matched_tokens)
