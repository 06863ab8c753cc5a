"""Both doors of a router, as one that streams: pieces of an answer, and its usage at the end."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import grpc.aio

from kvferry.errors import CommandError
from kvferry.serve_bench.workload import Ask
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from transport.grpc_options import channel_options

MAX_LINE_BYTES = 1 << 20
# What an answer that breaks off, or is none, makes of its reader.
BROKEN = (OSError, EOFError, ValueError, KeyError, asyncio.LimitOverrunError)


class Refused(Exception):
    """The request failed; `code` is what failures are counted by."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the cluster says at the end. Without a journey nobody told where it went."""

    prompt_tokens: int
    cached_tokens: int
    journey: pb.Journey | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    num_tokens: int = 0
    usage: Usage | None = None


class Door(Protocol):
    def stream(self, ask: Ask, timeout_s: float) -> AsyncGenerator[Piece, None]:
        """Raises Refused."""
        ...

    async def close(self) -> None: ...


class Keys:
    """The API key of each tenant of a trace; the empty tenant's is everybody's else."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = keys

    def bearer(self, tenant: str) -> str:
        key = self._keys.get(tenant, self._keys.get("", ""))
        return f"Bearer {key}" if key else ""


def parse_keys(pairs: Sequence[str], own: str) -> dict[str, str]:
    """`TENANT=KEY` each; `own` is everybody else's. Raises CommandError."""
    keys = {"": own}
    for pair in pairs:
        tenant, equals, key = pair.partition("=")
        if not (tenant and equals and key):
            raise CommandError(f"--tenant-key {pair}: TENANT=KEY is wanted")
        keys[tenant] = key
    return keys


def open_door(kind: str, grpc_address: str, http_url: str, model: str, keys: Keys) -> Door:
    """On the loop that will use it. Raises CommandError."""
    where = {"grpc": grpc_address, "http": http_url}
    if kind not in where:
        raise CommandError(f"--door {kind}: there are grpc and http")
    if not where[kind]:
        raise CommandError(f"--door {kind} needs --{kind}: where a router listens")
    return GrpcDoor(grpc_address, keys) if kind == "grpc" else HttpDoor(http_url, model, keys)


class GrpcDoor:
    """One channel for all requests, as a client would hold."""

    def __init__(self, address: str, keys: Keys) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        self._stub = InferenceStub(self._channel)
        self._keys = keys

    async def stream(self, ask: Ask, timeout_s: float) -> AsyncGenerator[Piece, None]:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ask.prompt),
            sampling=pb.SamplingParams(max_tokens=ask.max_tokens, temperature=0, ignore_eos=True),
            priority=ask.priority,
            session=ask.session,
        )
        bearer = self._keys.bearer(ask.tenant)
        metadata = (("authorization", bearer),) if bearer else ()
        call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            async for response in call:
                if response.HasField("delta"):
                    yield Piece(len(response.delta.token_ids))
                elif response.HasField("usage"):
                    usage = response.usage
                    yield Piece(
                        usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.journey)
                    )
        except grpc.aio.AioRpcError as error:
            raise Refused(error.code().name, error.details() or "") from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close(None)


class HttpDoor:
    """The OpenAI-compatible door; a connection for each request. It does not tell journeys."""

    def __init__(self, url: str, model: str, keys: Keys) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise CommandError(f"--http {url}: a URL such as http://127.0.0.1:8000 is wanted")
        self._host, self._port = parts.hostname, parts.port or 80
        self._model = model
        self._keys = keys

    async def stream(self, ask: Ask, timeout_s: float) -> AsyncGenerator[Piece, None]:
        try:
            async with asyncio.timeout(timeout_s):
                async with aclosing(self._exchange(ask)) as pieces:
                    async for piece in pieces:
                        yield piece
        except TimeoutError:
            raise Refused("DEADLINE_EXCEEDED", f"no end within {timeout_s} s") from None
        except BROKEN as error:
            raise Refused("UNAVAILABLE", f"{type(error).__name__}: {error}") from None

    async def _exchange(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=MAX_LINE_BYTES)
        try:
            writer.write(self._request(ask))
            status, chunked = await _head(reader)
            if status != 200:
                raise Refused(f"HTTP {status}", (await reader.read(4096)).decode(errors="replace"))
            async for line in _lines(reader, chunked):
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield _piece(json.loads(line[6:]))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _request(self, ask: Ask) -> bytes:
        body = json.dumps(
            {
                "prompt": ask.prompt,
                "max_tokens": ask.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
                "priority": ask.priority,
                **({"model": self._model} if self._model else {}),
                **({"session_id": ask.session} if ask.session else {}),
            }
        ).encode()
        bearer = self._keys.bearer(ask.tenant)
        lines = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *([f"Authorization: {bearer}"] if bearer else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def close(self) -> None:
        pass


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status, and whether the body comes in chunks."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    protocol, _, status = lines[0].partition(" ")
    if not (protocol.startswith("HTTP/1.") and status[:3].isdecimal()):
        raise ValueError(f"no HTTP answer: {lines[0][:80]!r}")
    return int(status[:3]), "chunked" in fields.get("transfer-encoding", "")


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    rest = b""
    async for part in _parts(reader, chunked):
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")


async def _parts(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body. A chunked one that ends before its last chunk raises IncompleteReadError."""
    while not chunked:
        part = await reader.read(65_536)
        if not part:
            return
        yield part
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:size]


def _piece(chunk: dict[str, Any]) -> Piece:
    if (error := chunk.get("error")) is not None:
        raise Refused(str(error.get("code") or "ERROR"), str(error.get("message", "")))
    usage = chunk.get("usage")
    tokens = sum(len(choice.get("token_ids") or ()) for choice in chunk.get("choices") or ())
    if usage is None:
        return Piece(tokens)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Piece(tokens, Usage(usage["prompt_tokens"], cached))
