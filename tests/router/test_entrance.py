"""Requests at the router's entrance: in line while workers are full, refused with a hint, or in."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status.rpc_status import aio as rpc_status  # type: ignore[attr-defined]

from kvcache.block_hash import tenant_key
from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.callers import EVERYONE
from router.entrance import Bounds
from router.errors import Overloaded, Withdrawn
from router.request import Tenant
from tests.router.fakes import (
    FakeCluster,
    FakeWorker,
    busy,
    eventually,
    first_tokens,
    prefill_done,
    request,
    text_of,
    without_pins,
)

FULL = busy(queued_tokens=20_000)  # of 1 ms each: 20 s, the bar is 10
FREE = busy(queued_tokens=0)


async def full_cluster(cluster: FakeCluster) -> list[FakeWorker]:
    """One pair; both have too much to do."""
    slow = busy(queued_tokens=20_000, prefill_ms_per_token=50.0)
    return [await cluster.add("prefill-0", load=FULL), await cluster.add("decode-0", load=slow)]


async def empty(cluster: FakeCluster, worker: FakeWorker) -> None:
    await cluster.index.heartbeat(worker.name, worker.record.epoch, FREE, 60.0)
    await cluster.mirror.step()


async def test_who_finds_every_worker_full_waits_and_is_served_when_one_is_not(
    cluster: FakeCluster,
) -> None:
    prefill, _ = await full_cluster(cluster)
    asking = asyncio.create_task(cluster.ask(**without_pins(explain=True)))
    await eventually(lambda: len(cluster.line) == 1)
    assert prefill.requests == []
    await empty(cluster, prefill)
    events = await asking
    assert text_of(events) == "Hello, world"
    assert events[0].started.explanation.action == "serve"
    assert cluster.metrics.registry.get_sample_value("kvferry_line_seconds_count") == 1
    cluster.line.check()


async def test_a_pin_stands_in_no_line(cluster: FakeCluster) -> None:
    await full_cluster(cluster)
    assert text_of(await cluster.ask()) == "Hello, world"


async def test_explain_shows_waiting_and_refusing_with_their_terms(cluster: FakeCluster) -> None:
    await full_cluster(cluster)
    stub = await cluster.grpc_stub()
    plan = (await stub.Explain(request(pins=pb.Pins()))).explanation
    assert (plan.action, plan.chosen_prefill, plan.chosen_decode) == ("wait", "", "")
    options = {each.action: each for each in plan.candidates if each.action}
    assert options["wait"].terms_ms["queue"] == 20_000 and options["wait"].terms_ms["line"] == 0
    assert options["reject"].terms_ms.keys() == {"patience"}
    for each in plan.candidates:
        assert sum(each.terms_ms.values()) == pytest.approx(each.cost_ms)
    assert "its bar is 10000 ms" in plan.candidates[0].refused
    impatient = request(pins=pb.Pins())
    impatient.targets.deadline_ms = 5000
    plan = (await stub.Explain(impatient)).explanation
    assert (plan.action, plan.retry_after_ms) == ("reject", pytest.approx(20_064 - 5000, abs=50))


async def test_a_deadline_that_cannot_be_kept_is_refused_at_once_over_grpc(
    cluster: FakeCluster,
) -> None:
    prefill, _ = await full_cluster(cluster)
    stub = await cluster.grpc_stub()
    asked = request(pins=pb.Pins())
    asked.targets.deadline_ms = 5000
    call = stub.Generate(asked)
    async with asyncio.timeout(1):
        with pytest.raises(grpc.aio.AioRpcError, match="ms are left") as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    hint = RetryInfo()
    status: Any = await rpc_status.from_call(call)
    assert status.details[0].Unpack(hint)
    assert hint.retry_delay.seconds in (14, 15)
    assert prefill.requests == []


async def test_a_grpc_deadline_that_no_idle_worker_could_keep_is_refused_at_once(
    cluster: FakeCluster,
) -> None:
    async def slow(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        worker.cluster.shipments[asked.transfer_id].set()
        firsts = first_tokens(worker, asked.work)
        firsts.first_tokens.compute_ms = 10.0 * len(asked.work.prompt)  # so it says
        yield firsts
        yield prefill_done(asked.work)

    prefill = await cluster.add("prefill-0", slow)
    await cluster.add("decode-0", load=busy(prefill_ms_per_token=50.0, queued_tokens=100))
    stub = await cluster.grpc_stub()

    def ask(token: int, length: int) -> pb.GenerateRequest:
        return request(token_ids=[token] * length, pins=pb.Pins(), max_tokens=1)

    for number in range(4):  # nobody has seen it compute: it gets its chance
        await stub.Generate(ask(number, 100), timeout=0.9).read()
    await asyncio.sleep(1.0)  # what was learned is taken over once a second
    async with asyncio.timeout(1):
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be served in time") as caught:
            await stub.Generate(ask(9, 400), timeout=2.0).read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(prefill.requests) == 4


async def test_over_http_it_is_429_with_retry_after_and_504_when_hopeless(
    cluster: FakeCluster,
) -> None:
    prefill, _ = await full_cluster(cluster)
    async with httpx.AsyncClient(base_url=await cluster.http_url()) as http:
        body = {"prompt": [1] * 64, "max_tokens": 2, "slo": {"ttft_ms": 3000, "strict": True}}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) in (17, 18)
        assert "ms are left" in answer.json()["error"]["message"]
        body["slo"] = {"deadline_ms": 10}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 504 and "retry-after" not in answer.headers
        await empty(cluster, prefill)
        body |= {"slo": {"ttft_ms": 3000, "token_ms": 50}, "priority": 3, "session_id": "s"}
        assert (await http.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"slo": []}, "slo"),
        ({"slo": {"ttft_ms": "fast"}}, "slo.ttft_ms"),
        ({"slo": {"ttft_ms": -1}}, "slo.ttft_ms"),
        ({"slo": {"token_ms": 1e12}}, "slo.token_ms"),
        ({"slo": {"strict": 1}}, "slo.strict"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 101}, "priority"),
        ({"session_id": 7}, "session_id"),
        ({"session_id": "two words"}, "session_id"),
    ],
)
async def test_a_wish_that_makes_no_sense_is_refused_by_its_name(
    cluster: FakeCluster, fields: dict[str, object], param: str
) -> None:
    await cluster.add_pair()
    async with httpx.AsyncClient(base_url=await cluster.http_url()) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param}: ")


async def test_a_client_that_leaves_the_line_leaves_nothing(cluster: FakeCluster) -> None:
    await full_cluster(cluster)
    asking = asyncio.create_task(cluster.ask(**without_pins(request_id="mine")))
    others = asyncio.create_task(cluster.ask(**without_pins()))
    await eventually(lambda: len(cluster.line) == 2)
    others.cancel()
    assert cluster.handler.cancel(EVERYONE, "mine")
    with pytest.raises(Withdrawn):
        await asking
    await asyncio.gather(others, return_exceptions=True)
    cluster.line.check()
    await cluster.check()


async def test_nobody_waits_longer_than_the_router_lets_it(stack: AsyncExitStack) -> None:
    """What is ahead would take no time at all: the line does not move as it should."""
    cluster = FakeCluster(stack, bounds=Bounds(max_wait_s=0.3, max_queue_s=0.05))
    for name in ("prefill-0", "decode-0"):
        await cluster.add(name, load=busy(queued_tokens=100))
    with pytest.raises(Overloaded, match="are left") as caught:
        await cluster.ask(**without_pins())
    assert caught.value.retry_after_s == pytest.approx(0.1)
    cluster.line.check()


async def test_tenants_take_turns_however_many_requests_one_of_them_sends(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    shares = cluster.line.shares
    serve = shares.serve

    def served(tenant: str, tokens: float) -> None:
        order.append(tenant)
        serve(tenant, tokens)

    monkeypatch.setattr(shares, "serve", served)
    flood, small = (Tenant(name, tenant_key(name)) for name in ("flood", "small"))
    prefill, _ = await full_cluster(cluster)

    def ask(tenant: Tenant) -> "asyncio.Task[object]":
        return asyncio.create_task(cluster.ask(tenant=tenant, **without_pins(max_tokens=1)))

    asking = [ask(flood) for _ in range(6)]
    await eventually(lambda: len(cluster.line) == 6)
    asking += [ask(small) for _ in range(2)]
    await eventually(lambda: len(cluster.line) == 8)
    await empty(cluster, prefill)
    await asyncio.gather(*asking)
    assert sorted(order[:4]) == ["flood", "flood", "small", "small"]
