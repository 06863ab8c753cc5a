"""What a request becomes when a worker fails it: another attempt, or one honest end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.callers import EVERYONE
from router.errors import (
    Broken,
    InvalidRequest,
    Overloaded,
    TimedOut,
    Unavailable,
)
from tests.router.fakes import (
    IDLE,
    PROMPT,
    Abort,
    FakeCluster,
    FakeWorker,
    Script,
    adopted,
    busy,
    decode_script,
    eventually,
    first_tokens,
    ids_of,
    never,
    prefill_script,
    request,
    rest,
    text_of,
    usage_of,
    without_pins,
)

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
ALL = [*b"Hello, world", 257]
# The second choice of the policy: dearer than prefill-0, cheaper than decode alone.
SLOWER = busy(prefill_ms_per_token=1.5)


def aborting(code: grpc.StatusCode, details: str = "", *, after: int = 0, **extra: Any) -> Script:
    """A prefill that ends with this status: after 0 at once, 1 admission, 2 first tokens."""

    async def script(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        if after >= 1:
            yield wpb.PrefillEvent(admitted=wpb.PrefillAdmitted())
        if after >= 2:
            yield first_tokens(worker, asked.work)
        raise Abort(code, details, **extra)

    return script


def cut_after(count: int, code: grpc.StatusCode = UNAVAILABLE) -> Script:
    """A decode that streams `count` tokens of its own, then ends with `code`."""

    async def script(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        async for event in adopted(worker, asked):
            yield event
        async for event in rest(worker, asked, upto=count + 1):
            yield event
        raise Abort(code, "rank 1 died")

    return script


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_a_prefill_that_dies_is_replaced_by_another_one(
    cluster: FakeCluster, after: int
) -> None:
    dying = await cluster.add("prefill-0", aborting(UNAVAILABLE, "killed", after=after))
    other = await cluster.add("prefill-1", load=SLOWER)
    decode = await cluster.add("decode-0")
    events = await cluster.ask(**without_pins())
    assert ids_of(events) == ALL
    usage = usage_of(events)
    assert (usage.journey.attempts, usage.journey.prefill) == (2, "prefill-1")
    await cluster.check()
    first, second = dying.requests[0], other.requests[0]
    assert first.transfer_id != second.transfer_id
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.work.request_id != second.work.request_id
    assert [each.transfer_id for each in decode.requests][-1] == second.transfer_id
    assert len(cluster.log("attempt.failed")) == 1
    assert len(cluster.log()) == 1


async def test_a_closed_connection_counts_against_its_worker(cluster: FakeCluster) -> None:
    """So the next request leaves it alone, without trying."""
    started = asyncio.Event()

    async def hanging(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        yield wpb.PrefillEvent(admitted=wpb.PrefillAdmitted())
        started.set()
        await never()

    dying = await cluster.add("prefill-0", hanging)
    await cluster.add("prefill-1", load=SLOWER)
    await cluster.add("decode-0")
    asking = asyncio.create_task(cluster.ask(**without_pins()))
    await started.wait()
    await dying.die()
    assert usage_of(await asking).journey.attempts == 2
    explained = await cluster.handler.explain(request(**without_pins()), EVERYONE, "test")
    (candidate,) = [each for each in explained.candidates if each.prefill == "prefill-0"]
    assert candidate.refused.startswith("prefill-0 failed 0.")
    assert usage_of(await cluster.ask(**without_pins())).journey.attempts == 1


async def test_a_pair_whose_link_is_cut_is_avoided_and_named(cluster: FakeCluster) -> None:
    """Both workers live and say so; neither is doubted, only the way between them."""

    async def prefill(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        if asked.target.worker == "decode-0":
            raise Abort(UNAVAILABLE, "cannot reach decode-0")
        async for event in prefill_script(worker, asked):
            yield event

    await cluster.add("prefill-0", prefill)
    await cluster.add("decode-0")
    await cluster.add("decode-1", load=busy(decode_step_ms=9))
    assert usage_of(await cluster.ask(**without_pins())).journey.decode == "decode-1"
    explained = await cluster.handler.explain(request(**without_pins()), EVERYONE, "test")
    refused = {(each.prefill, each.decode): each.refused for each in explained.candidates}
    assert "cannot reach decode-0" in refused["prefill-0", "decode-0"]
    assert refused["prefill-0", "decode-1"] == refused["", "decode-0"] == ""
    usage = usage_of(await cluster.ask(**without_pins()))
    assert (usage.journey.decode, usage.journey.attempts) == ("decode-1", 1)


async def test_when_no_prefill_serves_decode_computes_the_prompt(cluster: FakeCluster) -> None:
    await cluster.add("prefill-0", aborting(UNAVAILABLE, after=2))
    await cluster.add("prefill-1", aborting(UNAVAILABLE), load=SLOWER)
    decode = await cluster.add("decode-0")
    events = await cluster.ask(**without_pins())
    assert ids_of(events) == ALL
    assert (usage_of(events).journey.attempts, usage_of(events).journey.prefill) == (3, "")
    assert decode.requests[-1].transfer_id == b""
    await cluster.check()


@pytest.mark.parametrize(("kept_blocks", "holder"), [(0, ""), (3, "decode-0")])
async def test_what_decode_kept_of_a_failed_transfer_counts_in_the_next_choice(
    cluster: FakeCluster, kept_blocks: int, holder: str
) -> None:
    """Three blocks of four need not be computed by the next prefill: it is told to fetch them."""

    async def keeping(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        if asked.source.worker == "prefill-0":
            yield wpb.DecodeEvent(reserved=wpb.DecodeReserved())
            yield wpb.DecodeEvent(kept=wpb.DecodeKept(blocks=kept_blocks))
            raise Abort(UNAVAILABLE, "the link to prefill-0 is lost")
        async for event in decode_script(worker, asked):
            yield event

    await cluster.add("prefill-0", aborting(UNAVAILABLE, "killed", after=1))
    await cluster.add("prefill-1", load=busy(prefill_ms_per_token=30.0))
    await cluster.add("decode-0", keeping)
    events = await cluster.ask(**without_pins())
    assert ids_of(events) == ALL
    journey = usage_of(events).journey
    assert (journey.attempts, journey.prefill, journey.holder) == (2, "prefill-1", holder)
    (failed,) = cluster.log("attempt.failed")
    assert failed["kept_blocks"] == kept_blocks
    await cluster.check()


async def test_attempts_are_bounded_and_the_last_is_decodes_alone(cluster: FakeCluster) -> None:
    for number in range(6):
        await cluster.add(f"prefill-{number}", aborting(UNAVAILABLE))
    decode = await cluster.add("decode-0", cut_after(0))
    with pytest.raises(Unavailable, match=r"4 attempts were made; repeat") as caught:
        await cluster.ask(**without_pins())
    assert [bool(each.transfer_id) for each in decode.requests[-1:]] == [False]
    assert sum(len(cluster.workers[f"prefill-{number}"].requests) for number in range(6)) == 3
    assert caught.value.retry_after_s == 1.0
    await cluster.check()


async def test_prefills_end_after_the_handover_changes_nothing(cluster: FakeCluster) -> None:
    """Its blocks are decode's by then: the stream goes on with what decode has."""
    streaming = asyncio.Event()

    async def prefill(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        worker.cluster.shipments[asked.transfer_id].set()
        yield first_tokens(worker, asked.work)
        await streaming.wait()
        raise Abort(UNAVAILABLE, "killed")

    async def decode(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        async for event in adopted(worker, asked):
            yield event
        async for event in rest(worker, asked, upto=4):
            yield event
        streaming.set()
        await asyncio.sleep(0.1)
        async for event in rest(worker, asked, start=4):
            yield event

    await cluster.add("prefill-0", prefill)
    await cluster.add("decode-0", decode)
    events = await cluster.ask()
    assert ids_of(events) == ALL
    assert (usage_of(events).journey.attempts, usage_of(events).journey.shipped_blocks) == (1, 4)
    assert cluster.log("attempt.failed") == []


async def test_decode_that_dies_before_its_first_token_is_replaced(cluster: FakeCluster) -> None:
    await cluster.add("prefill-0")
    await cluster.add("decode-0", cut_after(0))
    await cluster.add("decode-1", load=busy(decode_step_ms=9))
    events = await cluster.ask(**without_pins())
    assert ids_of(events) == ALL
    assert (usage_of(events).journey.attempts, usage_of(events).journey.decode) == (2, "decode-1")
    await cluster.check()


@pytest.mark.parametrize("count", [1, 5, 11])
async def test_decode_that_dies_while_streaming_ends_the_request_with_its_count(
    cluster: FakeCluster, count: int
) -> None:
    """Nobody else has its KV: what was delivered stays a prefix of the answer."""
    await cluster.add("prefill-0")
    await cluster.add("decode-0", cut_after(count))
    await cluster.add("decode-1", load=busy(decode_step_ms=9))
    seen: list[pb.GenerateResponse] = []
    with pytest.raises(Unavailable) as caught:
        async with aclosing(
            cluster.handler.generate(request(**without_pins()), EVERYONE, "test")
        ) as events:
            async for event in events:
                seen.append(event)
    assert ids_of(seen) == ALL[: count + 1]
    assert f"tokens delivered: {count + 1}" in caught.value.message
    assert "decode-0" in caught.value.message and "rank 1 died" in caught.value.message
    assert cluster.log()[0]["completion_tokens"] == count + 1
    await cluster.check()


async def test_another_first_token_from_another_attempt_ends_the_request(
    cluster: FakeCluster,
) -> None:
    async def other(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        token = wpb.GeneratedToken(token_id=ord("J"))
        yield wpb.PrefillEvent(first_tokens=wpb.FirstTokens(tokens=[token]))
        await never()

    await cluster.add("prefill-0", aborting(UNAVAILABLE, after=2))
    await cluster.add("prefill-1", other, load=SLOWER)
    await cluster.add("decode-0")
    with pytest.raises(Unavailable, match=r"another text: .*tokens delivered: 1"):
        await cluster.ask(**without_pins())
    await cluster.check()


async def test_a_worker_replaced_under_its_address_costs_no_request(cluster: FakeCluster) -> None:
    """Another life answers: it refuses, and the request goes elsewhere."""
    refuse = aborting(grpc.StatusCode.FAILED_PRECONDITION, "I am life 2")
    await cluster.add("prefill-0", refuse)
    await cluster.add("prefill-1", load=SLOWER)
    await cluster.add("decode-0")
    assert usage_of(await cluster.ask(**without_pins())).journey.prefill == "prefill-1"


async def test_what_a_worker_cannot_compute_is_not_tried_again(cluster: FakeCluster) -> None:
    bad = await cluster.add("prefill-0", aborting(grpc.StatusCode.INTERNAL, "logits are NaN"))
    other = await cluster.add("prefill-1", load=SLOWER)
    await cluster.add("decode-0")
    with pytest.raises(Broken, match=r"prefill-0 said INTERNAL.*logits are NaN"):
        await cluster.ask(**without_pins())
    assert (len(bad.requests), len(other.requests)) == (1, 0)
    await cluster.check()


def hint(seconds: float) -> list[tuple[str, bytes]]:
    detail = any_pb2.Any()
    delay = Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    detail.Pack(RetryInfo(retry_delay=delay))
    status = Status(code=8, message="the queue holds 256 requests", details=[detail])
    return [("grpc-status-details-bin", status.SerializeToString())]


async def test_a_full_queue_is_said_with_the_workers_own_hint(cluster: FakeCluster) -> None:
    full = aborting(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue holds 256 requests", metadata=hint(2.5)
    )
    await cluster.add("prefill-0", full)
    await cluster.add("decode-0")
    with pytest.raises(Overloaded, match=r"prefill-0 has no room.*256 requests") as caught:
        await cluster.ask(**without_pins())
    assert caught.value.retry_after_s == 2.5
    await cluster.check()
    other = await cluster.add("prefill-1", load=SLOWER)
    assert text_of(await cluster.ask(**without_pins())) == "Hello, world"
    assert len(other.requests) == 1


async def test_a_request_that_outgrows_decode_ends_with_what_it_has(cluster: FakeCluster) -> None:
    await cluster.add("prefill-0")
    await cluster.add("decode-0", cut_after(7, grpc.StatusCode.RESOURCE_EXHAUSTED))
    with pytest.raises(Overloaded, match="tokens delivered: 8"):
        await cluster.ask()


async def test_a_pinned_request_never_goes_elsewhere(cluster: FakeCluster) -> None:
    await cluster.add("prefill-0", aborting(UNAVAILABLE, "killed"))
    other = await cluster.add("prefill-1")
    decode = await cluster.add("decode-0")
    with pytest.raises(Unavailable, match="killed"):
        await cluster.ask(pins=pb.Pins(prefill="prefill-0"))
    assert other.requests == []
    assert all(each.transfer_id for each in decode.requests)


async def test_without_replicas_a_request_waits_a_little_then_says_so(
    cluster: FakeCluster,
) -> None:
    await cluster.add("prefill-0")
    with pytest.raises(Unavailable, match="no decode replica is live"):
        await cluster.ask(**without_pins())
    asking = asyncio.create_task(cluster.ask(**without_pins()))
    await asyncio.sleep(0.05)
    await cluster.add("decode-0")
    assert text_of(await asking) == "Hello, world"


async def test_a_lapsed_lease_ends_the_legs_of_a_silent_worker(cluster: FakeCluster) -> None:
    async def silent(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        async for event in adopted(worker, asked):
            yield event
        async for event in rest(worker, asked, upto=3):
            yield event
        await never()

    await cluster.add("prefill-0")
    decode = await cluster.add("decode-0", silent)
    asking = asyncio.create_task(cluster.ask())
    await eventually(lambda: decode.num_open == 1)
    await asyncio.sleep(0.1)
    await cluster.leave(decode)
    with pytest.raises(Unavailable, match=r"let its lease lapse; tokens delivered: 3"):
        await asking
    await cluster.check()


async def test_the_deadline_reaches_both_workers_and_frees_them(cluster: FakeCluster) -> None:
    async def slow(worker: FakeWorker, asked: Any) -> AsyncIterator[object]:
        yield wpb.PrefillEvent(admitted=wpb.PrefillAdmitted())
        await never()

    prefill, decode = await cluster.add("prefill-0", slow), await cluster.add("decode-0")
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(TimedOut, match="tokens delivered: 0"):
        async with aclosing(
            cluster.handler.generate(request(), EVERYONE, "test", timeout_s=0.3)
        ) as events:
            async for _ in events:
                pass
    assert 0.2 <= loop.time() - begun < 1.0
    await cluster.check()
    assert (prefill.num_ended_early, decode.num_ended_early) == (1, 1)


async def test_our_own_bug_is_internal_logged_once_and_leaves_nothing(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.add_pair()

    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cluster.fleet, "book", broken)
    with pytest.raises(Broken, match=r"the router failed: ZeroDivisionError"):
        await cluster.ask()
    assert [line["status"] for line in cluster.log()] == ["internal"]
    (line,) = cluster.log("request.broken")
    assert "ZeroDivisionError: a bug" in line["exception"]
    await cluster.check()


DOWN = (
    "decode-0 failed with UNAVAILABLE: nobody answers at its address; tokens delivered: 1;"
    " no usable replica: decode-0 has just failed this request; repeat the request after 1 s"
)


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_a_decode_that_is_down_is_named_without_what_sockets_say(
    cluster: FakeCluster, door: str
) -> None:
    _, decode = await cluster.add_pair()
    await decode.die()
    if door == "grpc":
        stub = await cluster.grpc_stub()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request(**without_pins())):
                pass
        said = (caught.value.code(), caught.value.details())
        assert said == (UNAVAILABLE, DOWN)
    else:
        url = await cluster.http_url()
        asked = {"model": "checksum", "prompt": PROMPT, "max_tokens": 9}
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{url}/v1/completions", json=asked)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == DOWN
    (failed,) = cluster.log("attempt.failed")
    (heard,) = failed["heard"]
    assert "Connection refused" in heard


async def test_a_decode_that_dies_while_it_streams_is_named_without_what_sockets_say(
    cluster: FakeCluster,
) -> None:
    streaming = asyncio.Event()

    async def hanging(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        async for event in adopted(worker, asked):
            yield event
        async for event in rest(worker, asked, upto=3):
            yield event
        streaming.set()
        await never()

    await cluster.add("prefill-0")
    decode = await cluster.add("decode-0", hanging)
    asking = asyncio.create_task(cluster.ask())
    await streaming.wait()
    await decode.die()
    with pytest.raises(Unavailable) as caught:
        await asking
    assert caught.value.message == (
        "decode-0 failed with UNAVAILABLE: its connection broke; tokens delivered: 3;"
        " repeat the request after 1 s"
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_pin_to_nobody_is_refused_by_its_field_with_the_names_there_are(
    cluster: FakeCluster, role: str
) -> None:
    await cluster.add("prefill-0")
    await cluster.add("prefill-1")
    await cluster.add("decode-0")
    names = {"prefill": "prefill-0, prefill-1", "decode": "decode-0"}[role]
    pins = pb.Pins(prefill="prefill-9") if role == "prefill" else pb.Pins(decode="prefill-9")
    with pytest.raises(InvalidRequest) as caught:
        await cluster.ask(pins=pins)
    assert caught.value.field == f"pins.{role}"
    assert caught.value.message == (
        f"pins.{role}: no {role} worker 'prefill-9' is registered; there are: {names}"
    )
    await cluster.check()


async def test_a_pin_to_a_worker_that_drains_says_that_it_is_not_ready(
    cluster: FakeCluster,
) -> None:
    await cluster.add("prefill-0", load=replace(IDLE, draining=True))
    await cluster.add("prefill-1")
    await cluster.add("decode-0")
    with pytest.raises(Unavailable) as caught:
        await cluster.ask(pins=pb.Pins(prefill="prefill-0"))
    assert caught.value.message == (
        "pins.prefill: prefill-0 is registered but not ready: it is draining"
    )
