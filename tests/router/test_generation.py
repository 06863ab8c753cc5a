"""One request through the handler when all goes well: merged, complete, and honestly counted."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.callers import EVERYONE
from tests.router.fakes import (
    FakeCluster,
    FakeWorker,
    adopted,
    decode_script,
    first_tokens,
    ids_of,
    never,
    prefill_done,
    prefill_script,
    request,
    rest,
    text_of,
    usage_of,
)


async def test_a_request_streams_its_answer_once_and_says_what_it_cost(
    cluster: FakeCluster,
) -> None:
    prefill, decode = await cluster.add_pair()
    events = await cluster.ask(seed=3)
    assert (events[0].started.prompt_tokens, events[0].started.seed) == (64, 3)
    assert text_of(events) == "Hello, world"
    assert ids_of(events) == [*b"Hello, world", 257]
    assert [each.finished.reason for each in events if each.HasField("finished")] == ["stop"]
    usage = usage_of(events)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (64, 13, 0)
    journey = usage.journey
    assert (journey.prefill, journey.decode, journey.wire) == ("prefill-0", "decode-0", "grpc")
    assert (journey.prompt_blocks, journey.computed_tokens) == (4, 64)
    assert (journey.shipped_blocks, journey.shipped_bytes, journey.attempts) == (4, 4000, 1)
    assert (prefill.num_ended_early, decode.num_ended_early) == (0, 0)
    await cluster.check()


async def test_the_client_hears_the_end_before_it_is_written_down(stack: AsyncExitStack) -> None:
    owed: list[Callable[[], None]] = []
    cluster = FakeCluster(stack, afterwards=owed.append)
    await cluster.add_pair()
    assert (await cluster.ask())[-1].HasField("usage")
    assert "request.ended" not in cluster.lines.getvalue()
    (work,) = owed
    work()
    assert cluster.lines.getvalue().count("request.ended") == 1


@pytest.mark.parametrize("asked", [request(), pb.GenerateRequest(text="Hello, world" * 20)])
async def test_blocks_are_named_by_the_prompt_whichever_way_it_came(
    cluster: FakeCluster, asked: pb.GenerateRequest
) -> None:
    await cluster.add_pair()
    accepted = await cluster.validator.accept(asked, "id", EVERYONE, "grpc")
    assert len(accepted.prompt) >= 64 and accepted.packed == array("I", accepted.prompt)
    again = replace(accepted, packed=array("I"))
    assert again.packed == accepted.packed and again.digest() == accepted.digest()


async def test_both_legs_are_opened_at_once_for_each_other(cluster: FakeCluster) -> None:
    prefill, decode = await cluster.add_pair()
    await cluster.ask(temperature=0.5, pins=pb.Pins(max_chunk_tokens=16, wire="gloo"))
    (asked,), (reserved,) = prefill.requests, decode.requests
    assert asked.transfer_id == reserved.transfer_id and len(asked.transfer_id) == 16
    assert asked.work == reserved.work
    assert list(asked.work.prompt) == list(range(64))
    assert asked.work.sampling.temperature == 0.5 and asked.work.sampling.HasField("top_p")
    assert list(asked.work.eos_token_ids) == [257]
    assert (asked.expected_instance, reserved.expected_instance) == (
        "prefill-0-life-1",
        "decode-0-life-1",
    )
    assert (asked.target.instance, reserved.source.instance) == (
        "decode-0-life-1",
        "prefill-0-life-1",
    )
    assert (asked.wire, asked.max_chunk_tokens) == ("gloo", 16)
    assert list(asked.target.kv_head_stops) == [3]


async def test_a_first_token_said_by_both_legs_is_passed_on_once(cluster: FakeCluster) -> None:
    async def decode(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        async for event in adopted(worker, asked):
            yield event
        async for event in rest(worker, asked, start=0):
            yield event

    await cluster.add("prefill-0")
    await cluster.add("decode-0", decode)
    assert ids_of(await cluster.ask()) == [*b"Hello, world", 257]


async def test_tokens_that_overtake_the_first_one_wait_for_it(cluster: FakeCluster) -> None:
    async def prefill(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        worker.cluster.shipments[asked.transfer_id].set()
        await asyncio.sleep(0.1)  # decode has streamed and ended by then
        yield first_tokens(worker, asked.work)
        yield prefill_done(asked.work)

    await cluster.add("prefill-0", prefill)
    await cluster.add("decode-0")
    events = await cluster.ask()
    assert ids_of(events) == [*b"Hello, world", 257]
    assert usage_of(events).journey.attempts == 1


async def test_tokens_that_come_while_the_client_is_busy_are_told_at_once(
    cluster: FakeCluster,
) -> None:
    _, decode = await cluster.add_pair()
    all_sent = asyncio.Event()

    async def hasty(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[wpb.DecodeEvent]:
        async for event in decode_script(worker, asked):
            yield event
        all_sent.set()

    decode.script = hasty
    events = []
    async with aclosing(cluster.handler.generate(request(logprobs=0), EVERYONE, "test")) as told:
        async for event in told:
            events.append(event)
            if event.HasField("delta") and not all_sent.is_set():
                await asyncio.wait_for(all_sent.wait(), 20)
                await asyncio.sleep(0.5)  # on their way
    assert ids_of(events) == [*b"Hello, world", 257]
    assert text_of(events) == "Hello, world"
    deltas = [each.delta for each in events if each.HasField("delta")]
    assert len(deltas) < 13
    assert [each.index for each in deltas] == [
        sum(len(before.token_ids) for before in deltas[:at]) for at in range(len(deltas))
    ]
    named = [each.token_id for delta in deltas for each in delta.logprobs]
    assert named == [*b"Hello, world", 257]
    assert usage_of(events).completion_tokens == 13
    await cluster.check()


async def test_every_choice_has_its_own_unbroken_stream(cluster: FakeCluster) -> None:
    await cluster.add_pair()
    events = await cluster.ask(n=3, max_tokens=5)
    assert [text_of(events, choice) for choice in range(3)] == ["Hello"] * 3
    assert [ids_of(events, choice) for choice in range(3)] == [[*b"Hello"]] * 3
    reasons = {
        each.finished.choice: each.finished.reason for each in events if each.HasField("finished")
    }
    assert reasons == {0: "length", 1: "length", 2: "length"}
    assert usage_of(events).completion_tokens == 15
    await cluster.check()


@pytest.mark.parametrize(
    ("answer", "reason", "ids"), [("", "stop", [257]), ("Yes", "length", [89])]
)
async def test_an_answer_of_one_token_needs_no_transfer(
    cluster: FakeCluster, answer: str, reason: str, ids: list[int]
) -> None:
    """The decode leg is cancelled while it waits, and nothing waits for it."""

    async def prefill(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        yield first_tokens(worker, asked.work, cached=48)
        yield wpb.PrefillEvent(done=wpb.PrefillDone(computed_tokens=16))

    cluster.answer = answer
    await cluster.add("prefill-0", prefill)
    decode = await cluster.add("decode-0")
    events = await cluster.ask(max_tokens=1)
    assert ids_of(events) == ids
    assert [each.finished.reason for each in events if each.HasField("finished")] == [reason]
    usage = usage_of(events)
    assert (usage.cached_tokens, usage.journey.computed_tokens) == (48, 16)
    assert usage.journey.shipped_blocks == 0
    await cluster.check()
    assert decode.num_ended_early == len(decode.requests)  # it may not even have begun


async def test_cached_tokens_are_those_prefill_skipped_recounted_at_admission(
    cluster: FakeCluster,
) -> None:
    async def prefill(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        yield wpb.PrefillEvent(admitted=wpb.PrefillAdmitted(cached_tokens=48))
        worker.cluster.shipments[asked.transfer_id].set()
        yield first_tokens(worker, asked.work, cached=32)  # a block was evicted meanwhile
        yield prefill_done(asked.work, 32)

    await cluster.add("prefill-0", prefill)
    await cluster.add("decode-0")
    usage = usage_of(await cluster.ask())
    assert usage.cached_tokens == 32
    assert usage.journey.prefill_cached_blocks == 2
    assert usage.journey.computed_tokens == 32


async def test_decode_alone_serves_when_asked_and_counts_its_own_cache(
    cluster: FakeCluster,
) -> None:
    async def decode(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        async for event in rest(worker, asked, start=0):
            if event.HasField("done"):
                event.done.cached_tokens, event.done.computed_tokens = 48, 16
            yield event

    prefill = await cluster.add("prefill-0")
    worker = await cluster.add("decode-0", decode)
    events = await cluster.ask(pins=pb.Pins(no_prefill=True))
    assert text_of(events) == "Hello, world"
    usage = usage_of(events)
    assert (usage.cached_tokens, usage.journey.computed_tokens) == (48, 16)
    assert (usage.journey.prefill, usage.journey.decode_cached_blocks) == ("", 3)
    assert prefill.requests == [] and worker.requests[0].transfer_id == b""


async def test_a_stop_string_over_several_tokens_ends_the_text_before_it(
    cluster: FakeCluster,
) -> None:
    """The workers do not know: they are told, and nothing after the stop is passed on."""
    cluster.answer = "The quick brown fox jumps"
    prefill, decode = await cluster.add_pair()
    events = await cluster.ask(stop=["own fox", "never"])
    assert text_of(events) == "The quick br"
    (finished,) = [each.finished for each in events if each.HasField("finished")]
    assert (finished.reason, finished.stop) == ("stop", "own fox")
    assert bytes(ids_of(events)) == b"The quick brown fox"
    assert not any("o" in each.delta.text for each in events if each.HasField("delta"))
    await cluster.check()
    assert prefill.num_open == decode.num_open == 0


async def test_the_text_of_the_first_min_tokens_is_not_searched_for_stops(
    cluster: FakeCluster,
) -> None:
    cluster.answer = "aXbXc"
    await cluster.add_pair()
    assert text_of(await cluster.ask(stop=["X"], min_tokens=2)) == "aXb"


async def test_characters_split_over_tokens_are_passed_on_whole(cluster: FakeCluster) -> None:
    cluster.answer = "日本語 😀"
    await cluster.add_pair()
    events = await cluster.ask()
    assert text_of(events) == "日本語 😀"
    pieces = [each.delta.text for each in events if each.HasField("delta")]
    assert "".join(pieces) == "日本語 😀"
    assert not any("\ufffd" in piece for piece in pieces)


async def test_a_token_that_stops_by_its_id_is_no_text(cluster: FakeCluster) -> None:
    async def decode(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        async for event in adopted(worker, asked):
            yield event
        token = wpb.GeneratedToken(index=1, token_id=ord("!"), finish_reason="stop")
        token.stop_token_id = ord("!")
        yield wpb.DecodeEvent(token=token)

    await cluster.add("prefill-0")
    await cluster.add("decode-0", decode)
    events = await cluster.ask(stop_token_ids=[ord("!")])
    assert text_of(events) == "H"
    (finished,) = [each.finished for each in events if each.HasField("finished")]
    assert (finished.reason, finished.stop_token_id) == ("stop", 33)


async def test_logprobs_travel_with_their_tokens(cluster: FakeCluster) -> None:
    await cluster.add_pair()
    events = await cluster.ask(logprobs=1, max_tokens=3)
    logprobs = [one for each in events if each.HasField("delta") for one in each.delta.logprobs]
    assert [(each.token_id, each.top[0].token_id) for each in logprobs] == [
        (72, 72),
        (101, 101),
        (108, 108),
    ]


async def test_workers_that_say_nothing_last_do_not_hold_up_the_end(cluster: FakeCluster) -> None:
    async def prefill(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        async for event in prefill_script(worker, asked):
            yield event
        await never()

    async def decode(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
        async for event in decode_script(worker, asked):
            yield event
        await never()

    await cluster.add("prefill-0", prefill)
    await cluster.add("decode-0", decode)
    async with asyncio.timeout(2):
        assert text_of(await cluster.ask()) == "Hello, world"
    await cluster.check()


async def test_a_new_request_gets_an_id_a_seed_and_the_plan_it_asked_for(
    cluster: FakeCluster,
) -> None:
    await cluster.add_pair()
    started = (await cluster.ask(explain=True, max_tokens=1))[0].started
    assert len(started.request_id) == 24 and started.seed == 7 and started.model == "checksum"
    plan = started.explanation
    assert (plan.chosen_prefill, plan.chosen_decode) == ("prefill-0", "decode-0")
    assert plan.prompt_blocks == 4
    for candidate in plan.candidates:
        assert sum(candidate.terms_ms.values()) == pytest.approx(candidate.cost_ms)
    assert not (await cluster.ask(max_tokens=1))[0].started.HasField("explanation")


async def test_one_log_line_tells_of_a_request_and_never_its_text(cluster: FakeCluster) -> None:
    await cluster.add_pair()
    await cluster.ask(text="a secret prompt", request_id="mine", max_tokens=4)
    (line,) = cluster.log()
    assert (line["request_id"], line["status"], line["door"]) == ("mine", "ok", "test")
    assert (line["prompt_tokens"], line["completion_tokens"], line["attempts"]) == (15, 4, 1)
    assert (line["prefill"], line["decode"]) == ("prefill-0", "decode-0")
    assert "secret" not in cluster.lines.getvalue() and "Hell" not in cluster.lines.getvalue()


async def test_metrics_agree_with_what_happened(cluster: FakeCluster) -> None:
    await cluster.add_pair()
    for _ in range(3):
        await cluster.ask(max_tokens=4)

    def value(name: str, **labels: str) -> float | None:
        return cluster.metrics.registry.get_sample_value(name, labels)

    model = {"model_name": "checksum", "engine": "0"}
    assert value("kvferry_requests_total", door="test", status="ok") == 3
    assert value("kvferry_prompt_tokens_total", kind="prompt") == 192
    assert value("kvferry_prompt_tokens_total", kind="delivered") == 0
    assert value("kvferry_shipped_bytes_total") == 12000
    assert value("vllm:generation_tokens_total", **model) == 12
    assert value("vllm:request_success_total", finished_reason="length", **model) == 3
    assert value("vllm:time_to_first_token_seconds_count", **model) == 3
    assert value("vllm:num_requests_running", **model) == 0
    assert value("kvferry_live_workers", role="decode") == 1
