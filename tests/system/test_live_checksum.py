"""A cluster of real processes on the checksum model: faults, cancellations, exact tokens."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from random import Random
from typing import Any

import grpc
import grpc.aio
import httpx
import numpy as np
import pytest
import pytest_asyncio
import redis.asyncio
from numpy.typing import NDArray

from engine.clock import MonotonicClock
from kvcache.block_hash import PUBLIC, index_key, name_blocks
from kvcache.cells import bad_cells
from kvferry.stats import predictions_of, regret_line
from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from model.source import open_model
from prefix_index.index import WorkerRecord
from prefix_index.redis_index import RedisIndex
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from protos.transfer_pb2 import CellRun, FetchedCells
from router.main import serving
from router.served_model import ServedModel
from router.settings import RouterSettings
from tests.system.live_cluster import LiveCluster, Reply, live_cluster
from tests.system.slow_redis import slow_redis
from transport.orders import Lender, ShipmentKey
from transport.pull import GrpcPuller, Names, by_name

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

CONFIG = ChecksumConfig()


def prompt_of(length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(256) for _ in range(length)]


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return checksum_continuation(CONFIG, prompt, num_tokens)


# The checksum's winner is out of the draw, so that sampling really samples.
ANYTHING: dict[str, Any] = {"allowed_token_ids": list(range(64)), "ignore_eos": True}


async def record_of(cluster: LiveCluster, worker: str) -> WorkerRecord:
    index = RedisIndex(cluster.redis_url, MonotonicClock(), prefix=cluster.key_prefix)
    try:
        (record,) = [each for each in await index.workers() if each.name == worker]
    finally:
        await index.close()
    return record


async def cache_hits(cluster: LiveCluster, worker: str) -> list[float]:
    """Prompt tokens not computed, as the router counts them and as the worker does."""
    record, counts = await record_of(cluster, worker), []
    async with httpx.AsyncClient() as client:
        for url in (cluster.http_url, f"http://{record.system_address}"):
            text = (await client.get(f"{url}/metrics")).text
            (line,) = [x for x in text.splitlines() if x.startswith("vllm:prefix_cache_hits_total")]
            counts.append(float(line.split()[-1]))
    return counts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCluster]:
    async with live_cluster(
        tmp_path_factory.mktemp("cluster"),
        "checksum",
        prefill={"p0": {"num_blocks": 512}, "p1": {"num_blocks": 512}},
        decode={"d0": {"tp": 2, "num_blocks": 512}},
    ) as cluster:
        yield cluster


@pytest.mark.parametrize("holder", ["p0", "p1", "d0"])
async def test_a_repeated_prompt_reports_what_was_not_computed(
    cluster: LiveCluster, holder: str
) -> None:
    """Pinned: the router hears of new blocks only some 0.1 s after they are there."""
    prompt = prompt_of(64, seed=500 + ord(holder[0]) + int(holder[1]))
    pins = pb.Pins(no_prefill=True) if holder == "d0" else pb.Pins(prefill=holder)
    replies = [
        await cluster.generate(prompt, pins, max_tokens=5, temperature=0, ignore_eos=True)
        for _ in range(2)
    ]
    assert [reply.output for reply in replies] == [expected(prompt, 5)] * 2
    assert [reply.usage.cached_tokens for reply in replies] == [0, 48]


@asynccontextmanager
async def replaced(cluster: LiveCluster, part: str) -> AsyncIterator[int]:
    """For a test that ends a life of a part: its pid. The next test finds another life of it."""
    was = cluster.handles[part].pid
    assert was is not None
    try:
        yield was
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(was, signal.SIGKILL)
        raise
    finally:
        await cluster.until_alive(part, was)
        await cluster.until_pairs(2)


async def cached_share(stub: Any, prompts: Sequence[list[int]]) -> float:
    """Of the tokens of these prompts, sent once each. Every answer has to be right."""
    cached = 0
    for prompt in prompts:
        reply, sampling = Reply(), pb.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        async for response in stub.Generate(request, timeout=20):
            reply.take(response)
        assert reply.output == expected(prompt, 3)
        cached += reply.usage.cached_tokens
    return cached / sum(map(len, prompts))


async def test_a_redis_wiped_under_load_fails_no_request_and_hits_come_back(
    cluster: LiveCluster,
) -> None:
    """Two workers that prefill hold half of the prompts each, and only the index says which."""
    prompts = [prompt_of(200, seed=800 + number) for number in range(12)]
    for number, prompt in enumerate(prompts):
        pins = pb.Pins(prefill=f"p{number % 2}")
        await cluster.generate(prompt, pins, max_tokens=3, temperature=0, ignore_eos=True)
    await until_announced(cluster, prompts)
    before = await cached_share(cluster.stub, prompts)
    assert before > 0.9
    over = asyncio.Event()

    async def ask_on(mine: Sequence[list[int]]) -> int:
        """How often; any request that fails or is answered wrong ends the test."""
        rounds = 0
        while not over.is_set():
            await cached_share(cluster.stub, mine)
            rounds += 1
        return rounds

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        load = [group.create_task(ask_on(prompts[half::2])) for half in (0, 1)]
        async with redis.asyncio.from_url(cluster.redis_url) as admin:
            await admin.flushall()
        await until_announced(cluster, prompts)
        while await cached_share(cluster.stub, prompts) < 0.9 * before:
            await asyncio.sleep(0.05)
        over.set()
    assert all(task.result() for task in load)


async def test_a_redis_of_half_a_second_a_command_costs_no_request_and_no_reuse(
    cluster: LiveCluster,
) -> None:
    prompts = [prompt_of(200, seed=850 + number) for number in range(4)]
    await cached_share(cluster.stub, prompts)
    await until_announced(cluster, prompts)
    before = await cached_share(cluster.stub, prompts)
    assert before > 0.9
    async with slow_redis(cluster.redis_url) as pauses:
        while pauses.count < 3:
            assert await cached_share(cluster.stub, prompts) >= before


async def until_announced(
    cluster: LiveCluster, prompts: Sequence[list[int]], timeout_s: float = 30
) -> None:
    """Wait until Redis knows a holder of every whole block of these prompts."""
    namespace = open_model("checksum").namespace("float32")
    missing = [[index_key(n) for n in name_blocks(namespace, PUBLIC, p, 16)] for p in prompts]
    index = RedisIndex(cluster.redis_url, MonotonicClock(), prefix=cluster.key_prefix)
    try:
        async with asyncio.timeout(timeout_s):
            while missing:
                held = await index.longest(missing[-1])
                if max(held.values(), default=0) == len(missing[-1]):
                    missing.pop()
                else:
                    await asyncio.sleep(0.05)
    finally:
        await index.close()


def another_router(cluster: LiveCluster, **settings: Any) -> RouterSettings:
    """Beside the cluster's own, over the same index."""
    return RouterSettings(
        model="checksum",
        grpc_port=0,
        http_port=0,
        redis_url=cluster.redis_url,
        key_prefix=cluster.key_prefix,
        **settings,
    )


