"""What goes back over HTTP: errors in OpenAI's shape, streams, and noticing that nobody listens."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing

from grpc import StatusCode
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from router.errors import InvalidRequest, RequestFailed, TooLarge, TooSlow, Withdrawn

REQUEST_ID = "x-request-id"
STATUS = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: 499,
    StatusCode.INTERNAL: 500,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
KIND = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
Frames = AsyncGenerator[bytes, None]


def failure_body(failure: RequestFailed) -> dict[str, object]:
    field = _as_sent(failure.field) if isinstance(failure, InvalidRequest) else None
    code = failure.kind if isinstance(failure, InvalidRequest) else failure.reason
    message = failure.message if field is None else _as_sent(failure.message)
    return error_body(status_of(failure), message, field, code)


def _as_sent(text: str) -> str:
    """A text that begins with a field's name, with the name that it has over HTTP."""
    for ours, theirs in (("targets.", "slo."), ("session:", "session_id:")):
        if text.startswith(ours):
            return theirs + text.removeprefix(ours)
    return "session_id" if text == "session" else text


def error_body(
    status: int, message: str, field: str | None = None, code: str | None = None
) -> dict[str, object]:
    kind = KIND.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def status_of(failure: RequestFailed) -> int:
    if isinstance(failure, InvalidRequest) and failure.kind == "model_not_found":
        return 404
    if isinstance(failure, TooSlow):
        return 408
    return 413 if isinstance(failure, TooLarge) else STATUS.get(failure.code, 500)


def failed(failure: RequestFailed, request_id: str = "") -> JSONResponse:
    headers = {REQUEST_ID: request_id} if request_id else {}
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(failure.retry_after_s)))
    if status_of(failure) in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    if status_of(failure) == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(failure_body(failure), status_of(failure), headers)


async def read_body(request: Request, max_bytes: int, within_s: float) -> bytes:
    """Raises TooLarge as soon as it is known to be, TooSlow when it has not come in time."""
    try:
        async with asyncio.timeout(within_s):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise TooSlow("body", f"must come within {within_s:g} s, and has not") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    announced = request.headers.get("content-length", "")
    num_bytes = int(announced) if announced.isdecimal() else 0
    if num_bytes <= max_bytes:
        num_bytes = 0
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                break
            parts.append(part)
    if num_bytes > max_bytes:
        raise TooLarge("body", f"must have at most {max_bytes} bytes, got {num_bytes} or more")
    return b"".join(parts)


def event(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[object, object, Response]) -> Response:
    """Run `work`, and cancel it when the client leaves. The body must have been read."""
    working: asyncio.Task[Response] = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return failed(Withdrawn("the client has left"))  # nobody reads it; logs and metrics do
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Frames as server-sent events. Its headers wait for the first frame.

    So a request that fails before its first token still gets a status of its own: `frames` raises
    RequestFailed then; later failures are an event.
    """

    def __init__(self, frames: Callable[[], Frames], request_id: str) -> None:
        super().__init__()
        self._frames = frames
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await unless_gone(receive, self._run(send))
        if response is not self:
            await response(scope, receive, send)

    async def _run(self, send: Send) -> Response:
        """The stream itself, or what to answer in its place."""
        begun = False
        async with aclosing(self._frames()) as frames:
            try:
                async for frame in frames:
                    if not begun:
                        begun = True
                        await self._begin(send)
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            except RequestFailed as failure:
                if not begun:
                    return failed(failure, self._request_id)
                frame = event(failure_body(failure))
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return self

    async def _begin(self, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            REQUEST_ID: self._request_id,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
