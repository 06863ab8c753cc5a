"""Ask a running cluster something, over gRPC."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Self

import grpc
import grpc.aio

from kvferry.errors import CommandError, NoCluster
from protos.inference_pb2 import (
    Chat,
    ChatMessage,
    Explanation,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    Usage,
)
from protos.inference_pb2_grpc import InferenceStub
from transport.grpc_options import channel_options
from transport.plain_words import plain_words


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer and where it came from."""

    text: str
    finish_reason: str
    usage: Usage
    explanation: Explanation | None


def chat_request(
    messages: Sequence[ChatMessage],
    *,
    max_tokens: int,
    temperature: float,
    seed: int | None = None,
    explain: bool = False,
) -> GenerateRequest:
    """Raises CommandError for a number that no message can hold."""
    sampling = SamplingParams(temperature=temperature)
    for name, value in (("max_tokens", max_tokens), ("seed", seed)):
        if value is None:
            continue
        try:
            setattr(sampling, name, value)
        except ValueError:
            raise CommandError(
                f"{name} must be a whole number from 0 that fits into 64 bits, got {value}"
            ) from None
    return GenerateRequest(chat=Chat(messages=messages), sampling=sampling, explain=explain)


class RouterClient:
    """A connection to one router, with the key it asks for, if any."""

    def __init__(self, address: str, api_key: str = "") -> None:
        """Raises CommandError for a key that no header can hold."""
        if not (api_key.isascii() and api_key.isprintable()):
            raise CommandError("the API key must be of printable ASCII characters")
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        self._stub = InferenceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def ask(
        self, request: GenerateRequest, on_text: Callable[[str], None], timeout_s: float = 600.0
    ) -> Answer:
        """Stream one answer: `on_text` gets each piece as it comes. Raises CommandError."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            return await _collect(call, on_text)
        except grpc.aio.AioRpcError as error:
            raise failure(error, self._address) from None

    async def explain(self, request: GenerateRequest, timeout_s: float = 5.0) -> Explanation:
        """Where the request would go. Raises CommandError."""
        try:
            answer = await self._stub.Explain(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise failure(error, self._address) from None
        explanation: Explanation = answer.explanation
        return explanation


def failure(error: grpc.aio.AioRpcError, address: str) -> CommandError:
    """The sentence for a call to the router at `address` that failed."""
    details = error.details() or "no reason given"
    if error.code() is grpc.StatusCode.UNAVAILABLE and (plain := plain_words(details)) != details:
        return NoCluster(
            f"no router answers at {address} ({plain}): start a cluster with `kvferry up`, or name "
            "another router with --grpc HOST:PORT"
        )
    return CommandError(f"the cluster answered {error.code().name}: {details}")


async def _collect(
    responses: AsyncIterator[GenerateResponse], on_text: Callable[[str], None]
) -> Answer:
    pieces: list[str] = []
    explanation: Explanation | None = None
    reason, usage = "", Usage()
    async for response in responses:
        match response.WhichOneof("event"):
            case "started":
                if response.started.HasField("explanation"):
                    explanation = response.started.explanation
            case "delta":
                pieces.append(response.delta.text)
                on_text(response.delta.text)
            case "finished":
                reason = response.finished.reason
            case "usage":
                usage = response.usage
    return Answer("".join(pieces), reason, usage, explanation)