async def test_another_router_serves_as_well_when_one_is_killed(cluster: LiveCluster) -> None:
    """It has routed none of these prompts; the killed one comes back and knows them, too. What it
    was serving ends, and leaves nothing on the workers.
    """
    prompts = [prompt_of(200, seed=900 + number) for number in range(8)]
    await cached_share(cluster.stub, prompts)
    await until_announced(cluster, prompts)
    before = await cached_share(cluster.stub, prompts)
    settings = another_router(cluster, drain_s=0.2)
    async with (
        serving(settings, ServedModel.of(open_model("checksum"))) as info,
        grpc.aio.insecure_channel(info["grpc_address"]) as channel,
    ):
        cut_off = cluster.stream(prompts[0], max_tokens=4000, temperature=0, ignore_eos=True)
        while not (await cut_off.read()).HasField("delta"):
            pass
        async with replaced(cluster, "router") as was:
            os.kill(was, signal.SIGKILL)
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert await cut_off.code() is grpc.StatusCode.UNAVAILABLE
            await cluster.settled()
            beside = await cached_share(stub, prompts)
        assert beside >= 0.95 * before
        assert await cached_share(cluster.stub, prompts) >= 0.95 * before


async def test_tenants_share_what_the_operator_made_public_and_nothing_else(
    cluster: LiveCluster,
) -> None:
    """Both send one prompt: four public blocks, then two and a half that are each one's own."""
    text = "You answer for everyone who asks you, and each of them is alone."
    prompt = [*text.encode(), *prompt_of(40, seed=950)]
    settings = another_router(cluster, api_keys={"a": "alice", "b": "bob"}, public_prompts=[text])
    async with (
        serving(settings, ServedModel.of(open_model("checksum"))) as info,
        grpc.aio.insecure_channel(info["grpc_address"]) as channel,
    ):
        stub, cached = inference_pb2_grpc.InferenceStub(channel), []
        for key in ("a", "b", "a", "b"):
            reply, sampling = Reply(), pb.SamplingParams(max_tokens=3, ignore_eos=True)
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt), sampling=sampling, pins=pb.Pins(prefill="p0")
            )
            metadata = (("authorization", f"Bearer {key}"),)
            async for response in stub.Generate(request, timeout=20, metadata=metadata):
                reply.take(response)
            cached.append(reply.usage.cached_tokens)
    assert cached == [0, 64, 96, 96]


