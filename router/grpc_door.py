"""The gRPC door: `kvferry.v1.Inference`, health and reflection."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from protos import inference_pb2 as pb
from router.callers import Callers
from router.errors import InvalidRequest, RequestFailed
from router.generation import Handler
from router.request import Tenant
from transport.grpc_options import server_options

SERVICE = "kvferry.v1.Inference"
READINESS = ("", "readiness", SERVICE)
LIVENESS = "liveness"
DOOR = "grpc"
# The register refuses the excess with a hint; this bound is for what never gets that far.
SPARE_CALLS = 256
RECEIVE_LIMIT = "grpc.max_receive_message_length"

Read = TypeVar("Read", pb.GenerateRequest, pb.CancelRequest)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Bytes that are no request: text that is not UTF-8, or no message at all."""

    why: str


class Inference:
    """Every call ends with one status: the handler's, or CANCELLED when its client left."""

    def __init__(self, handler: Handler, callers: Callers) -> None:
        self._handler = handler
        self._callers = callers

    async def generate(
        self,
        request: pb.GenerateRequest | Unreadable,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        try:
            tenant = self._tenant(context)
            timeout_s: float | None = context.time_remaining()  # None where there is no deadline
            events = self._handler.generate(_readable(request), tenant, DOOR, timeout_s)
            async with aclosing(events):
                async for event in events:
                    await context.write(event)
        except RequestFailed as failure:
            await _abort(context, failure)

    async def cancel(
        self, request: pb.CancelRequest | Unreadable, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.CancelResponse:
        try:
            found = self._handler.cancel(self._tenant(context), _readable(request).request_id)
        except RequestFailed as failure:
            await _abort(context, failure)
        return pb.CancelResponse(found=found)

    async def explain(
        self,
        request: pb.GenerateRequest | Unreadable,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> pb.ExplainResponse:
        try:
            tenant = self._tenant(context)
            explanation = await self._handler.explain(_readable(request), tenant, DOOR)
        except RequestFailed as failure:
            await _abort(context, failure)
        return pb.ExplainResponse(explanation=explanation)

    def _tenant(self, context: "grpc.aio.ServicerContext[Any, Any]") -> Tenant:
        metadata = dict(context.invocation_metadata() or ())
        return self._callers.tenant(metadata.get("authorization"))


class GrpcDoor:
    """Open it with `start`; `port` is then the one it listens on."""

    def __init__(
        self,
        handler: Handler,
        callers: Callers,
        host: str,
        port: int,
        *,
        max_requests: int,
        max_message_bytes: int,
    ) -> None:
        shared = [option for option in server_options() if option[0] != RECEIVE_LIMIT]
        self._server = grpc.aio.server(
            options=[*shared, (RECEIVE_LIMIT, max_message_bytes)],
            maximum_concurrent_rpcs=max_requests + SPARE_CALLS,
        )
        self._server.add_generic_rpc_handlers((_routes(Inference(handler, callers)),))
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._host = host
        self.port = port

    async def start(self) -> None:
        """Raises OSError when the port is taken."""
        try:
            self.port = self._server.add_insecure_port(f"{self._host}:{self.port}")
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {self._host}:{self.port}") from error
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if ready else response.NOT_SERVING
        for service in READINESS:
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


def _routes(inference: Inference) -> "grpc.GenericRpcHandler[Any, Any]":
    """The service's methods. The generated code would answer unreadable bytes with UNKNOWN."""
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Generate": grpc.unary_stream_rpc_method_handler(
                inference.generate,
                request_deserializer=_reader(pb.GenerateRequest),
                response_serializer=pb.GenerateResponse.SerializeToString,
            ),
            "Cancel": grpc.unary_unary_rpc_method_handler(
                inference.cancel,
                request_deserializer=_reader(pb.CancelRequest),
                response_serializer=pb.CancelResponse.SerializeToString,
            ),
            "Explain": grpc.unary_unary_rpc_method_handler(
                inference.explain,
                request_deserializer=_reader(pb.GenerateRequest),
                response_serializer=pb.ExplainResponse.SerializeToString,
            ),
        },
    )


def _reader(kind: type[Read]) -> Callable[[bytes], Read | Unreadable]:
    def read(data: bytes) -> Read | Unreadable:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            return Unreadable(str(error))

    return read


def _readable(request: Read | Unreadable) -> Read:
    if isinstance(request, Unreadable):
        raise InvalidRequest("request", f"cannot be read: {request.why}")
    return request


async def _abort(context: "grpc.aio.ServicerContext[Any, Any]", failure: RequestFailed) -> NoReturn:
    """End the call with the failure; the field and the hint travel as google.rpc details."""
    details: list[any_pb2.Any] = []
    if isinstance(failure, InvalidRequest):
        violation = BadRequest.FieldViolation(field=failure.field, description=failure.message)
        details.append(_packed(BadRequest(field_violations=[violation])))
    if failure.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(failure.retry_after_s * 1e9))
        details.append(_packed(RetryInfo(retry_delay=delay)))
    number: int = failure.code.value[0]
    status = rpc_status.to_status(Status(code=number, message=failure.message, details=details))
    await context.abort(failure.code, failure.message, status.trailing_metadata)
    raise AssertionError("abort raises")


def _packed(message: BadRequest | RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
