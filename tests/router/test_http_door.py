"""The HTTP door through the real openai SDK and plain HTTP."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from protos import worker_pb2 as wpb
from router.callers import Callers
from tests.router.fakes import (
    FakeCluster,
    FakeWorker,
    adopted,
    eventually,
    first_tokens,
    never,
    prefill_done,
    rest,
)

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def sdk(cluster: FakeCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """The real client of the cluster's HTTP door, with no retries of its own."""
    url = await cluster.http_url()
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    async with client:
        yield client


@pytest.fixture
async def http(cluster: FakeCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=await cluster.http_url(), timeout=10) as client:
        yield client


async def stuck(worker: FakeWorker, asked: wpb.DecodeRequest) -> AsyncIterator[object]:
    async for event in adopted(worker, asked):
        yield event
    async for event in rest(worker, asked, upto=4):
        yield event
    await never()


async def cached_prefill(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
    worker.cluster.shipments[asked.transfer_id].set()
    yield first_tokens(worker, asked.work, cached=16)
    yield prefill_done(asked.work, 16)


async def test_chat_answers_whole_with_usage(cluster: FakeCluster, sdk: openai.AsyncOpenAI) -> None:
    await cluster.add("prefill-0", cached_prefill)
    await cluster.add("decode-0")
    answer = await sdk.chat.completions.create(model="checksum", messages=HI, seed=1)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello, world")
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.model == "checksum" and answer.created == 1234
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (21, 13, 34)
    assert usage.prompt_tokens_details.cached_tokens == 16
    await cluster.check()


async def test_chat_streams_role_text_reason_and_usage(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI
) -> None:
    cluster.answer = "日本語!"
    await cluster.add_pair()
    stream = await sdk.chat.completions.create(
        model="checksum", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[1:-2]]
    assert "".join(pieces) == "日本語!"
    assert all(pieces), "a chunk has nothing new"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 11
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks[:-1])
    await cluster.check()


async def test_without_include_usage_there_is_no_usage_chunk(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI
) -> None:
    await cluster.add_pair()
    stream = await sdk.chat.completions.create(model="checksum", messages=HI, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", ["Say", [83, 97, 121]])
async def test_completions_take_text_or_token_ids(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI, prompt: Any
) -> None:
    prefill, _ = await cluster.add_pair()
    answer = await sdk.completions.create(
        model="checksum",
        prompt=prompt,
        max_tokens=5,
        temperature=0.25,
        stop=["zzz"],
        logit_bias={"65": -5},
        n=2,
        extra_body={"top_k": 7, "min_p": 0.125, "ignore_eos": True, "min_tokens": 1, "new": 1},
    )
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage is not None and answer.usage.completion_tokens == 10
    work = prefill.requests[0].work
    assert list(work.prompt) == list(b"Say")
    sampling = work.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.25, 7, 0.125)
    assert (sampling.n, sampling.min_tokens, sampling.ignore_eos) == (2, 1, True)
    assert dict(sampling.logit_bias) == {65: -5.0} and list(sampling.stop) == ["zzz"]


async def test_defaults_are_openais_16_tokens_or_the_room_there_is(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI
) -> None:
    prefill, _ = await cluster.add_pair()
    await sdk.completions.create(model="checksum", prompt="x")
    await sdk.chat.completions.create(model="checksum", messages=HI)
    await sdk.chat.completions.create(model="checksum", messages=HI, max_completion_tokens=3)
    await sdk.chat.completions.create(model="checksum", messages=HI, max_tokens=4)
    lengths = [each.work.sampling.max_tokens for each in prefill.requests]
    assert lengths == [16, 256, 3, 4]


async def test_completions_stream_and_echo(cluster: FakeCluster, sdk: openai.AsyncOpenAI) -> None:
    await cluster.add_pair()
    stream = await sdk.completions.create(
        model="checksum", prompt="Say: ", echo=True, max_tokens=5, stream=True
    )
    texts = [chunk.choices[0].text async for chunk in stream]
    assert (texts[0], "".join(texts[1:-1]), texts[-1]) == ("Say: ", "Hello", "")
    whole = await sdk.completions.create(model="checksum", prompt=[83, 97], echo=True, max_tokens=5)
    assert whole.choices[0].text == "SaHello"


async def test_a_batch_of_prompts_is_answered_in_order(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI
) -> None:
    prefill, _ = await cluster.add_pair()
    answer = await sdk.completions.create(
        model="checksum", prompt=["a", "bb", "ccc"], n=2, max_tokens=3, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in answer.choices] == [
        "aHel",
        "aHel",
        "bbHel",
        "bbHel",
        "cccHel",
        "cccHel",
    ]
    assert answer.usage is not None and answer.usage.prompt_tokens == 6
    stream = await sdk.completions.create(
        model="checksum", prompt=["a", "b"], max_tokens=3, stream=True
    )
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "Hel", 1: "Hel"}
    await cluster.check()
    assert len({each.work.request_id for each in prefill.requests}) == 5


