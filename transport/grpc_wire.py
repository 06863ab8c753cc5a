"""The gRPC wire: frames and payloads ride one bidirectional stream.

It also carries the frames of wires whose payloads go elsewhere.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

import grpc
import grpc.aio

from protos.transfer_pb2 import Frame, Hello, Welcome
from transport.grpc_options import channel_options
from transport.joined import Message, Unsent, join, split
from transport.link import Ending, Fill, LinkClosed, LinkRefused, WireQuarantined
from transport.plain_words import why
from transport.threads import Threads

HANGUP_S = 1.0  # for the other end to read what was sent before we hang up

_STREAM_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)

LINK = "/kvferry.v1.Transfer/Link"

Call = grpc.aio.StreamStreamCall[Message | bytes, Message]
Read = Callable[[], Awaitable[object]]
Write = Callable[[Message | bytes], Awaitable[None]]

MAX_UNSENT = 3  # messages kept to be used again


class GrpcLink:
    """One end of a stream, from its first frame; `hello` and `welcome` are set once exchanged."""

    def __init__(self, read: Read, write: Write, hello: Hello) -> None:
        self.hello = hello
        self.welcome = Welcome()
        self.hung_up = False  # by the other end, in good order
        self._read = read
        self._write = write
        self._writing = asyncio.Lock()
        self.end = Ending()

    async def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        self.end.check()
        await self.end.unless(self._write_alone((frame, payload)), abandon=True)

    async def recv(self) -> tuple[Frame, memoryview | None]:
        try:
            message = await self.end.unless(self._read())
        except _STREAM_ERRORS as error:
            self.end.come(why(error))
            if isinstance(error, grpc.RpcError) and _refuses(error):
                raise LinkRefused(why(error)) from error
            raise LinkClosed(why(error)) from error
        if not isinstance(message, tuple):  # gRPC's EOF
            self.hung_up = True
            self.end.come("the other end hung up")
            raise LinkClosed("the other end hung up")
        return cast(Message, message)

    async def close(self, reason: str) -> None:
        self.end.come(reason)

    async def _write_alone(self, message: Message | bytes) -> None:
        async with self._writing:  # a stream takes one message at a time
            self.end.check()
            try:
                await self._write(message)
            except _STREAM_ERRORS as error:
                raise LinkClosed(why(error)) from error


class GrpcClientLink(GrpcLink):
    """The prefill end, which owns the call and its channel."""

    def __init__(self, channel: grpc.aio.Channel, call: Call, hello: Hello) -> None:
        super().__init__(call.read, call.write, hello)
        self._channel = channel
        self._call = call
        self._builder = Threads(1, "kv-grpc-build")
        self._unsent: deque[tuple[int, Unsent]] = deque(maxlen=MAX_UNSENT)
        self._num_reading = 0

    def load(self, num_bytes: int, fill: Fill) -> "asyncio.Future[None]":
        return asyncio.create_task(self._load_unless_ended(num_bytes, fill))

    async def recv(self) -> tuple[Frame, memoryview | None]:
        self._num_reading += 1
        try:
            return await super().recv()
        finally:
            self._num_reading -= 1

    async def _load_unless_ended(self, num_bytes: int, fill: Fill) -> None:
        await self.end.unless(self._load(num_bytes, fill), abandon=True)

    async def _load(self, num_bytes: int, fill: Fill) -> None:
        size, unsent = self._unsent.popleft() if self._unsent else (-1, None)
        if unsent is None or size != num_bytes:
            unsent = Unsent(num_bytes)
        frame = await self._builder.do(partial(fill, unsent.payload))
        if frame is not None:
            await self._write_alone(unsent.message(frame))
        self._unsent.append((num_bytes, unsent))

    async def close(self, reason: str) -> None:
        """Hang up once the other end has read what was sent, or after a moment."""
        if not self.end.reason:
            with contextlib.suppress(TimeoutError, LinkClosed, *_STREAM_ERRORS):
                async with asyncio.timeout(HANGUP_S):
                    await self._call.done_writing()
                    while not self._num_reading:
                        await self.recv()
                    await self.end.wait()
        self.end.come(reason)
        self._builder.stop()
        self._call.cancel()
        await self._channel.close(None)


class GrpcConnector:
    """Dials a decode rank's Transfer service."""

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel] | None = None,
        wire: str = "grpc",
        timeout_s: float = 10.0,
    ) -> None:
        self._open_channel = open_channel or _open_channel
        self._wire = wire
        self._timeout_s = timeout_s

    async def connect(self, address: str, hello: Hello) -> GrpcClientLink:
        greeting = Hello()
        greeting.CopyFrom(hello)
        greeting.wire = greeting.wire or self._wire
        channel = self._open_channel(address)
        dial = channel.stream_stream(LINK, request_serializer=_written, response_deserializer=split)
        call = cast(Callable[[], Call], dial)()
        link = GrpcClientLink(channel, call, greeting)
        try:
            async with asyncio.timeout(self._timeout_s):
                await link.send(Frame(hello=greeting))
                answer, _ = await link.recv()
            if answer.HasField("quarantine"):
                refusal = answer.quarantine
                raise WireQuarantined(refusal.reason, refusal.left_ms / 1000)
            if not answer.HasField("welcome"):
                raise LinkClosed(f"answered with {answer.WhichOneof('body')} instead of a welcome")
        except TimeoutError:
            await link.close("no welcome")
            raise LinkClosed(f"no welcome within {self._timeout_s:g} s") from None
        except BaseException:
            link.end.come("not welcomed")
            await link.close("not welcomed")
            raise
        link.welcome = answer.welcome
        return link


def _written(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else join(message)


def _open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options())


def _refuses(error: grpc.RpcError) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and (
        error.code() is grpc.StatusCode.FAILED_PRECONDITION
    )
