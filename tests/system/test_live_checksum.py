"""A cluster of real processes on the checksum model: faults, cancellations, exact tokens."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from random import Random

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from protos import inference_pb2 as pb
from tests.system.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

CONFIG = ChecksumConfig()


def prompt_of(length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(256) for _ in range(length)]


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return checksum_continuation(CONFIG, prompt, num_tokens)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCluster]:
    async with live_cluster(
        tmp_path_factory.mktemp("cluster"),
        "checksum",
        prefill={"p0": {"num_blocks": 512}, "p1": {"num_blocks": 512}},
        decode={"d0": {"tp": 2, "num_blocks": 512}},
    ) as cluster:
        yield cluster


async def test_a_repeated_prompt_reports_what_was_not_computed(cluster: LiveCluster) -> None:
    prompt = prompt_of(64, seed=1)
    replies = [
        await cluster.generate(prompt, max_tokens=5, temperature=0, ignore_eos=True)
        for _ in range(2)
    ]
    assert [reply.output for reply in replies] == [expected(prompt, 5)] * 2
    assert [reply.usage.cached_tokens for reply in replies] == [0, 48]


async def test_20_requests_survive_the_death_of_a_prefill_worker(cluster: LiveCluster) -> None:
    prompts = [prompt_of(400, seed=100 + i) for i in range(20)]
    victim = cluster.handles["p0"].pid
    assert victim is not None
    tasks = [
        asyncio.create_task(cluster.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True))
        for prompt in prompts
    ]
    await asyncio.sleep(0.1)
    os.kill(victim, signal.SIGKILL)
    replies = await asyncio.gather(*tasks)
    assert [reply.output for reply in replies] == [expected(prompt, 20) for prompt in prompts]
    await cluster.until_alive("p0", victim)
    await cluster.until_pairs(2)
    pins = pb.Pins(prefill="p0")
    prompt = prompt_of(50, seed=200)
    again = await cluster.generate(prompt, pins, max_tokens=5, temperature=0, ignore_eos=True)
    assert again.output == expected(prompt, 5)
    assert again.usage.journey.prefill == "p0"
    await cluster.settled()


async def test_a_dead_decode_rank_ends_its_requests_within_3_s_and_the_group_returns(
    cluster: LiveCluster,
) -> None:
    loop = asyncio.get_running_loop()
    rank_pids = (await cluster.inspect("d0")).rank_pids
    tasks = [
        asyncio.create_task(
            cluster.generate(
                prompt_of(40, seed=300 + i), max_tokens=4000, temperature=0, ignore_eos=True
            )
        )
        for i in range(5)
    ]
    await asyncio.sleep(1.0)
    was, killed_at = cluster.handles["d0"].pid, loop.time()
    os.kill(rank_pids[1], signal.SIGKILL)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert loop.time() - killed_at < 3.0
    for end in ends:
        assert isinstance(end, grpc.aio.AioRpcError)
        assert end.code() is grpc.StatusCode.UNAVAILABLE
    await cluster.until_alive("d0", was)
    await cluster.until_pairs(2)
    prompt = prompt_of(50, seed=400)
    reply = await cluster.generate(prompt, max_tokens=5, temperature=0, ignore_eos=True)
    assert reply.output == expected(prompt, 5)


async def test_500_requests_a_third_cancelled_leave_nothing_behind(cluster: LiveCluster) -> None:
    random = Random(3)
    for name in ("p0", "p1"):  # every link that the pairs keep is there before we count
        await cluster.generate(prompt_of(20, seed=7), pb.Pins(prefill=name), max_tokens=2)
    before = await cluster.settled()

    async def request(number: int) -> None:
        prompt = prompt_of(random.randrange(1, 150), seed=1000 + number)
        count = random.randrange(1, 30)
        call = cluster.generate(prompt, max_tokens=count, temperature=0, ignore_eos=True)
        if number % 3:
            assert (await call).output == expected(prompt, count)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(random.random() * 0.3):
                await call

    for start in range(0, 500, 25):
        await asyncio.gather(*(request(number) for number in range(start, start + 25)))
    after = await cluster.settled()
    for name, book in after.items():
        assert book.pool.free_blocks + book.pool.cached_blocks == book.pool.total_blocks
        assert book.open_files <= before[name].open_files + 2 * len(book.rank_pids), name
        assert book.asyncio_tasks <= before[name].asyncio_tasks + 2 * len(book.rank_pids), name
