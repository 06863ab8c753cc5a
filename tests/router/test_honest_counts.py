"""What a served request could have reused and did not, with the reason, as /metrics say it."""

from collections.abc import AsyncIterator

import grpc
import pytest
from prometheus_client import generate_latest

from kvcache.block_hash import PUBLIC, index_key, name_blocks
from kvferry.stats import hit_rate_of
from prefix_index.index import Stored
from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.callers import EVERYONE
from router.errors import Broken
from router.hit_rate import HitRate, Loss
from tests.router.fakes import (
    BLOCK_SIZE,
    DTYPE,
    PROMPT,
    SOURCE,
    Abort,
    FakeCluster,
    FakeWorker,
    Script,
    prefill_script,
    request,
)

NAMES = [
    index_key(name) for name in name_blocks(SOURCE.namespace(DTYPE), PUBLIC, PROMPT, BLOCK_SIZE)
]


def counted(cluster: FakeCluster) -> HitRate:
    rate = hit_rate_of(generate_latest(cluster.metrics.registry).decode())
    rate.check()
    return rate


async def announce(cluster: FakeCluster, worker: str) -> None:
    await cluster.index.publish(worker, 1, [Stored(name, None) for name in NAMES])
    await cluster.mirror.step()
    await cluster.mirror.step()


async def test_a_prompt_seen_first_has_lost_nothing_else(cluster: FakeCluster) -> None:
    await cluster.add_pair()
    await cluster.ask()
    assert counted(cluster) == HitRate(64, lost={Loss.NEW: 64})


async def test_a_prompt_that_was_just_computed_is_lost_to_lag(cluster: FakeCluster) -> None:
    """The last block is computed again in any case: nobody could have reused its last token."""
    await cluster.add_pair()
    await cluster.ask()
    await cluster.ask()
    assert counted(cluster).lost == {Loss.NEW: 64 + 16, Loss.LAG: 48}


async def test_what_the_index_promised_and_the_worker_did_not_have_is_stale(
    cluster: FakeCluster,
) -> None:
    await cluster.add_pair()
    await cluster.ask()
    await announce(cluster, "prefill-0")
    await cluster.ask()
    rate = counted(cluster)
    assert (rate.oracle, rate.available, rate.captured, rate.promised) == (48, 48, 48, 48)
    assert rate.lost == {Loss.NEW: 80, Loss.STALE: 48}


async def test_what_another_worker_holds_is_lost_to_load(cluster: FakeCluster) -> None:
    await cluster.add_pair()
    await cluster.add("prefill-1")
    await cluster.ask()
    await announce(cluster, "prefill-0")
    await cluster.ask(pins=pb.Pins(prefill="prefill-1", decode="decode-0"))
    assert counted(cluster).lost == {Loss.NEW: 80, Loss.LOAD: 48}


def fetching(fetched_tokens: int, fetch_ms: float = 3.0) -> Script:
    """A prefill worker that finds so many of its tokens at a holder."""

    async def script(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        events = prefill_script(worker, asked, fetched_tokens)
        async for event in events:
            if event.HasField("first_tokens") and asked.HasField("fetch"):
                event.first_tokens.fetched_tokens = fetched_tokens
                event.first_tokens.fetched_bytes = 100 * fetched_tokens
                event.first_tokens.fetch_ms = fetch_ms
            yield event

    return script


async def test_what_was_fetched_from_its_holder_is_neither_delivered_nor_lost(
    cluster: FakeCluster,
) -> None:
    prefill, _ = await cluster.add_pair()
    cold = await cluster.add("prefill-1", fetching(48))
    await cluster.ask()
    await announce(cluster, "prefill-0")
    pins = pb.Pins(prefill="prefill-1", decode="decode-0")
    events = await cluster.ask(pins=pins, explain=True)
    told = cold.requests[0].fetch
    assert (told.holder.instance, told.num_blocks) == (prefill.record.instance, 3)
    assert list(told.holder.rank_addresses) == list(prefill.record.rank_addresses)
    assert told.timeout_ms == 250  # no less, though computing would take 48
    rate = counted(cluster)
    assert (rate.delivered, rate.fetched, rate.lost) == (0, 48, {Loss.NEW: 80})
    usage, explained = events[-1].usage, events[0].started.explanation
    assert (usage.cached_tokens, usage.journey.fetched_tokens) == (48, 48)
    assert (usage.journey.holder, usage.journey.fetched_bytes) == ("prefill-0", 4800)
    assert explained.chosen_holder == "prefill-0"
    (way,) = [each for each in explained.candidates if each.holder and each.prefill == "prefill-1"]
    assert way.fetched_tokens == 48 and 5 < way.terms_ms["fetch"] < way.terms_ms["compute"]
    assert way.terms_ms["compute"] == 16
    await cluster.check()


async def test_a_holder_of_which_nothing_came_is_left_out_for_a_while(
    cluster: FakeCluster,
) -> None:
    await cluster.add_pair()
    cold = await cluster.add("prefill-1", fetching(0))
    await cluster.ask()
    await announce(cluster, "prefill-0")
    for _ in range(2):
        await cluster.ask(pins=pb.Pins(prefill="prefill-1", decode="decode-0"))
    assert [each.HasField("fetch") for each in cold.requests] == [True, False]
    assert counted(cluster).fetched == 0


async def test_what_a_life_held_that_is_over_is_lost_with_its_epoch(cluster: FakeCluster) -> None:
    prefill, _ = await cluster.add_pair()
    await cluster.ask()
    await announce(cluster, "prefill-0")
    await prefill.die()
    await cluster.leave(prefill)
    await cluster.add("prefill-0")
    await cluster.ask()
    assert counted(cluster).lost == {Loss.NEW: 80, Loss.EPOCH: 48}


async def test_what_is_only_expected_decides_and_is_not_promised(cluster: FakeCluster) -> None:
    """The second prompt goes where the first one is; what the index does not say is lost to lag."""
    for name in ("prefill-0", "prefill-1", "prefill-2", "decode-0"):
        await cluster.add(name)
    first = await cluster.ask(pins=pb.Pins())
    went_to = first[-1].usage.journey.prefill
    for _ in range(3):
        again = await cluster.ask(pins=pb.Pins(), explain=True)
        assert again[-1].usage.journey.prefill == went_to
        ways = again[0].started.explanation.candidates
        compute_ms = {each.prefill: each.terms_ms["compute"] for each in ways if each.prefill}
        assert {name for name, ms in compute_ms.items() if ms == 16.0} == {went_to}
        assert all(each.prefill_matched_tokens == 0 for each in ways)
    rate = counted(cluster)
    assert (rate.available, rate.captured, rate.promised) == (0, 0, 0)
    assert rate.lost == {Loss.NEW: 64 + 3 * 16, Loss.LAG: 3 * 48}


async def test_a_prompt_that_failed_is_expected_nowhere(cluster: FakeCluster) -> None:
    async def dies(worker: FakeWorker, asked: object) -> AsyncIterator[object]:
        raise Abort(grpc.StatusCode.INTERNAL, "broken")
        yield

    await cluster.add("prefill-0", dies)
    await cluster.add("decode-0")
    with pytest.raises(Broken):
        await cluster.ask()
    ways = (await cluster.handler.explain(request(), EVERYONE, "test")).candidates
    assert [each.terms_ms["compute"] for each in ways if each.prefill] == [64.0]
    await cluster.check()
