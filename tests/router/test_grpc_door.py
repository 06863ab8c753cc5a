"""The gRPC door, as real clients of it see it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status.rpc_status import aio as rpc_status  # type: ignore[attr-defined]

from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.callers import Callers
from tests.router.fakes import (
    FakeCluster,
    FakeWorker,
    adopted,
    eventually,
    ids_of,
    never,
    request,
    rest,
    text_of,
    usage_of,
)


async def endless(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
    """Streams as fast as its reader reads."""
    async for event in adopted(worker, asked):
        yield event
    index = 1
    while True:
        yield wpb.DecodeEvent(token=wpb.GeneratedToken(index=index, token_id=65))
        index += 1


async def stuck(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
    async for event in adopted(worker, asked):
        yield event
    async for event in rest(worker, asked, upto=4):
        yield event
    await never()


async def test_generate_streams_and_ends_ok(cluster: FakeCluster) -> None:
    await cluster.add_pair()
    call = (await cluster.grpc_stub()).Generate(request(), timeout=10)
    events = [event async for event in call]
    assert text_of(events) == "Hello, world" and ids_of(events)[-1] == 257
    assert usage_of(events).journey.decode == "decode-0"
    assert await call.code() is grpc.StatusCode.OK
    await cluster.check()


async def test_a_chat_is_templated_and_tokenised_once(cluster: FakeCluster) -> None:
    prefill, decode = await cluster.add_pair()
    stub = await cluster.grpc_stub()
    events = [event async for event in stub.Generate(request(chat=[("user", "hi")]))]
    prompt = list(prefill.requests[0].work.prompt)
    assert prompt == [258, *b"user\nhi", 259, *b"\n", 258, *b"assistant\n"]
    assert list(decode.requests[0].work.prompt) == prompt
    assert text_of(events) == "Hello, world"


async def test_explain_says_where_without_sending(cluster: FakeCluster) -> None:
    prefill, decode = await cluster.add_pair()
    stub = await cluster.grpc_stub()
    answer = (await stub.Explain(request(pins=pb.Pins()))).explanation
    assert (answer.prompt_tokens, answer.prompt_blocks) == (64, 4)
    assert (answer.chosen_prefill, answer.chosen_decode) == ("prefill-0", "decode-0")
    assert answer.action == "serve"
    assert [(each.action, each.prefill, each.refused) for each in answer.candidates] == [
        ("", "prefill-0", ""),
        ("", "", ""),
        ("wait", "", "a worker is under its bar"),
        ("reject", "", "there is a way to serve it"),
    ]
    assert answer.candidates[0].terms_ms.keys() == {
        "queue",
        "fetch",
        "compute",
        "link",
        "interference",
        "admission",
        "followers",
        "dispatch",
        "streaming",
        "lateness",
        "session",
        "distance",
    }
    assert prefill.requests == decode.requests == []


async def test_cancel_ends_the_stream_and_tells_whether_it_was_there(
    cluster: FakeCluster,
) -> None:
    await cluster.add("prefill-0")
    await cluster.add("decode-0", stuck)
    stub = await cluster.grpc_stub()
    call = stub.Generate(request(request_id="mine"))
    await _first_tokens_of(call)
    assert not (await stub.Cancel(pb.CancelRequest(request_id="yours"))).found
    assert (await stub.Cancel(pb.CancelRequest(request_id="mine"))).found
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    await cluster.check()
    assert not (await stub.Cancel(pb.CancelRequest(request_id="mine"))).found


async def _first_tokens_of(call: Any) -> None:
    """Tokens that are there together may come in one message."""
    num_tokens = 0
    while num_tokens < 2:
        num_tokens += len((await call.read()).delta.token_ids)


@pytest.mark.parametrize("reads", ["nothing", "all"])
async def test_a_client_that_leaves_frees_both_workers(cluster: FakeCluster, reads: str) -> None:
    """Also while the door waits inside a write that its client does not read."""
    await cluster.add("prefill-0")
    decode = await cluster.add("decode-0", endless if reads == "nothing" else stuck)
    stub = await cluster.grpc_stub()
    call = stub.Generate(request())
    if reads == "nothing":
        await eventually(lambda: decode.num_open == 1)
        await asyncio.sleep(0.3)
    else:
        await _first_tokens_of(call)
    call.cancel()
    await cluster.check()
    await eventually(lambda: len(cluster.log()) == 1)
    assert cluster.log()[0]["status"] == "cancelled"


async def test_a_stalled_client_holds_up_nobody_else(cluster: FakeCluster) -> None:
    await cluster.add("prefill-0")
    await cluster.add("decode-0", endless)
    await cluster.add("decode-1")
    stub = await cluster.grpc_stub()
    stalled = [stub.Generate(request()) for _ in range(5)]
    await asyncio.sleep(0.3)
    normal = request(pins=pb.Pins(prefill="prefill-0", decode="decode-1"))
    async with asyncio.timeout(5):
        events = [event async for event in stub.Generate(normal)]
    assert text_of(events) == "Hello, world"
    for call in stalled:
        call.cancel()
    await cluster.check()


async def test_the_clients_deadline_is_the_workers_too(cluster: FakeCluster) -> None:
    await cluster.add("prefill-0")
    await cluster.add("decode-0", stuck)
    call = (await cluster.grpc_stub()).Generate(request(), timeout=0.4)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await cluster.check()


async def test_overload_carries_a_retry_hint(cluster: FakeCluster) -> None:
    await cluster.add("prefill-0")
    await cluster.add("decode-0", stuck)
    stub = await cluster.grpc_stub()
    calls = [stub.Generate(request()) for _ in range(64)]
    await asyncio.gather(*(call.read() for call in calls))
    call = stub.Generate(request())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status: Any = await rpc_status.from_call(call)
    hint = RetryInfo()
    assert status.details[0].Unpack(hint) and hint.retry_delay.seconds == 1
    for each in calls:
        each.cancel()
    await cluster.check()


@pytest.mark.timed
async def test_a_client_that_pings_every_ten_seconds_keeps_its_connection(
    cluster: FakeCluster,
) -> None:
    """As clients in Go do, also while they have no call. A server of gRPC's own defaults hangs up
    after the third ping.
    """
    await cluster.add_pair()
    await cluster.grpc_stub()
    options = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_permit_without_calls", 1)]
    options += [("grpc.http2.max_pings_without_data", 0)]
    address = f"127.0.0.1:{cluster.door.port}"
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await channel.channel_ready()
        states = [channel.get_state()]
        for _ in range(45):
            await asyncio.sleep(1.0)
            states.append(channel.get_state())
        assert set(states) == {grpc.ChannelConnectivity.READY}


async def test_health_follows_readiness_and_liveness_stays(cluster: FakeCluster) -> None:
    await cluster.grpc_stub()
    health = health_pb2_grpc.HealthStub(cluster.channel)
    statuses = {}
    for service in ("", "liveness", "readiness", "kvferry.v1.Inference"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        statuses[service] = answer.status
    assert statuses == {"": 2, "liveness": 1, "readiness": 2, "kvferry.v1.Inference": 2}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await cluster.add("decode-0")
    await cluster.door.set_ready(not cluster.fleet.whats_missing())
    answer = await health.Check(health_pb2.HealthCheckRequest(service="readiness"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_describes_the_api_to_a_client_that_has_no_stubs(
    cluster: FakeCluster,
) -> None:
    """What grpcurl asks: the services, then the file of one of them."""
    await cluster.grpc_stub()
    ask = reflection_pb2.ServerReflectionRequest
    stub = reflection_pb2_grpc.ServerReflectionStub(cluster.channel)
    call = stub.ServerReflectionInfo(
        iter([ask(list_services=""), ask(file_containing_symbol="kvferry.v1.Inference")])
    )
    listed, described = [answer async for answer in call]
    names = {service.name for service in listed.list_services_response.service}
    assert {"kvferry.v1.Inference", "grpc.health.v1.Health"} <= names
    file = FileDescriptorProto.FromString(
        described.file_descriptor_response.file_descriptor_proto[0]
    )
    (service,) = file.service
    assert [method.name for method in service.method] == ["Generate", "Cancel", "Explain"]


async def test_with_keys_only_their_holders_are_served(cluster: FakeCluster) -> None:
    prefill, _ = await cluster.add_pair()
    cluster.callers = Callers({"key-a": "alice", "key-b": "bob"})
    stub = await cluster.grpc_stub()

    async def ask(*metadata: tuple[str, str]) -> grpc.StatusCode:
        call = stub.Generate(request(max_tokens=1), metadata=metadata)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            assert "key-" not in str(error.details())
        code: grpc.StatusCode = await call.code()
        return code

    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    assert await ask() is unauthenticated
    assert await ask(("authorization", "Bearer key-c")) is unauthenticated
    assert await ask(("authorization", "key-a")) is unauthenticated
    assert prefill.requests == []
    for key in ("key-a", "key-b", "key-a"):
        assert await ask(("authorization", f"Bearer {key}")) is grpc.StatusCode.OK
    tenants = [each.work.tenant_key for each in prefill.requests]
    assert tenants[0] == tenants[2] != tenants[1]
    assert [line["tenant"] for line in cluster.log() if line["status"] == "ok"] == [
        "alice",
        "bob",
        "alice",
    ]
    assert "key-" not in cluster.lines.getvalue()
