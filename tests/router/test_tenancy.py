"""Tenants share nothing: no block, no hit, no count, no name; and what that costs is on record."""

from contextlib import AsyncExitStack
from typing import Any

import pytest
from prometheus_client import generate_latest

from kvcache.block_hash import PUBLIC, BlockHash, index_names, tenant_key
from kvferry.stats import hit_rate_of
from prefix_index.index import Stored
from protos import inference_pb2 as pb
from router.hit_rate import Loss
from router.request import Tenant
from router.walls import Walls
from tests.router.fakes import (
    BLOCK_SIZE,
    DTYPE,
    PROMPT,
    SOURCE,
    FakeCluster,
    request,
    usage_of,
)

ALICE, BOB = (Tenant(name, tenant_key(name)) for name in ("alice", "bob"))
SPACE = SOURCE.namespace(DTYPE)


def names(tenant: Tenant) -> list[BlockHash]:
    return index_names(SPACE, tenant.key, PROMPT, BLOCK_SIZE)


async def hold(cluster: FakeCluster, worker: str, tenant: Tenant) -> None:
    await cluster.index.publish(worker, 1, [Stored(name, None) for name in names(tenant)])
    await cluster.mirror.step()
    await cluster.mirror.step()


async def matched(cluster: FakeCluster, tenant: Tenant, **fields: Any) -> list[int]:
    explained = await cluster.handler.explain(request(pins=pb.Pins(), **fields), tenant, "test")
    ways = [each for each in explained.candidates if not each.action]
    return [each.prefill_matched_tokens + each.decode_matched_tokens for each in ways]


class AcceptedRequests:
    """What a router makes of requests, nobody being asked."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.validator = cluster.validator

    async def names(self, tenant: Tenant, **fields: Any) -> list[BlockHash]:
        accepted = await self.validator.accept(request(**fields), "", tenant, "test")
        return accepted.block_names()(SPACE, BLOCK_SIZE)


async def test_what_one_tenant_sent_is_no_match_for_another(cluster: FakeCluster) -> None:
    await cluster.add_pair()
    await hold(cluster, "prefill-0", ALICE)
    assert max(await matched(cluster, ALICE)) == 64
    assert max(await matched(cluster, BOB)) == 0
    assert not set(names(ALICE)) & set(names(BOB))


async def test_what_is_underway_for_one_tenant_is_expected_for_nobody_else(
    cluster: FakeCluster,
) -> None:
    for name in ("prefill-0", "prefill-1", "decode-0"):
        await cluster.add(name)
    await cluster.ask(tenant=ALICE, pins=pb.Pins())
    for tenant, expected_ms in ((ALICE, {16.0, 64.0}), (BOB, {64.0})):
        explained = await cluster.handler.explain(request(pins=pb.Pins()), tenant, "test")
        ways = [each for each in explained.candidates if each.prefill]
        assert {each.terms_ms["compute"] for each in ways} == expected_ms


async def test_what_only_others_have_sent_is_lost_to_the_wall_and_shown_to_no_client(
    cluster: FakeCluster,
) -> None:
    await cluster.add_pair()
    await cluster.ask(tenant=ALICE)
    usage = usage_of(await cluster.ask(tenant=BOB))
    assert usage.cached_tokens == 0 and usage.journey.prefill_cached_blocks == 0
    rate = hit_rate_of(generate_latest(cluster.metrics.registry).decode())
    rate.check()
    assert (rate.prompt, rate.oracle, rate.delivered) == (128, 0, 0)
    assert rate.lost == {Loss.NEW: 64 + 16, Loss.TENANT: 48}
    line = cluster.log()[-1]
    assert line["cached_tokens"] == 0 and not any("wall" in key for key in line)


async def test_what_the_operator_made_public_is_shared_and_nothing_behind_it(
    stack: AsyncExitStack,
) -> None:
    """Three blocks of text, then one of each tenant's own; both doors of a prompt are alike."""
    text = "You are the assistant of a shop and you're brief"
    cluster = FakeCluster(stack, public_prompts=[text])
    prefill, _ = await cluster.add_pair()
    prompt = [*text.encode(), *range(16)]
    asked = AcceptedRequests(cluster)
    alices, bobs = [await asked.names(each, token_ids=prompt) for each in (ALICE, BOB)]
    assert alices[:3] == bobs[:3] and alices[3] != bobs[3]
    assert alices[:3] == index_names(SPACE, PUBLIC, prompt, BLOCK_SIZE)[:3]
    assert await asked.names(BOB, text=text + "".join(map(chr, range(16)))) == bobs
    await cluster.ask(tenant=ALICE, token_ids=prompt)
    assert prefill.requests[-1].work.num_public_tokens == 48
    assert prefill.requests[-1].work.tenant_key == ALICE.key
    await cluster.index.publish("prefill-0", 1, [Stored(name, None) for name in alices])
    await cluster.mirror.step()
    await cluster.mirror.step()
    held = [max(await matched(cluster, each, token_ids=prompt)) for each in (ALICE, BOB)]
    assert held == [64, 48]


async def test_a_public_system_message_is_shared_between_chats(stack: AsyncExitStack) -> None:
    system = "You are the assistant of our shop, and you are brief."
    cluster = FakeCluster(stack, public_prompts=["something else", system])
    asked = AcceptedRequests(cluster)
    chats = [
        await asked.names(each, chat=[("system", content), ("user", said)])
        for each, content, said in (
            (ALICE, system, "Where is my parcel, which should be here by now?"),
            (BOB, system, "Is there anything in red? I like red more than blue."),
            (BOB, "My own" + system[6:], "Is there anything in red?"),
        )
    ]
    num_shared = 4  # of 69 tokens: the user's turn begins alike, too
    assert chats[0][:num_shared] == chats[1][:num_shared]
    assert not set(chats[0][num_shared:]) & set(chats[1][num_shared:])
    assert not set(chats[0]) & set(chats[2])


async def test_ones_own_prompt_is_never_behind_the_wall(cluster: FakeCluster) -> None:
    await cluster.add_pair()
    for tenant in (ALICE, BOB, BOB):
        await cluster.ask(tenant=tenant)
    rate = hit_rate_of(generate_latest(cluster.metrics.registry).decode())
    assert rate.lost == {Loss.NEW: 64 + 16 + 16, Loss.TENANT: 48, Loss.LAG: 48}


def test_walls_know_prompts_by_a_key_of_their_own_and_forget() -> None:
    walls = Walls(max_names=8)
    assert [walls.note(SPACE, PROMPT, BLOCK_SIZE) for _ in range(2)] == [0, 4]
    assert walls.note(SPACE, [*PROMPT[:32], 1, 2], BLOCK_SIZE) == 2
    for number in range(4):
        walls.note(SPACE, [number + 300] * 64, BLOCK_SIZE)
    assert walls.note(SPACE, PROMPT, BLOCK_SIZE) == 0
    assert Walls().note(SPACE, PROMPT, BLOCK_SIZE) == 0


@pytest.mark.parametrize("forged", ["bob", "bob\x00", "\x03bob"])
def test_an_identity_that_looks_like_another_is_another(forged: str) -> None:
    stranger = Tenant("x", tenant_key("a" + forged))
    assert not set(names(stranger)) & set(names(BOB))
