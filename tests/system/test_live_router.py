"""How long a router makes anybody wait when Redis is slow, or when it is killed itself."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from tests.system.live_cluster import LiveCluster, live_cluster
from tests.system.slow_redis import slow_redis
from tests.system.test_live_checksum import cached_share, prompt_of, until_announced

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timed,
    pytest.mark.asyncio(loop_scope="module"),
]

ROUNDS = 4
REQUESTS = 150  # in each


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCluster]:
    async with live_cluster(
        tmp_path_factory.mktemp("cluster"),
        "checksum",
        prefill={"p0": {"num_blocks": 512}, "p1": {"num_blocks": 512}},
        decode={"d0": {"num_blocks": 512}},
    ) as cluster:
        yield cluster


async def first_tokens(cluster: LiveCluster, seed: int) -> list[float]:
    """How long they take, in seconds, one request after the other."""
    took = []
    for number in range(REQUESTS):
        prompt, began = prompt_of(100, seed=seed + number), time.perf_counter()
        call = cluster.stream(prompt, max_tokens=2, temperature=0, ignore_eos=True)
        async for response in call:
            if response.HasField("delta"):
                took.append(time.perf_counter() - began)
                break
        async for _ in call:
            pass
        assert await call.code() is grpc.StatusCode.OK
    return took


def p99(took: list[float]) -> float:
    return sorted(took)[len(took) * 99 // 100]


async def test_a_redis_of_half_a_second_a_command_adds_25_ms_to_the_first_token_at_most(
    cluster: LiveCluster,
) -> None:
    """In turns, so that both see the same machine."""
    await first_tokens(cluster, seed=0)
    usual, slow = list[float](), list[float]()
    for number in range(ROUNDS):
        usual += await first_tokens(cluster, seed=1000 * number + 1000)
        async with slow_redis(cluster.redis_url) as pauses:
            slow += await first_tokens(cluster, seed=1000 * number + 1500)
        assert pauses.count >= 1
    print(f"p99 {p99(usual) * 1e3:.1f} ms, with a slow Redis {p99(slow) * 1e3:.1f} ms")
    assert p99(slow) - p99(usual) <= 0.025


async def test_a_killed_router_is_ready_within_5_s_and_knows_what_it_knew_within_30(
    cluster: LiveCluster,
) -> None:
    prompts = [prompt_of(200, seed=9000 + number) for number in range(20)]
    await cached_share(cluster.stub, prompts)
    await until_announced(cluster, prompts)
    before = await cached_share(cluster.stub, prompts)
    was = cluster.handles["router"].pid
    assert was is not None
    os.kill(was, signal.SIGKILL)
    killed_at = time.monotonic()
    await cluster.until_alive("router", was)
    await cluster.until_pairs(2)
    ready_s = time.monotonic() - killed_at
    share = 0.0
    while share < 0.8 * before and time.monotonic() - killed_at < 40:
        share = await cached_share(cluster.stub, prompts)
        await asyncio.sleep(0.05)
    back_s = time.monotonic() - killed_at
    print(
        f"ready after {ready_s:.1f} s; after {back_s:.1f} s {share:.1%} is reused, {before:.1%} was"
    )
    assert ready_s <= 5.0
    assert share >= 0.8 * before and back_s <= 30.0
