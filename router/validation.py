"""The one place where a request from outside becomes a request we serve.

Both doors build the wire message; everything about it is checked here, once, before a worker hears
of it. What a message holds is material to check: it is never trusted and never logged.
"""

import asyncio
import string
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.sampling_params import InvalidParam, Limits, check_prompt, resolve
from protos import inference_pb2 as pb
from router.errors import InvalidRequest, TooLarge, shown
from router.public_prompts import PublicPrompts
from router.request import AcceptedRequest, Tenant
from router.targets import MAX_PRIORITY, MAX_SESSION_CHARS, MAX_TARGET_MS, Targets
from router.ways import Pins

MAX_REQUEST_ID_CHARS = 128
MAX_NAME_CHARS = 200
MAX_MESSAGES = 1024
MAX_ROLE_CHARS = 64
MAX_CHUNK_TOKENS = 1_000_000
WIRES = ("shm", "tcp", "grpc", "gloo", "nccl")
VISIBLE_ASCII = frozenset(string.ascii_letters + string.digits + string.punctuation)
# Tokenising this much takes about a millisecond; more of it leaves the event loop.
LOOP_CHARS = 2048


class Reads(Protocol):
    """The part of a served model that turns input into tokens."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode_text(self, text: str) -> list[int]: ...

    def encode_chat(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Validator:
    """`max_context` is asked each time: it shrinks to what the live workers agree on."""

    model: Reads
    max_context: Callable[[], int]
    max_prompt_bytes: int
    seed: Callable[[], int]
    public: PublicPrompts

    async def accept(
        self, request: pb.GenerateRequest, request_id: str, tenant: Tenant, door: str
    ) -> AcceptedRequest:
        """Check everything. Raises InvalidRequest, naming field, value and limit."""
        self.check_model(request.model)
        pins, targets = _pins(request.pins), _targets(request.targets)
        _check_priority(request.priority)
        session = checked_label("session", request.session, MAX_SESSION_CHARS)
        limits = self.limits()
        packed = array("I")
        try:
            if request.HasField("token_ids"):
                ids = _packed(request.token_ids)
                check_prompt(ids, limits)
                prompt: list[int] = ids.tolist()
                packed.frombytes(ids.astype(np.uint32).tobytes())
            else:
                prompt = await self.read_prompt(request)
                check_prompt(prompt, limits)
            params = resolve(
                request.sampling, limits, num_prompt_tokens=len(prompt), seed=self.seed()
            )
        except InvalidParam as error:
            raise invalid(error) from None
        return AcceptedRequest(
            request_id=request_id,
            model=self.model.name,
            prompt=tuple(prompt),
            params=params,
            tenant=tenant,
            pins=pins,
            targets=targets,
            priority=request.priority,
            session=session,
            max_chunk_tokens=request.pins.max_chunk_tokens,
            explain=request.explain,
            chat=request.WhichOneof("input") == "chat",
            door=door,
            packed=packed,
            num_public_tokens=self.public.num_shared(prompt),
        )

    def limits(self) -> Limits:
        return Limits(
            max_context=self.max_context(),
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
        )

    def check_model(self, name: str) -> None:
        if name not in ("", self.model.name):
            raise InvalidRequest(
                "model",
                f"{shown(name)} is not served here; the model is {self.model.name!r}",
                kind="model_not_found",
            )

    async def read_prompt(self, request: pb.GenerateRequest) -> list[int]:
        """The prompt's tokens, whichever way it came."""
        match request.WhichOneof("input"):
            case "token_ids":
                ids: list[int] = _packed(request.token_ids).tolist()
                return ids
            case "text":
                text = request.text
                self._check_bytes("prompt", len(text.encode()))
                return await _off_loop("prompt", len(text), lambda: self.model.encode_text(text))
            case "chat":
                return await self._read_chat(request.chat)
            case _:
                raise InvalidRequest("prompt", "must be one of text, token_ids and chat, got none")

    async def _read_chat(self, chat: pb.Chat) -> list[int]:
        if not 1 <= len(chat.messages) <= MAX_MESSAGES:
            raise InvalidRequest(
                "messages", f"must have 1 to {MAX_MESSAGES} messages, got {len(chat.messages)}"
            )
        for number, message in enumerate(chat.messages):
            if not 1 <= len(message.role) <= MAX_ROLE_CHARS:
                raise InvalidRequest(
                    f"messages[{number}].role",
                    f"must have 1 to {MAX_ROLE_CHARS} characters, got {shown(message.role)}",
                )
        num_bytes = sum(len(each.content.encode()) for each in chat.messages)
        self._check_bytes("messages", num_bytes)
        messages = [{"role": each.role, "content": each.content} for each in chat.messages]
        prompted = not chat.no_generation_prompt
        return await _off_loop(
            "messages", num_bytes, lambda: self.model.encode_chat(messages, prompted)
        )

    def _check_bytes(self, field: str, num_bytes: int) -> None:
        if num_bytes > self.max_prompt_bytes:
            raise TooLarge(
                field, f"must have at most {self.max_prompt_bytes} bytes, got {num_bytes}"
            )


