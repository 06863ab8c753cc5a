"""The HTTP door: OpenAI's API over the same handler as gRPC, and what operators look at."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from protos import inference_pb2 as pb
from router import openai_request
from router.callers import Callers
from router.errors import InvalidRequest, RequestFailed, shown
from router.generation import Handler
from router.http_reply import (
    REQUEST_ID,
    EventStream,
    error_body,
    event,
    failed,
    read_body,
    unless_gone,
)
from router.interleave import interleave
from router.openai_request import Asked, Json
from router.openai_response import Answer
from router.request import Tenant
from router.validation import checked_request_id

DOOR = "http"
LOOP_BYTES = 256 << 10  # of JSON, about 2 ms to parse; more of it leaves the event loop
DONE = b"data: [DONE]\n\n"

Endpoint = Callable[[Request], Awaitable[Response]]
Guarded = Callable[[Request, Tenant], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class HttpOptions:
    max_body_bytes: int
    body_timeout_s: float
    version: str
    created: Callable[[], float]  # seconds since 1970


class HttpDoor:
    """`missing` says why no request can be served now; empty when one can."""

    def __init__(
        self,
        handler: Handler,
        callers: Callers,
        registry: CollectorRegistry,
        missing: Callable[[], str],
        options: HttpOptions,
    ) -> None:
        self._handler = handler
        self._callers = callers
        self._registry = registry
        self._missing = missing
        self._options = options
        self._started_at = int(options.created())
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/{model:path}", self._guarded(self._model)),
                Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route("/tokenize", self._guarded(self._tokenize), methods=["POST"]),
                Route("/detokenize", self._guarded(self._detokenize), methods=["POST"]),
                Route("/health", self._ready),
                Route("/ready", self._ready),
                Route("/live", self._live),
                Route("/version", self._version),
                Route("/metrics", self._metrics, methods=["GET", "HEAD"]),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _our_error},
        )

    def _guarded(self, endpoint: Guarded) -> Endpoint:
        """Who is asking is settled first; a failure becomes an answer here, in one place."""

        async def answer(request: Request) -> Response:
            request_id = ""
            try:
                request_id = _request_id(request)
                tenant = self._callers.tenant(request.headers.get("authorization"))
                response = await endpoint(request, tenant)
            except RequestFailed as failure:
                return failed(failure, request_id)
            response.headers.setdefault(REQUEST_ID, request_id)
            return response

        return answer

    async def _completions(self, request: Request, tenant: Tenant) -> Response:
        body = await self._body(request)
        return await self._serve(request, tenant, openai_request.completion(body, _id(request)))

    async def _chat(self, request: Request, tenant: Tenant) -> Response:
        body = await self._body(request)
        return await self._serve(request, tenant, openai_request.chat(body, _id(request)))

    async def _serve(self, request: Request, tenant: Tenant, asked: Asked) -> Response:
        answer_id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{_id(request)}"
        if asked.stream:
            return EventStream(lambda: self._frames(asked, tenant, answer_id), _id(request))
        return await unless_gone(request.receive, self._whole(asked, tenant, answer_id))

    async def _whole(self, asked: Asked, tenant: Tenant, answer_id: str) -> Response:
        answer: Answer | None = None
        async with aclosing(self._events(asked, tenant)) as events:
            async for number, said in events:
                answer = answer or self._answer(asked, answer_id)
                for _ in answer.add(number, said):
                    pass
        assert answer is not None
        return JSONResponse(answer.whole())

    async def _frames(
        self, asked: Asked, tenant: Tenant, answer_id: str
    ) -> AsyncGenerator[bytes, None]:
        """The first frame waits for the first token, when most requests that fail have failed."""
        answer: Answer | None = None
        opened = False
        async with aclosing(self._events(asked, tenant)) as events:
            async for number, said in events:
                answer = answer or self._answer(asked, answer_id)
                chunks = list(answer.add(number, said))
                if not opened and not said.HasField("started"):
                    opened = True
                    for chunk in answer.opening():
                        yield event(chunk)
                for chunk in chunks:
                    yield event(chunk)
        assert answer is not None
        for chunk in answer.closing():
            yield event(chunk)
        yield DONE

    def _events(
        self, asked: Asked, tenant: Tenant
    ) -> AsyncGenerator[tuple[int, pb.GenerateResponse], None]:
        return interleave([self._handler.generate(each, tenant, DOOR) for each in asked.requests])

    def _answer(self, asked: Asked, answer_id: str) -> Answer:
        """Made once the first prompt was accepted: by then `n` is known to be a sensible number."""
        model = self._handler.model
        return Answer(
            asked,
            answer_id,
            int(self._options.created()),
            model.tokenizer,
            model.eos_token_ids,
            [self._prompt_text(each) for each in asked.requests] if asked.echo else (),
        )

    def _prompt_text(self, request: pb.GenerateRequest) -> str:
        if request.HasField("text"):
            return request.text
        vocabulary = range(self._handler.model.vocab_size)
        ids = [token_id for token_id in request.token_ids.ids if token_id in vocabulary]
        return self._handler.model.tokenizer.decode(ids)

    async def _models(self, request: Request, tenant: Tenant) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request, tenant: Tenant) -> Response:
        name = request.path_params["model"]
        if name != self._handler.model.name:
            message = f"the model {shown(name)} does not exist"
            return JSONResponse(error_body(404, message, "model", "model_not_found"), 404)
        return JSONResponse(self._described())

    def _described(self) -> Json:
        return {
            "id": self._handler.model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "kvferry",
            "root": self._handler.model.name,
            "max_model_len": self._handler.validator.max_context(),
        }

    async def _tokenize(self, request: Request, tenant: Tenant) -> Response:
        asked = openai_request.tokenized(await self._body(request))
        self._handler.validator.check_model(asked.model)
        ids = await self._handler.validator.read_prompt(asked)
        most = self._handler.validator.max_context()
        return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids})

    async def _detokenize(self, request: Request, tenant: Tenant) -> Response:
        body = await self._body(request)
        self._handler.validator.check_model(openai_request.Fields(body).text("model"))
        ids = _token_ids(body.get("tokens"), self._handler.model.vocab_size)
        return JSONResponse({"prompt": self._handler.model.tokenizer.decode(ids)})

    async def _body(self, request: Request) -> Json:
        body = await read_body(request, self._options.max_body_bytes, self._options.body_timeout_s)
        if len(body) <= LOOP_BYTES:
            return openai_request.parse(body)
        return await asyncio.to_thread(openai_request.parse, body)

    async def _ready(self, request: Request) -> Response:
        reason = self._missing()
        if reason:
            return JSONResponse({"ok": False, "reason": reason}, status_code=503)
        return JSONResponse({"ok": True})

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"ok": True})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": self._options.version})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


def _request_id(request: Request) -> str:
    """The client's, if it may stand in logs and headers, else a new one; kept with the request."""
    given = checked_request_id(request.headers.get(REQUEST_ID, ""))
    request.state.request_id = given or secrets.token_hex(12)
    return _id(request)


def _id(request: Request) -> str:
    request_id: str = request.state.request_id
    return request_id


def _token_ids(tokens: object, vocab_size: int) -> Sequence[int]:
    if not isinstance(tokens, list):
        raise InvalidRequest("tokens", f"must be a list of token ids, got {shown(tokens)}")
    for token_id in tokens:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                "tokens", f"must hold token ids from 0 to {vocab_size - 1}, got {shown(token_id)}"
            )
    return tokens


def _http_error(request: Request, error: Exception) -> Response:
    """What starlette itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{error.detail}: {request.method} {shown(request.url.path)}"
    body = error_body(error.status_code, message, None, code)
    return JSONResponse(body, error.status_code, headers=error.headers)


def _our_error(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(500, "the router failed; its log says more"), 500)