async def test_every_rank_gives_its_heads_of_a_block_by_name(cluster: LiveCluster) -> None:
    prompt = prompt_of(40, seed=3)
    names = name_blocks(open_model("checksum").namespace("float32"), PUBLIC, prompt, 16)
    pins = pb.Pins(no_prefill=True)  # a prompt whose first token is its last is not shipped
    await cluster.generate(prompt, pins, max_tokens=3, temperature=0, ignore_eos=True)
    record = await record_of(cluster, "d0")
    found: dict[int, bytes] = {}
    for address, (start, stop) in zip(record.rank_addresses, record.kv_intervals, strict=True):
        runs = [
            CellRun(layer=0, first_block=1, num_blocks=1, heads=[h]) for h in range(start, stop)
        ]
        lender, key = Lender("d0", 0, address), ShipmentKey(b"k" * 16, 1, 1, 1)
        pull = by_name(lender, key, Names([bytes(name) for name in names]), runs)
        async with aclosing(GrpcPuller(5).fetch(pull)) as parts:
            async for run, part in parts:
                assert bad_cells(rows := cells_in(part), proofs_in(part)).size == 0, rows
                found[run.heads[0]] = part.payload
    assert sorted(found) == [0, 1, 2]
    assert len(set(found.values())) == 3


def cells_in(part: FetchedCells) -> NDArray[np.uint8]:
    return np.frombuffer(part.payload, np.uint8).reshape(len(part.digests) // 8, -1)


def proofs_in(part: FetchedCells) -> NDArray[np.uint64]:
    return np.frombuffer(part.digests, "<u8").astype(np.uint64)


async def until_known(cluster: LiveCluster, worker: str, prompt: list[int]) -> None:
    """Wait until the router has heard that `worker` holds the prompt."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), pins=pb.Pins(prefill=worker))
    async with asyncio.timeout(10):
        while True:
            ways = (await cluster.stub.Explain(request)).explanation.candidates
            if any(way.prefill == worker and way.prefill_matched_tokens for way in ways):
                return
            await asyncio.sleep(0.02)


async def test_a_prompt_sent_where_it_is_not_held_is_fetched_and_not_computed(
    cluster: LiveCluster,
) -> None:
    """As when the holder's queue is long; the pin stands for that."""
    prompt = prompt_of(2000, seed=41)
    await cluster.generate(prompt, pb.Pins(prefill="p0"), max_tokens=3, temperature=0)
    await until_known(cluster, "p0", prompt)
    pins = pb.Pins(prefill="p1")
    replies = [
        await cluster.generate(prompt, pins, max_tokens=5, temperature=0, ignore_eos=True)
        for _ in range(2)
    ]
    assert [reply.output for reply in replies] == [expected(prompt, 5)] * 2
    first, again = (reply.usage for reply in replies)
    assert first.journey.holder in ("p0", "d0")
    fetched = first.journey.fetched_tokens  # all 1984, unless the machine is too busy for them
    assert 500 < fetched == first.cached_tokens
    assert (first.journey.computed_tokens, first.journey.prefill) == (2000 - fetched, "p1")
    assert (again.cached_tokens, again.journey.fetched_tokens) == (1984, 0)
    await cluster.settled()


async def test_a_holder_that_dies_while_it_is_fetched_from_costs_no_token(
    cluster: LiveCluster,
) -> None:
    """It is stopped first, so that the call to it hangs, and then killed."""
    prompt = prompt_of(2000, seed=43)
    await cluster.generate(prompt, pb.Pins(prefill="p0"), max_tokens=1, temperature=0)
    await until_known(cluster, "p0", prompt)
    async with replaced(cluster, "p0") as victim:
        os.kill(victim, signal.SIGSTOP)
        pins = pb.Pins(prefill="p1")
        asked = asyncio.create_task(
            cluster.generate(prompt, pins, max_tokens=5, temperature=0, ignore_eos=True)
        )
        await asyncio.sleep(0.05)
        os.kill(victim, signal.SIGKILL)
        reply = await asked
        assert reply.output == expected(prompt, 5)
        if (
            reply.usage.journey.holder == "p0"
        ):  # not if the death came first, and it was tried again
            assert reply.usage.journey.fetched_tokens == 0
            assert reply.usage.journey.computed_tokens == 2000
    await cluster.settled()


async def test_two_prefill_workers_give_one_prompt_the_same_names_in_redis(
    cluster: LiveCluster,
) -> None:
    """Processes of their own, so of different hash seeds; and the names are these in any."""
    prompt = prompt_of(64, seed=2)
    source = open_model("checksum")
    names = name_blocks(source.namespace("float32"), PUBLIC, prompt, 16)
    keys = [index_key(name) for name in names]
    index = RedisIndex(cluster.redis_url, MonotonicClock(), prefix=cluster.key_prefix)
    try:
        for name in ("p0", "p1"):
            reply = await cluster.generate(
                prompt, pb.Pins(prefill=name), max_tokens=1, temperature=0, ignore_eos=True
            )
            assert reply.output == expected(prompt, 1)
            # Nothing is there already; a busy machine may find that fetching costs less.
            assert reply.usage.cached_tokens == reply.usage.journey.fetched_tokens
        async with asyncio.timeout(5):
            while True:
                held = await index.longest(keys)
                if held.get("p0") == held.get("p1") == 4:
                    break
                await asyncio.sleep(0.05)
    finally:
        await index.close()


async def test_metrics_count_what_repeats_of_a_prompt_did_not_compute(
    cluster: LiveCluster,
) -> None:
    for length, cached in ((31, 16), (32, 16), (33, 32), (48, 32), (49, 48)):
        prompt, counted = prompt_of(length, seed=length), []
        for _ in range(3):
            before = await cache_hits(cluster, "p0")
            reply = await cluster.generate(
                prompt, pb.Pins(prefill="p0"), max_tokens=2, temperature=0, ignore_eos=True
            )
            after = await cache_hits(cluster, "p0")
            by_metrics = [new - old for old, new in zip(before, after, strict=True)]
            counted.append([reply.usage.cached_tokens, *by_metrics])
        assert counted == [[0] * 3, [cached] * 3, [cached] * 3]


async def test_the_router_learns_how_long_prompts_take_and_predicts_it(
    cluster: LiveCluster,
) -> None:
    for seed in range(30):
        prompt = prompt_of(400, seed=9000 + seed)
        await cluster.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True)
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{cluster.http_url}/metrics")).text
    found = [each for each in predictions_of(text) if each.what == "first token"]
    assert sum(each.count for each in found) >= 30
    assert all(0.1 < each.ratio < 10 for each in found if each.count >= 15), found
    assert "in the mean of" in regret_line(text)


