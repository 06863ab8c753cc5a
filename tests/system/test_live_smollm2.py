"""The real model over real processes: every pair of TP degrees, both wires, any chunk size."""

from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path

import pytest
import pytest_asyncio

from model.source import open_model
from protos import inference_pb2 as pb
from tests.system.live_cluster import LiveCluster, live_cluster
from tests.system.oracle import greedy_differences

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(7200),
]

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 128, 200, 2000, 333, 512)
WAYS = tuple(product(("p1", "p3"), ("d1", "d2", "d3"), ("grpc", "gloo"), (16, 64, 0)))
NUM_TOKENS = 5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCluster]:
    async with live_cluster(
        tmp_path_factory.mktemp("cluster"),
        "smollm2",
        prefill={f"p{tp}": {"tp": tp, "num_blocks": 256} for tp in (1, 3)}
        | {"p32": {"block_size": 32, "kv_layout": "token-major", "num_blocks": 64}},
        decode={f"d{tp}": {"tp": tp, "num_blocks": 256} for tp in (1, 2, 3)},
    ) as cluster:
        yield cluster


def prompts() -> list[list[int]]:
    """One of each length, all different from their first token on."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = open_model("smollm2").tokenizer().encode(text)
    return [(ids[7 * i :] + ids)[:length] for i, length in enumerate(LENGTHS)]


async def greedy(cluster: LiveCluster, prompt: list[int], pins: pb.Pins) -> tuple[list[int], int]:
    reply = await cluster.generate(
        prompt, pins, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
    )
    journey = reply.usage.journey
    assert (journey.prefill, journey.decode, journey.attempts) == (pins.prefill, pins.decode, 1)
    return reply.output, reply.usage.cached_tokens


async def test_every_way_through_the_cluster_gives_the_models_own_greedy_tokens(
    cluster: LiveCluster, request: pytest.FixtureRequest
) -> None:
    full = request.config.getoption("--full-matrix")
    for number, prompt in enumerate(prompts()):
        await cluster.flush()
        alone, _ = await greedy(cluster, prompt, pb.Pins(decode="d1", no_prefill=True))
        assert greedy_differences(tuple(prompt), tuple(alone)) == []
        ways = WAYS if full else WAYS[number :: len(LENGTHS)]  # each way at least once
        for prefill, decode, wire, chunk in ways:
            pins = pb.Pins(prefill=prefill, decode=decode, wire=wire, max_chunk_tokens=chunk)
            await cluster.flush()
            cold, cold_cached = await greedy(cluster, prompt, pins)
            warm, warm_cached = await greedy(cluster, prompt, pins)
            assert (cold_cached, warm_cached) == (0, (len(prompt) - 1) // 16 * 16)
            for output in (cold, warm):
                if output != alone:  # right all the same if the model itself cannot tell
                    assert greedy_differences(tuple(prompt), tuple(output)) == [], pins
    await cluster.settled()


async def test_blocks_of_32_to_blocks_of_16_give_the_models_own_tokens(
    cluster: LiveCluster,
) -> None:
    prompt, pins = prompts()[14], pb.Pins(prefill="p32", decode="d1")
    await cluster.flush()
    cold, cached = await greedy(cluster, prompt, pins)
    assert (len(prompt), cached, greedy_differences(tuple(prompt), tuple(cold))) == (100, 0, [])
    assert await greedy(cluster, prompt, pins) == (cold, 96)
    await cluster.settled()


async def test_it_knows_the_capital_of_france(cluster: LiveCluster) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")])
    request = pb.GenerateRequest(
        chat=chat, sampling=pb.SamplingParams(temperature=0, max_tokens=20)
    )
    texts, finished = "", ""
    async for response in cluster.stub.Generate(request, timeout=60):
        texts += response.delta.text
        finished = response.finished.reason or finished
        if response.HasField("started"):
            assert response.started.prompt_tokens == 37
    assert (texts, finished) == ("The capital of France is Paris.", "stop")
