"""Tenants share nothing: no block, no hit, no count, no name; and what that costs is on record."""

import pytest
from prometheus_client import generate_latest

from kvcache.block_hash import BlockHash, index_names, tenant_key
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


async def matched(cluster: FakeCluster, tenant: Tenant) -> list[int]:
    explained = await cluster.handler.explain(request(pins=pb.Pins()), tenant, "test")
    ways = [each for each in explained.candidates if not each.action]
    return [each.prefill_matched_tokens + each.decode_matched_tokens for each in ways]


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
