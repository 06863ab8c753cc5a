"""Prefill workers as Ray actors: one is killed under load, and Ray brings it back."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from protos import inference_pb2 as pb
from tests.system.live_cluster import live_cluster

pytestmark = pytest.mark.cluster

CONFIG = ChecksumConfig()


async def test_ray_brings_back_a_prefill_worker_killed_under_20_requests(tmp_path: Path) -> None:
    async with live_cluster(
        tmp_path,
        "checksum",
        prefill={"p0": {"num_blocks": 512}, "p1": {"num_blocks": 512}},
        decode={"d0": {"tp": 2, "num_blocks": 1024}},
        ray=True,
    ) as cluster:
        prompts = [[(7 * i + k * k) % 256 for k in range(600)] for i in range(20)]
        victim = cluster.handles["p0"].pid
        assert victim is not None
        tasks = [
            asyncio.create_task(
                cluster.generate(prompt, max_tokens=10, temperature=0, ignore_eos=True)
            )
            for prompt in prompts
        ]
        await asyncio.sleep(0.1)
        os.kill(victim, signal.SIGKILL)
        outputs = [reply.output for reply in await asyncio.gather(*tasks)]
        assert outputs == [checksum_continuation(CONFIG, prompt, 10) for prompt in prompts]
        await cluster.until_alive("p0", victim)
        await cluster.until_pairs(2)
        again = await cluster.generate(
            prompts[0], pb.Pins(prefill="p0"), max_tokens=10, temperature=0, ignore_eos=True
        )
        assert again.output == outputs[0]
        assert again.usage.journey.prefill == "p0"
        journey = again.usage.journey  # nothing of its old life counts, only what it fetched
        assert 16 * journey.prefill_cached_blocks == journey.fetched_tokens
        await cluster.settled()
