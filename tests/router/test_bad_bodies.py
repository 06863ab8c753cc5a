"""What the HTTP door does with bodies that it cannot serve."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeCluster

BODIES: list[tuple[str, bytes, str, str]] = [
    ("completions", b"{", "body", "must be JSON"),
    ("completions", b"[]", "body", "must be a JSON object"),
    ("completions", b'{"prompt": "\xff"}', "body", "must be JSON"),
    ("completions", b"[" * 100_000, "body", "must be JSON"),
    ("completions", rb'{"prompt": "\ud800"}', "prompt", "lone surrogate U+D800 at 0"),
    ("completions", rb'{"prompt": "ok", "stop": ["\udfff"]}', "stop", "must be text or a list"),
    ("completions", b'{"x": 1}', "prompt", "must be text or a list of token ids, got None"),
    ("completions", b'{"prompt": ""}', "prompt", "must have at least 1 token"),
    ("completions", b'{"prompt": []}', "prompt", "must have at least 1 token"),
    ("completions", b'{"prompt": [1.5]}', "prompt", "must hold token ids, got 1.5"),
    ("completions", b'{"prompt": [true]}', "prompt", "must hold token ids, got True"),
    ("completions", b'{"prompt": [1e99]}', "prompt", "must hold token ids"),
    ("completions", b'{"prompt": [99999999999999999999]}', "prompt", "must hold token ids"),
    ("completions", b'{"prompt": {"a": 1}}', "prompt", "must be text or a list"),
    ("completions", b'{"prompt": ["a", 1]}', "prompt[1]", "must be text or a list"),
    ("completions", b'{"prompt": "x", "temperature": "hot"}', "temperature", "a number"),
    ("completions", b'{"prompt": "x", "n": 1.5}', "n", "must be a whole number, got 1.5"),
    ("completions", b'{"prompt": "x", "n": true}', "n", "must be a whole number, got True"),
    ("completions", b'{"prompt": "x", "n": ' + b"9" * 30 + b"}", "n", "of 64 bits"),
    ("completions", b'{"prompt": "x", "seed": -1}', "seed", "of 64 bits, got -1"),
    ("completions", b'{"prompt": "x", "stream": "yes"}', "stream", "true or false"),
    ("completions", b'{"prompt": "x", "stream_options": 1}', "stream_options", "an object"),
    ("completions", b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias", "got 'a'"),
    ("completions", b'{"prompt": "x", "logit_bias": [1]}', "logit_bias", "an object"),
    ("completions", b'{"prompt": "x", "suffix": "y"}', "suffix", "is not served"),
    ("completions", b'{"prompt": "x", "best_of": 4}', "best_of", "is not served"),
    ("completions", b'{"prompt": "x", "echo": true, "logprobs": 1}', "echo", "not served"),
    ("completions", b'{"prompt": "x", "max_tokens": 0, "echo": true}', "max_tokens", "from 1"),
    ("completions", b'{"prompt": "x", "slo": {"ttft": 1}}', "slo", "and strict, got 'ttft'"),
    ("completions", b'{"prompt": "x", "model": 5}', "model", "must be text, got 5"),
    ("chat/completions", b'{"x": 1}', "messages", "must be a list with a message, got None"),
    ("chat/completions", b'{"messages": []}', "messages", "must be a list with a message"),
    ("chat/completions", b'{"messages": ["hi"]}', "messages[0]", "must be an object"),
    (
        "chat/completions",
        b'{"messages": [{"role": 1, "content": "x"}]}',
        "messages[0].role",
        "must be text",
    ),
    (
        "chat/completions",
        rb'{"messages": [{"role": "user", "content": "\udc00"}]}',
        "messages[0].content",
        "lone surrogate U+DC00",
    ),
    (
        "chat/completions",
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        "messages[0].content[0]",
        "must be a part of type text",
    ),
    (
        "chat/completions",
        b'{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 5}',
        "top_logprobs",
        "needs logprobs to be true",
    ),
    (
        "chat/completions",
        b'{"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": "9"}',
        "max_completion_tokens",
        "must be a whole number",
    ),
    (
        "chat/completions",
        b'{"messages": [{"role": "user", "content": "x"}],'
        b' "response_format": {"type": "json_schema"}}',
        "response_format",
        "is not served",
    ),
    (
        "chat/completions",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}',
        "tools",
        "is not served",
    ),
]


async def test_bad_bodies_are_refused_in_openais_shape(cluster: FakeCluster, pair: Any) -> None:
    """Whether or not they ask for a stream."""
    async with httpx.AsyncClient(base_url=await cluster.http_url()) as client:
        for path, body, param, message in BODIES:
            for sent in (body, body.replace(b"{", b'{"stream": true, ', 1)):
                response = await client.post(f"/v1/{path}", content=sent)
                error = response.json()["error"]
                assert response.status_code == 400, error
                assert error.keys() == {"message", "type", "param", "code"}
                assert error["param"] == param and message in error["message"]
                assert error["type"] == "invalid_request_error" and len(error["message"]) < 300


UNSERVED: list[tuple[str, str, object, bool]] = [
    ("completions", "guided_json", {"type": "object"}, False),
    ("completions", "response_format", {"type": "json_object"}, False),
    ("completions", "response_format", {"type": "text"}, True),
    ("completions", "use_beam_search", True, False),
    ("completions", "use_beam_search", False, True),
    ("completions", "best_of", 2, False),
    ("completions", "add_special_tokens", False, False),
    ("completions", "add_special_tokens", True, True),
    ("completions", "prompt_logprobs", 0, False),
    ("completions", "include_stop_str_in_output", True, False),
    ("completions", "guided_regex", None, True),
    ("completions", "user", "anybody", True),
    ("completions", "never_heard_of", {"x": 1}, True),
    ("chat/completions", "structured_outputs", {"regex": "a*"}, False),
    ("chat/completions", "tool_choice", "required", False),
    ("chat/completions", "tool_choice", "auto", True),
    ("chat/completions", "functions", [{"name": "f"}], False),
    ("chat/completions", "chat_template_kwargs", {"enable_thinking": False}, False),
    ("chat/completions", "add_special_tokens", False, True),
    ("chat/completions", "cache_salt", "mine", False),
    ("chat/completions", "metadata", {"run": "7"}, True),
]


async def test_a_field_that_would_change_the_answer_and_is_not_served_is_refused_by_name(
    cluster: FakeCluster,
) -> None:
    await cluster.add_pair()
    async with httpx.AsyncClient(base_url=await cluster.http_url()) as client:
        for path, name, value, served in UNSERVED:
            question = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
            response = await client.post(f"/v1/{path}", json={**question, name: value})
            assert response.status_code == (200 if served else 400), (path, name, value)
            if not served:
                error = response.json()["error"]
                assert (error["param"], error["code"]) == (name, "unsupported")
                assert error["message"].startswith(f"{name}: is not served: ")


SURROGATES: list[tuple[str, bytes]] = [
    ("/v1/completions", rb'{"prompt": "\ud800"}'),
    ("/v1/completions", rb'{"prompt": ["ok", "a\udfffb"]}'),
    ("/v1/completions", rb'{"prompt": "ok", "stop": "\ud800"}'),
    ("/v1/completions", rb'{"prompt": "ok", "model": "\ud800"}'),
    ("/v1/completions", rb'{"prompt": "ok", "logit_bias": {"\ud800": 1}}'),
    ("/v1/chat/completions", rb'{"messages": [{"role": "user", "content": "\ud800"}]}'),
    ("/v1/chat/completions", rb'{"messages": [{"role": "\ud800", "content": "ok"}]}'),
    (
        "/v1/chat/completions",
        rb'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}]}',
    ),
    ("/tokenize", rb'{"prompt": "\ud800"}'),
    ("/tokenize", rb'{"messages": [{"role": "user", "content": "\ud800"}]}'),
    ("/detokenize", rb'{"tokens": "\ud800"}'),
]


async def test_half_a_surrogate_pair_is_refused_wherever_a_body_may_hold_text(
    cluster: FakeCluster, pair: Any
) -> None:
    async with httpx.AsyncClient(base_url=await cluster.http_url()) as client:
        for path, body in SURROGATES:
            response = await client.post(path, content=body)
            assert response.status_code == 400, (path, body)
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await client.get("/health")).status_code == 200


async def test_an_unknown_model_has_openais_code(cluster: FakeCluster, pair: Any) -> None:
    async with httpx.AsyncClient(base_url=await cluster.http_url()) as client:
        body = {"model": "gpt-5", "prompt": "x"}
        refused = await client.post("/v1/completions", json=body)
        unknown = await client.get("/v1/models/gpt-5")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "is not served here; the model is 'checksum'" in error["message"]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("begun", "answer"),
    [
        (b"", b""),
        (b"POST /v1/completions HTT", b""),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{", b" 408 "),
    ],
)
async def test_a_client_that_does_not_go_on_is_hung_up_on(
    cluster: FakeCluster, begun: bytes, answer: bytes
) -> None:
    url = httpx.URL(await cluster.http_url(body_timeout_s=0.2))
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(begun)
    async with asyncio.timeout(3):
        said = await reader.read()  # to the end: it is the server that closes
    assert (answer in said) and (answer == b"") == (said == b"")
    if answer:
        assert b"body: must come within 0.2 s, and has not" in said
    writer.close()


async def test_between_two_requests_a_client_may_take_its_time(cluster: FakeCluster) -> None:
    url = httpx.URL(await cluster.http_url(body_timeout_s=0.2))
    reader, writer = await asyncio.open_connection(url.host, url.port)
    for _ in range(2):
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b'{"ok":true}')).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(0.3)
    writer.close()


async def test_a_body_over_the_limit_is_413_and_read_no_further(
    cluster: FakeCluster, pair: Any
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(3000):
            yield b" " * 65_536

    async with httpx.AsyncClient(base_url=await cluster.http_url()) as client:
        response = await client.post("/v1/completions", content=b" " * 300_000)
        assert response.status_code == 413
        assert "must have at most 262144 bytes, got 300000" in response.json()["error"]["message"]
        try:
            response = await client.post("/v1/completions", content=endless())
            assert response.status_code == 413
        except httpx.TransportError:
            pass  # the connection was closed on us while we were still sending