async def test_a_first_token_that_ends_the_text_is_the_whole_answer(cluster: LiveCluster) -> None:
    reply = await cluster.generate(
        prompt_of(50, seed=3), pb.Pins(prefill="p0"), temperature=0, logit_bias={257: 100}
    )
    assert (reply.output, reply.text) == ([257], "")
    assert (reply.finished[0].reason, reply.usage.completion_tokens) == ("stop", 1)
    journey = reply.usage.journey
    assert (journey.prefill, journey.shipped_blocks, journey.shipped_bytes) == ("p0", 0, 0)
    await cluster.settled()


async def test_three_choices_over_two_workers_are_those_of_one_and_their_prompt_travels_once(
    cluster: LiveCluster,
) -> None:
    prompt, pair = prompt_of(50, seed=4), pb.Pins(prefill="p0", decode="d0")
    sampling = {"n": 3, "temperature": 0.8, "seed": 1, "max_tokens": 12} | ANYTHING
    over_two = await cluster.generate(prompt, pair, **sampling)
    await cluster.flush()
    alone = await cluster.generate(prompt, pb.Pins(decode="d0", no_prefill=True), **sampling)
    assert over_two.tokens == alone.tokens
    assert [len(over_two.tokens[choice]) for choice in range(3)] == [12, 12, 12]
    assert len({tuple(tokens) for tokens in over_two.tokens.values()}) > 1
    assert over_two.usage.journey.shipped_blocks == 4


