"""Real workers on hosts of their own: links that fall silent, lose packets, and heal."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from kvferry.lab.lab import Kind, Lab
from kvferry.lab.namespaces import why_no_namespaces
from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from protos import inference_pb2 as pb
from tests.system.lab_cluster import DECODE, PREFILL, cluster_in_lab
from tests.system.live_cluster import LiveCluster, Reply
from tests.system.test_live_checksum import prompt_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timed,
    pytest.mark.asyncio(loop_scope="module"),
]

NO_NAMESPACES = why_no_namespaces()
KINDS = [
    pytest.param(
        "namespaces",
        marks=pytest.mark.skipif(NO_NAMESPACES is not None, reason=str(NO_NAMESPACES)),
    ),
    "proxy",
]
LEASE_S = 2.0
LONG = 4000  # tokens: 3 MB, some 6 s on the links between prefill and decode
LINKS = ["unlimited,0ms", *(f"{p}-{d}=4mbit,2ms" for p in PREFILL for d in DECODE)]

Running = tuple[LiveCluster, Lab]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    async with cluster_in_lab(folder, kind, LINKS, transfer_lease_s=LEASE_S) as running:
        yield running


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def healed(running: Running) -> AsyncIterator[None]:
    yield
    cluster, lab = running
    await lab.heal()
    await cluster.settled()
    before, now = -1, await carried(lab)
    while now > before:  # what ended connections had sent is still on its way
        await asyncio.sleep(0.3)
        before, now = now, await carried(lab)


async def carried(lab: Lab) -> int:
    """Bytes so far, between prefill and decode workers."""
    links = [each for each in await lab.report() if {each.source, each.target} & {"p0", "p1"}]
    return sum(
        each.counts.num_bytes
        for each in links
        if each.counts is not None and "hub" not in (each.source, each.target)
    )


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return checksum_continuation(ChecksumConfig(), prompt, num_tokens)


async def ask(cluster: LiveCluster, prompt: list[int], pins: pb.Pins | None = None) -> Reply:
    return await cluster.generate(prompt, pins, max_tokens=4, temperature=0, ignore_eos=True)


async def under_way(cluster: LiveCluster, *workers: str) -> None:
    """Until a transfer is, and some of it has crossed."""
    async with asyncio.timeout(20):
        for name in workers:
            while not (await cluster.inspect(name)).open_transfers:
                await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)


async def chosen_pair(
    cluster: LiveCluster, prompt: list[int], pins: pb.Pins | None = None
) -> tuple[str, str]:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), pins=pins)
    explained = (await cluster.stub.Explain(request)).explanation
    return explained.chosen_prefill, explained.chosen_decode


async def refusals(cluster: LiveCluster, pair: tuple[str, str]) -> str:
    """Why the router does not use a pair now, or nothing."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
    candidates = (await cluster.stub.Explain(request)).explanation.candidates
    (refused,) = [each.refused for each in candidates if (each.prefill, each.decode) == pair]
    return str(refused)


@pytest.mark.parametrize("way", ["both ways", "prefill to decode", "decode to prefill"])
async def test_a_partition_in_mid_transfer_frees_both_workers_within_the_lease_and_a_second(
    running: Running, way: str
) -> None:
    cluster, lab = running
    prompt = prompt_of(LONG, seed=len(way))
    task = asyncio.create_task(ask(cluster, prompt, pb.Pins(prefill="p0", decode="d0")))
    await under_way(cluster, "p0", "d0")
    ends = ("d0", "p0") if way == "decode to prefill" else ("p0", "d0")
    await lab.cut(*ends, one_way=way != "both ways")
    loop = asyncio.get_running_loop()
    cut_at = loop.time()
    await cluster.settled(timeout_s=2 * LEASE_S + 2)
    assert loop.time() - cut_at < LEASE_S + 1
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await task
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "p0" in str(failure.value.details()) and "d0" in str(failure.value.details())


async def test_a_request_whose_transfer_is_cut_off_is_served_by_another_pair(
    running: Running,
) -> None:
    cluster, lab = running
    prompt = prompt_of(LONG, seed=50)
    pair = await chosen_pair(cluster, prompt)
    task = asyncio.create_task(ask(cluster, prompt))
    await under_way(cluster, *pair)
    await lab.cut(*pair)
    reply = await task
    assert reply.output == expected(prompt, 4)
    journey = reply.usage.journey
    assert (journey.prefill, journey.decode) != pair
    assert journey.attempts == 2


async def test_a_pair_that_cannot_reach_each_other_is_avoided_and_used_again_when_it_can(
    running: Running,
) -> None:
    """Both reach the router all the time: nothing is wrong with either but the way between."""
    cluster, lab = running
    prompts = [prompt_of(60, seed=60 + i) for i in range(4)]
    pins = pb.Pins(prefill="p1")  # so short a prompt decode would compute itself
    pair = await chosen_pair(cluster, prompts[0], pins)
    await lab.cut(*pair)
    replies = [await ask(cluster, prompt, pins) for prompt in prompts]
    assert [reply.output for reply in replies] == [expected(prompt, 4) for prompt in prompts]
    tried = [reply.usage.journey.attempts for reply in replies]
    assert tried[0] == 2 and tried[-1] == 1, tried
    refused = await refusals(cluster, pair)
    assert all(name in refused for name in pair), refused

    await lab.heal()
    async with asyncio.timeout(10):
        while await refusals(cluster, pair):
            await asyncio.sleep(0.1)
    prompt = prompt_of(60, seed=70)
    again = await ask(cluster, prompt, pb.Pins(prefill=pair[0], decode=pair[1]))
    assert again.output == expected(prompt, 4)
    assert again.usage.journey.shipped_blocks == 4


async def test_a_link_that_loses_packets_still_gives_the_right_tokens(running: Running) -> None:
    cluster, lab = running
    await lab.lose("p0", "d0", 0.02)
    prompt = prompt_of(1000, seed=80)
    reply = await ask(cluster, prompt, pb.Pins(prefill="p0", decode="d0"))
    assert reply.output == expected(prompt, 4)
    carried = {(each.source, each.target): each.counts for each in await lab.report()}
    counts = carried["p0", "d0"]
    assert counts is not None and counts.num_lost > 0