async def test_one_bad_prompt_of_a_batch_refuses_the_batch_and_frees_the_rest(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI
) -> None:
    await cluster.add("prefill-0")
    await cluster.add("decode-0", stuck)
    with pytest.raises(openai.BadRequestError, match="at least 1 token"):
        await sdk.completions.create(model="checksum", prompt=["a", "", "c"])
    await cluster.check()


async def test_logprobs_come_in_both_of_openais_shapes(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI
) -> None:
    cluster.answer = "é!"
    await cluster.add_pair()
    answer = await sdk.chat.completions.create(
        model="checksum", messages=HI, logprobs=True, top_logprobs=1, max_tokens=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [(each.token, each.bytes, each.logprob) for each in content] == [
        ("\ufffd", [0xC3], -0.5),
        ("\ufffd", [0xA9], -0.5),
        ("!", [33], -0.5),
    ]
    assert content[2].top_logprobs[0].token == "!"
    plain = await sdk.completions.create(model="checksum", prompt="x", logprobs=1, max_tokens=3)
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["\ufffd", "\ufffd", "!"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[2] == {"!": -0.5}
    bare = await sdk.completions.create(model="checksum", prompt="x", logprobs=0, max_tokens=3)
    assert bare.choices[0].logprobs is not None  # of the sampled tokens, without alternatives
    assert bare.choices[0].logprobs.token_logprobs == [-0.5] * 3
    stream = await sdk.chat.completions.create(
        model="checksum", messages=HI, logprobs=True, max_tokens=3, stream=True
    )
    shown = [
        each.bytes
        async for chunk in stream
        if chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content or []
    ]
    assert shown == [[0xC3], [0xA9], [33]]


async def test_stop_strings_are_named_and_cut(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI
) -> None:
    await cluster.add_pair()
    answer = await sdk.chat.completions.create(model="checksum", messages=HI, stop="wor")
    assert answer.choices[0].message.content == "Hello, "
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.choices[0].model_extra or {})["stop_reason"] == "wor"


@pytest.mark.parametrize(
    ("answer", "stop", "text"),
    [("The quick brown fox", "own fox", "The quick br"), ("ABCDEFGHIJKLM", "DEFGHIJ", "ABC")],
)
async def test_a_stop_over_many_tokens_ends_a_stream_and_a_whole_answer_alike(
    cluster: FakeCluster, http: httpx.AsyncClient, answer: str, stop: str, text: str
) -> None:
    cluster.answer = answer
    await cluster.add_pair()
    body = {"prompt": [1, 2, 3], "max_tokens": 50, "stop": [stop]}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    streamed = await http.post("/v1/completions", json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(each["text"] for each in choices) == text
    assert choices[-1]["finish_reason"] == "stop"
    await cluster.check()


async def test_the_models_are_listed_with_their_context(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    assert [model.id async for model in sdk.models.list()] == ["checksum"]
    assert (await sdk.models.retrieve("checksum")).owned_by == "kvferry"
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert model["max_model_len"] == 8192


async def test_tokenize_and_detokenize_are_each_others_inverse(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    answer = (await http.post("/tokenize", json={"prompt": "日本"})).json()
    assert answer == {"count": 6, "max_model_len": 8192, "tokens": list("日本".encode())}
    back = await http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "日本"}
    chat = (await http.post("/tokenize", json={"messages": HI})).json()
    assert chat["tokens"][:3] == [258, *b"us"] and chat["count"] == 21
    for path, body, status in [
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/detokenize", {"tokens": [512]}, 400),
        ("/detokenize", {"tokens": "abc"}, 400),
    ]:
        assert (await http.post(path, json=body)).status_code == status


async def test_probes_and_metrics_answer_get_and_head_without_a_key(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/live")).status_code == 200
    for path in ("/health", "/ready"):
        answer = await http.get(path)
        assert answer.status_code == 503 and "no decode replica" in answer.json()["reason"]
    await cluster.add("decode-0")
    assert (await http.get("/health")).status_code == (await http.get("/ready")).status_code == 200
    assert (await http.get("/version")).json() == {"version": "9.9"}
    assert (await http.head("/metrics")).status_code == 200
    text = (await http.get("/metrics")).text
    assert 'vllm:num_requests_running{engine="0",model_name="checksum"} 0.0' in text
    assert 'kvferry_live_workers{role="decode"} 1.0' in text


async def test_unknown_paths_and_methods_are_errors_in_openais_shape(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.create(model="checksum", input="hi")
    wrong = await http.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "method_not_allowed"


async def test_the_request_id_is_echoed_used_and_checked(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    prefill, _ = await cluster.add_pair()
    body = {"prompt": "x", "max_tokens": 2}
    answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
    assert prefill.requests[0].work.request_id.startswith("mine-1.")
    streamed = await http.post("/v1/completions", json=body | {"stream": True})
    assert len(streamed.headers["x-request-id"]) == 24
    refused = await http.post("/v1/completions", json={"x": 1}, headers={"x-request-id": "bad-1"})
    assert refused.headers["x-request-id"] == "bad-1"
    forged = await http.post("/v1/completions", json=body, headers={b"x-request-id": b"\xff\x1b"})
    assert forged.status_code == 400


async def test_a_key_is_asked_for_where_keys_are_set(cluster: FakeCluster) -> None:
    prefill, _ = await cluster.add_pair()
    cluster.callers = Callers({"key-a": "alice"})
    url = await cluster.http_url()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key-b", max_retries=0) as wrong:
        with pytest.raises(openai.AuthenticationError, match="API key is not known"):
            await wrong.completions.create(model="checksum", prompt="x")
        with pytest.raises(openai.AuthenticationError):
            await wrong.completions.create(model="checksum", prompt="x", stream=True)
    assert prefill.requests == []
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key-a", max_retries=0) as right:
        await right.completions.create(model="checksum", prompt="x")
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_overload_is_429_with_retry_after(
    cluster: FakeCluster, http: httpx.AsyncClient, stream: bool
) -> None:
    await cluster.add_pair()
    tickets = [cluster.register.admit(cluster.callers.tenant(None), f"x{n}") for n in range(64)]
    body = {"prompt": "x", "stream": stream}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    for ticket in tickets:
        cluster.register.leave(ticket)


@pytest.mark.parametrize("stream", [False, True])
async def test_without_replicas_the_answer_is_503_and_worth_repeating(
    cluster: FakeCluster, http: httpx.AsyncClient, stream: bool
) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert "no decode replica is live" in answer.json()["error"]["message"]


async def test_a_failure_in_mid_stream_is_an_event_the_sdk_raises(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI
) -> None:
    await cluster.add("prefill-0")
    decode = await cluster.add("decode-0", stuck)
    stream = await sdk.completions.create(model="checksum", prompt="x", stream=True)
    seen = ""
    with pytest.raises(openai.APIError, match="tokens delivered: 4"):
        async for chunk in stream:
            seen += chunk.choices[0].text
            if seen == "Hell":
                await decode.die()
    assert seen == "Hell"
    await cluster.check()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before the first token", "while streaming"])
async def test_a_client_that_disconnects_frees_both_workers(
    cluster: FakeCluster, http: httpx.AsyncClient, stream: bool, when: str
) -> None:
    async def mute(worker: FakeWorker, asked: wpb.PrefillRequest) -> AsyncIterator[object]:
        yield wpb.PrefillEvent(admitted=wpb.PrefillAdmitted())
        await never()

    early = when == "before the first token"
    await cluster.add("prefill-0", mute if early else None)
    decode = await cluster.add("decode-0", stuck)
    body = {"prompt": "x" * 64, "stream": stream}
    asking = asyncio.create_task(http.post("/v1/completions", json=body))
    await eventually(lambda: decode.num_open == 1)
    await asyncio.sleep(0.1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await cluster.check()
    await eventually(lambda: len(cluster.log()) == 1)
    assert cluster.log()[0]["status"] == "cancelled"


async def test_a_stream_is_plain_server_sent_events_for_curl(
    cluster: FakeCluster, http: httpx.AsyncClient
) -> None:
    await cluster.add_pair()
    body = {"messages": HI, "stream": True, "max_tokens": 2, "return_token_ids": True}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    opening, *ids, ending = (chunk["choices"][0].get("token_ids") for chunk in chunks)
    assert [each for some in ids for each in some] == [72, 101]
    assert opening is ending is None


async def test_a_users_parts_of_text_are_joined(
    cluster: FakeCluster, sdk: openai.AsyncOpenAI
) -> None:
    prefill, _ = await cluster.add_pair()
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await sdk.chat.completions.create(
        model="checksum",
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": parts}],
        max_tokens=1,
    )
    assert b"one\ntwo" in bytes(each for each in prefill.requests[0].work.prompt if each < 256)


async def test_pins_are_not_an_http_matter(cluster: FakeCluster, http: httpx.AsyncClient) -> None:
    """Unknown fields, ours included, are ignored as OpenAI's clients expect."""
    prefill, _ = await cluster.add_pair()
    body = {"prompt": "x" * 64, "max_tokens": 1, "pins": {"prefill": "none"}, "user": "me"}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert len(prefill.requests) == 1


async def test_no_answer_waits_for_the_receipt_of_its_own_beginning(cluster: FakeCluster) -> None:
    """Head and body go out one after the other; a receipt of the first may take 40 ms."""
    await cluster.add_pair()
    address = urlsplit(await cluster.http_url())
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    took = []
    for _ in range(30):
        began = time.perf_counter()
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        await reader.readexactly(int(length[1]))
        took.append(time.perf_counter() - began)
    writer.close()
    # Receipts come at once on a new connection: the last ones tell.
    assert min(took[-10:]) < 0.03