async def test_temperature_one_samples_by_its_seed(cluster: LiveCluster) -> None:
    prompt = prompt_of(20, seed=5)

    async def answer(seed: int) -> tuple[int, ...]:
        sampling = {"temperature": 1.0, "seed": seed, "max_tokens": 4} | ANYTHING
        return tuple((await cluster.generate(prompt, **sampling)).output)

    answers = await asyncio.gather(*(answer(seed) for seed in range(1, 21)))
    assert len(set(answers)) >= 2
    assert await asyncio.gather(*(answer(seed) for seed in range(1, 21))) == answers


async def test_20_requests_survive_the_death_of_a_prefill_worker(cluster: LiveCluster) -> None:
    prompts = [prompt_of(400, seed=100 + i) for i in range(20)]
    async with replaced(cluster, "p0") as victim:
        sampling: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
        tasks = [asyncio.create_task(cluster.generate(each, **sampling)) for each in prompts]
        await asyncio.sleep(0.1)
        os.kill(victim, signal.SIGKILL)
        replies = await asyncio.gather(*tasks)
        assert [reply.output for reply in replies] == [expected(prompt, 20) for prompt in prompts]
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
    killed_at = loop.time()
    async with replaced(cluster, "d0"):
        os.kill(rank_pids[1], signal.SIGKILL)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert loop.time() - killed_at < 3.0
        for end in ends:
            assert isinstance(end, grpc.aio.AioRpcError)
            assert end.code() is grpc.StatusCode.UNAVAILABLE
    prompt = prompt_of(50, seed=400)
    reply = await cluster.generate(prompt, max_tokens=5, temperature=0, ignore_eos=True)
    assert reply.output == expected(prompt, 5)


async def test_a_decode_rank_that_hangs_is_as_good_as_dead_and_is_replaced(
    cluster: LiveCluster,
) -> None:
    loop = asyncio.get_running_loop()
    rank_pid = (await cluster.inspect("d0")).rank_pids[1]
    prompt = prompt_of(40, seed=310)
    task = asyncio.create_task(
        cluster.generate(prompt, max_tokens=4000, temperature=0, ignore_eos=True)
    )
    await asyncio.sleep(0.5)
    stopped_at = loop.time()
    async with replaced(cluster, "d0"):
        os.kill(rank_pid, signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as end:
            await task
        assert end.value.code() is grpc.StatusCode.UNAVAILABLE
    assert loop.time() - stopped_at < 45  # a whole new life, torch and all
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
