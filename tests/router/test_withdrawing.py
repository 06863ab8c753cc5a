"""What a request holds at the router, and how it is given back whoever ends it."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.callers import EVERYONE
from router.errors import (
    Overloaded,
    RequestFailed,
    Unavailable,
    Withdrawn,
)
from router.request import Tenant
from tests.router.fakes import (
    PROMPT,
    FakeCluster,
    FakeWorker,
    Script,
    adopted,
    decode_script,
    eventually,
    first_tokens,
    ids_of,
    never,
    request,
    rest,
    text_of,
    without_pins,
)
from tests.router.test_faults import ALL


def stage(name: str, reached: asyncio.Event) -> tuple[Script, Script]:
    """Workers that stop at one stage of a request's life, and say that they are there."""

    async def prefill(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        if name == "queued":
            reached.set()
            await never()
        yield wpb.PrefillEvent(admitted=wpb.PrefillAdmitted())
        if name == "prefilling":
            reached.set()
            await never()
        yield first_tokens(worker, asked.work)
        if name == "transferring":
            reached.set()
            await never()
        worker.cluster.shipments[asked.transfer_id].set()

    async def decode(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        async for event in adopted(worker, asked):
            yield event
        if name == "adopted":
            reached.set()
            await never()
        async for event in rest(worker, asked, upto=4):
            yield event
        reached.set()
        await never()

    return prefill, decode


STAGES = ["queued", "prefilling", "transferring", "adopted", "streaming"]


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("how", ["client leaves", "cancelled by id"])
async def test_cancelling_at_any_stage_frees_both_legs(
    cluster: FakeCluster, name: str, how: str
) -> None:
    reached = asyncio.Event()
    prefill_stops, decode_stops = stage(name, reached)
    await cluster.add("prefill-0", prefill_stops)
    decode = await cluster.add("decode-0", decode_stops)
    asking = asyncio.create_task(cluster.ask(request_id="mine"))
    await reached.wait()
    await eventually(lambda: decode.num_open == 1)
    if how == "client leaves":
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    else:
        assert cluster.handler.cancel(EVERYONE, "mine")
        with pytest.raises(Withdrawn):
            await asking
    await cluster.check()
    assert [line["status"] for line in cluster.log()] == ["cancelled"]


async def test_a_client_that_does_not_read_can_still_be_cancelled_by_id(
    cluster: FakeCluster,
) -> None:
    """Its legs end at once, though its stream only ends when it is read."""

    async def verbose(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[Any]:
        """More in all than any buffer on the way takes."""
        async for event in decode_script(worker, asked):
            if event.HasField("token"):
                event.token.logprobs.top.extend([pb.TopLogprob(token_id=1, logprob=-1.0)] * 500)
            yield event

    cluster.answer = "word " * 1000
    prefill = await cluster.add("prefill-0")
    decode = await cluster.add("decode-0", verbose)
    events = cluster.handler.generate(request(request_id="mine", max_tokens=4000), EVERYONE, "test")
    await anext(events)
    await anext(events)
    await eventually(lambda: decode.num_open == 1)
    await asyncio.sleep(0.2)
    assert decode.num_open == 1  # held back by the reader
    assert cluster.handler.cancel(EVERYONE, "mine")
    await eventually(lambda: decode.num_open == 0 and prefill.num_open == 0)
    with pytest.raises(Withdrawn):
        async for _ in events:
            pass
    await cluster.check()


async def test_only_its_own_tenant_finds_a_request_by_id(cluster: FakeCluster) -> None:
    reached = asyncio.Event()
    prefill_stops, decode_stops = stage("streaming", reached)
    await cluster.add("prefill-0", prefill_stops)
    await cluster.add("decode-0", decode_stops)
    asking = asyncio.create_task(cluster.ask(request_id="mine"))
    await reached.wait()
    stranger = Tenant("stranger", cluster.callers.tenant(None).key[::-1])  # type: ignore[arg-type]
    assert not cluster.handler.cancel(stranger, "mine")
    assert not cluster.handler.cancel(EVERYONE, "yours")
    assert cluster.handler.cancel(EVERYONE, "mine")
    with pytest.raises(Withdrawn):
        await asking


async def test_beyond_the_limit_a_request_is_refused_with_a_hint(cluster: FakeCluster) -> None:
    reached = asyncio.Event()
    prefill_stops, decode_stops = stage("streaming", reached)
    await cluster.add("prefill-0", prefill_stops)
    await cluster.add("decode-0", decode_stops)
    asking = [asyncio.create_task(cluster.ask(max_tokens=50)) for _ in range(64)]
    await eventually(lambda: cluster.register.num_open == 64)
    with pytest.raises(Overloaded, match="64 requests are open, the limit is 64") as caught:
        await cluster.ask()
    assert caught.value.retry_after_s == 1.0
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await cluster.check()


async def test_a_router_that_stops_ends_what_does_not_finish_in_time(
    cluster: FakeCluster,
) -> None:
    reached = asyncio.Event()
    prefill_stops, decode_stops = stage("streaming", reached)
    await cluster.add("prefill-0", prefill_stops)
    await cluster.add("decode-0", decode_stops)
    asking = asyncio.create_task(cluster.ask())
    await reached.wait()
    draining = asyncio.create_task(cluster.register.drain(0.2))
    await asyncio.sleep(0.05)
    with pytest.raises(Unavailable, match="the router is stopping"):
        await cluster.ask()
    assert not asking.done()
    await draining
    with pytest.raises(Unavailable, match="the router is stopping"):
        await asking
    await cluster.check()


async def test_many_requests_cancelled_at_random_moments_leave_nothing(
    cluster: FakeCluster,
) -> None:
    rng = random.Random(5)
    await cluster.add_pair()
    await cluster.add("prefill-1")
    await cluster.add("decode-1")
    moments: list[Callable[[], float]] = [lambda: rng.random() * 0.02, lambda: 5.0]

    async def one(number: int) -> str:
        try:
            async with asyncio.timeout(moments[number % 3 > 0]()):
                return text_of(await cluster.ask(**without_pins(n=1 + number % 2)))
        except (TimeoutError, RequestFailed):
            return "cancelled"

    for _ in range(4):
        texts = await asyncio.gather(*(one(number) for number in range(30)))
        assert texts.count("Hello, world") >= 20 and set(texts) <= {"Hello, world", "cancelled"}
    await cluster.check()
    for worker in cluster.workers.values():
        assert worker.num_open == 0


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_an_id_that_still_runs_is_refused_by_name_and_free_again_at_its_end(
    cluster: FakeCluster, door: str
) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    async def waiting(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        running.set()
        await go_on.wait()
        async for event in decode_script(worker, asked):
            yield event

    await cluster.add("prefill-0")
    decode = await cluster.add("decode-0", waiting)
    first = asyncio.create_task(cluster.ask(request_id="mine"))
    await running.wait()
    said = (
        "request_id: 'mine' is the id of a request that still runs; wait for its end, cancel it,"
        " or use another id"
    )
    if door == "grpc":
        stub = await cluster.grpc_stub()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request(request_id="mine")):
                pass
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert caught.value.details() == said
    else:
        url = await cluster.http_url()
        asked = {"model": "checksum", "prompt": PROMPT, "max_tokens": 9}
        async with httpx.AsyncClient(headers={"x-request-id": "mine"}) as client:
            answer = await client.post(f"{url}/v1/completions", json=asked)
        assert answer.status_code == 409
        assert answer.json()["error"] == {
            "message": said,
            "type": "conflict_error",
            "param": None,
            "code": "repeated",
        }
    assert len(decode.requests) == 1
    go_on.set()
    assert ids_of(await first) == ids_of(await cluster.ask(request_id="mine")) == ALL
    assert cluster.handler.cancel(EVERYONE, "mine") is False
    await cluster.check()
