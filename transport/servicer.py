"""The gRPC service of a decode rank: where prefill ranks call."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import NoReturn

import grpc
import grpc.aio

from protos.transfer_pb2 import Frame, Hello, Quarantine
from transport.grpc_wire import LINK, GrpcLink
from transport.joined import Message, join, split
from transport.link import Acceptor, LinkClosed, LinkRefused, Listener, WireQuarantined

Context = grpc.aio.ServicerContext[Message, Message | bytes]

HELLO_TIMEOUT_S = 10.0


class TransferServicer:
    """Welcomes or refuses a caller, and hands its link to the receiver until it ends.

    `acceptors` names the wires whose payloads ride elsewhere; "grpc" needs none.
    """

    def __init__(self, receiver: Listener, acceptors: Mapping[str, Acceptor] | None = None) -> None:
        self._receiver = receiver
        self._acceptors = dict(acceptors or {})

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve kvferry.v1.Transfer; the generated code would copy every payload twice more."""
        _, service, method = LINK.split("/")
        handler = grpc.stream_stream_rpc_method_handler(
            self._link, request_deserializer=split, response_serializer=join
        )
        handlers = grpc.method_handlers_generic_handler(service, {method: handler})
        server.add_generic_rpc_handlers((handlers,))

    async def _link(self, request_iterator: AsyncIterator[Message], context: Context) -> None:
        control = GrpcLink(context.read, context.write, Hello())
        try:
            await self._greet(control)
            acceptor = self._acceptors.get(control.hello.wire)
            link = await acceptor.accept(control) if acceptor else control
            await self._receiver.serve(link)
        except LinkRefused as refused:
            await _hang_up(context, grpc.StatusCode.FAILED_PRECONDITION, str(refused))
        except LinkClosed as closed:
            await _hang_up(context, grpc.StatusCode.UNAVAILABLE, str(closed))
        except OSError as error:  # no socket or memory for this end of the wire
            reason = f"no {control.hello.wire} link can be made here: {error}"
            await _hang_up(context, grpc.StatusCode.UNAVAILABLE, reason)
        finally:
            control.end.come("the stream has ended")
        if not control.hung_up:
            await _hang_up(context, grpc.StatusCode.UNAVAILABLE, control.end.reason or "")

    async def _greet(self, control: GrpcLink) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                frame, _ = await control.recv()
        except TimeoutError:
            raise LinkRefused(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
        if not frame.HasField("hello"):
            raise LinkRefused(f"the first frame is {frame.WhichOneof('body')}, not a hello")
        control.hello = frame.hello
        wires = {"grpc", *self._acceptors}
        if frame.hello.wire not in wires:
            ours = ", ".join(sorted(wires))
            raise LinkRefused(f"no wire {frame.hello.wire!r} here; there are {ours}")
        try:
            control.welcome = self._receiver.answer(frame.hello)
        except WireQuarantined as quarantined:
            left_ms = round(quarantined.left_s * 1000)
            refusal = Quarantine(reason=str(quarantined), left_ms=left_ms)
            await control.send(Frame(quarantine=refusal))
            raise
        await control.send(Frame(welcome=control.welcome))


async def _hang_up(context: Context, code: grpc.StatusCode, reason: str) -> NoReturn:
    await context.abort(code, reason)
