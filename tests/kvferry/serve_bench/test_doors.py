"""The HTTP door, against a server that says exactly what it is told to."""

import asyncio
from contextlib import aclosing

import pytest

from kvferry.errors import CommandError
from kvferry.serve_bench.doors import HttpDoor, Keys, Piece, Refused, Usage, open_door, parse_keys
from kvferry.serve_bench.workload import Ask

ASK = Ask(0, 0.0, [1, 2, 3], 2, "shop", "visit 7", -2)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def answered(reply: bytes) -> tuple[list[Piece], bytes]:
    """What the door makes of it, and what it asked."""
    asked = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.extend(await reader.read(4096))
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        door = HttpDoor(f"http://127.0.0.1:{port}", "", Keys({"": "mine", "shop": "theirs"}))
        async with aclosing(door.stream(ASK, 5.0)) as pieces:
            return [piece async for piece in pieces], bytes(asked)


def chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


async def test_tokens_are_counted_across_chunks_that_split_a_line() -> None:
    parts = ['data: {"choices": [{"token_ids": [5]}], "us', 'age": null}\n\n', "data: "]
    parts += ['{"choices": [], "usage": {"prompt_tokens": 3,']
    parts += [' "prompt_tokens_details": {"cached_tokens": 2}}}\n\ndata: [DONE]\n\n']
    pieces, asked = await answered(HEAD + b"".join(map(chunk, parts)) + b"0\r\n\r\n")
    assert pieces == [Piece(1), Piece(0, Usage(3, 2))]
    assert b"Authorization: Bearer theirs\r\n" in asked and b'"prompt": [1, 2, 3]' in asked
    assert b'"priority": -2' in asked and b'"session_id": "visit 7"' in asked


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}", "HTTP 429"),
        (HEAD + chunk('data: {"error": {"code": "unavailable"}}\n\n'), "unavailable"),
        (HEAD + b"ff\r\ndata", "UNAVAILABLE"),
        (b"", "UNAVAILABLE"),
        (b"SSH-2.0\r\n\r\n", "UNAVAILABLE"),
    ],
)
async def test_what_goes_wrong_has_a_code(reply: bytes, code: str) -> None:
    with pytest.raises(Refused) as failure:
        await answered(reply)
    assert failure.value.code == code


@pytest.mark.parametrize(
    ("kind", "http", "sentence"),
    [
        ("smtp", "", "--door smtp: there are grpc and http"),
        ("http", "", "--door http needs --http"),
        ("http", "https://x", "--http https://x: a URL such as"),
    ],
)
def test_a_door_that_cannot_be_opened_says_why(kind: str, http: str, sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        open_door(kind, "", http, "", Keys({}))


def test_keys_are_of_tenants() -> None:
    assert parse_keys(["a=x", "b=y=z"], "own") == {"": "own", "a": "x", "b": "y=z"}
    with pytest.raises(CommandError, match="--tenant-key a: TENANT=KEY is wanted"):
        parse_keys(["a"], "")