def _packed(token_ids: pb.TokenIds) -> NDArray[np.int64]:
    """Reads the message's own memory: a list of its numbers takes fifty times as long."""
    return np.array(token_ids.ids, dtype=np.int64)


async def _off_loop(field: str, num_chars: int, read: Callable[[], list[int]]) -> list[int]:
    """Run a tokenizer, in a thread when it would hold everybody up."""
    try:
        return read() if num_chars <= LOOP_CHARS else await asyncio.to_thread(read)
    except ValueError as error:
        raise InvalidRequest(field, str(error)) from None


def invalid(error: InvalidParam) -> InvalidRequest:
    too_long = error.field in ("prompt", "max_tokens") and "context" in error.limit
    if error.field == "max_tokens" and isinstance(error.value, int):
        too_long = too_long and error.value > 0  # a client that shortens and retries needs to know
    kind = "context_length_exceeded" if too_long else "invalid_value"
    failure = InvalidRequest(error.field, error.limit, kind=kind)
    failure.message = str(error)
    return failure


def checked_request_id(request_id: str) -> str:
    """The id as it is, if it may stand in logs and headers; empty if the client gave none."""
    return checked_label("request_id", request_id, MAX_REQUEST_ID_CHARS)


def checked_label(field: str, label: str, max_chars: int) -> str:
    if len(label) > max_chars or not VISIBLE_ASCII.issuperset(label):
        raise InvalidRequest(
            field, f"must have at most {max_chars} visible ASCII characters, got {shown(label)}"
        )
    return label


def _check_priority(priority: int) -> None:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(
            "priority", f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority}"
        )


def _targets(targets: pb.Targets) -> Targets:
    for name in ("ttft_ms", "token_ms", "deadline_ms"):
        value = getattr(targets, name)
        if not 0 <= value <= MAX_TARGET_MS:  # NaN is not, either
            raise InvalidRequest(
                f"targets.{name}", f"must be from 0 to {MAX_TARGET_MS:.0f} ms, got {value}"
            )
    return Targets(targets.ttft_ms, targets.token_ms, targets.deadline_ms, targets.strict)


def _pins(pins: pb.Pins) -> Pins:
    for field, name in (("pins.prefill", pins.prefill), ("pins.decode", pins.decode)):
        if len(name) > MAX_NAME_CHARS or not VISIBLE_ASCII.issuperset(name):
            raise InvalidRequest(field, f"must be the name of a worker, got {shown(name)}")
    if pins.wire not in ("", *WIRES):
        raise InvalidRequest(
            "pins.wire", f"must be one of {', '.join(WIRES)}, got {shown(pins.wire)}"
        )
    if pins.prefill and pins.no_prefill:
        raise InvalidRequest("pins.no_prefill", f"contradicts pins.prefill {shown(pins.prefill)}")
    if not 0 <= pins.max_chunk_tokens <= MAX_CHUNK_TOKENS:
        raise InvalidRequest(
            "pins.max_chunk_tokens",
            f"must be from 0 to {MAX_CHUNK_TOKENS}, got {pins.max_chunk_tokens}",
        )
    return Pins(pins.prefill, pins.decode, pins.wire, pins.no_prefill)
