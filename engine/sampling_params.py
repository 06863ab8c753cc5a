"""What a request asks of the sampler: every field, its default and its limit.

The router resolves a request once (`resolve`); from there on every field is set, and workers read
it back with `from_proto`. Nothing here loads torch.

The conventions, where engines differ:

    temperature     under 1e-5 is greedy; the limit is 2
    order           min_tokens and allowed ids, penalties, logit bias, temperature, min-p, top-k,
                    then top-p over what is left
    repetition      looks at prompt and output; presence and frequency at the output only
    min_tokens      EOS and stop token ids cannot be sampled before, and the text of the first
                    `min_tokens` tokens is not searched for stop strings
    logprobs        of the model's own distribution, before any of the above
    seed            choice 0 of a request uses it as it is, choice c uses `choice_seed(seed, c)`
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos import inference_pb2 as pb

GREEDY_BELOW = 1e-5
"""Temperatures under this one are greedy: dividing by them says nothing but 'the largest'."""

_MAX_SEED = 2**64 - 1


class InvalidParam(ValueError):
    """A field of a request is outside its limit. Nothing was allocated."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} {limit}, got {_shown(value)}")
        self.field = field
        self.value = value
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Limits:
    """What one served model accepts. `eos_token_ids` lets contradictions be refused early."""

    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    default_max_tokens: int = 256
    max_n: int = 16
    max_logprobs: int = 20
    max_temperature: float = 2.0
    max_repetition_penalty: float = 10.0
    max_stop: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_allowed_token_ids: int = 4096


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved: every field holds. `seed` is always set; `logprobs` None means none at all."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int = 0
    n: int = 1

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def to_proto(self) -> pb.SamplingParams:
        message = pb.SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            allowed_token_ids=self.allowed_token_ids,
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            n=self.n,
        )
        if self.logprobs is not None:
            message.logprobs = self.logprobs
        return message

    @classmethod
    def from_proto(cls, message: pb.SamplingParams) -> "SamplingParams":
        """Read what `to_proto` wrote; raises InvalidParam if the sender left a field open."""
        for field in _ALWAYS_SET:
            if not message.HasField(field):
                raise InvalidParam(field, "nothing", "must be resolved before it reaches a worker")
        return cls(
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple(sorted(message.logit_bias.items())),
            allowed_token_ids=tuple(message.allowed_token_ids),
            stop_token_ids=tuple(message.stop_token_ids),
            stop=tuple(message.stop),
            ignore_eos=message.ignore_eos,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            seed=message.seed,
            n=message.n,
        )


_ALWAYS_SET = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
)
_FIELDS = frozenset(
    (*_ALWAYS_SET, "logit_bias", "allowed_token_ids", "stop_token_ids", "stop", "ignore_eos")
) | {"logprobs"}


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of n choices: the same as a request of its own with n=1 and this seed."""
    if choice == 0:
        return seed
    text = seed.to_bytes(8, "little") + choice.to_bytes(4, "little")
    digest = hashlib.blake2b(text, digest_size=8, person=b"kvferry choice").digest()
    return int.from_bytes(digest, "little")


def check_prompt(token_ids: Sequence[int] | NDArray[np.int64], limits: Limits) -> None:
    """Raise InvalidParam unless this prompt can be computed and leaves room for one token."""
    if len(token_ids) == 0:
        raise InvalidParam("prompt", "0 tokens", "must have at least 1 token")
    if len(token_ids) >= limits.max_context:
        raise InvalidParam(
            "prompt",
            f"{len(token_ids)} tokens",
            f"must have at most {limits.max_context - 1} tokens"
            f" (the context of {limits.max_context} less one to generate)",
        )
    if isinstance(token_ids, np.ndarray):  # a hundredth of the time
        lowest, highest = int(token_ids.min()), int(token_ids.max())
    else:
        lowest, highest = min(token_ids), max(token_ids)
    for token_id in (lowest, highest):
        _check_token_id("prompt", token_id, limits)


def resolve(
    source: pb.SamplingParams | Mapping[str, object],
    limits: Limits,
    *,
    num_prompt_tokens: int = 0,
    seed: int = 0,
) -> SamplingParams:
    """Check every field against its limit and fill in what is absent; raises InvalidParam.

    `source` is the wire message, or a mapping with the same field names (None means absent).
    `seed` is used when the request brings none. An absent max_tokens becomes the default, or what
    is left of the context if that is less.
    """
    fields = _present(source) if isinstance(source, pb.SamplingParams) else source
    for name in fields:
        if name not in _FIELDS:
            raise InvalidParam(str(name)[:64], fields[name], "is not a sampling field")
    read = _Reader(fields, limits)
    max_tokens = _max_tokens(read, num_prompt_tokens)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=read.integer("min_tokens", 0, 0, max_tokens),
        temperature=read.number("temperature", 1.0, 0.0, limits.max_temperature),
        top_k=_top_k(read),
        top_p=read.number("top_p", 1.0, 0.0, 1.0, above=True),
        min_p=read.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=read.number(
            "repetition_penalty", 1.0, 0.0, limits.max_repetition_penalty, above=True
        ),
        presence_penalty=read.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=read.number("frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=read.logit_bias(),
        allowed_token_ids=read.token_ids("allowed_token_ids", limits.max_allowed_token_ids),
        stop_token_ids=read.token_ids("stop_token_ids", limits.max_stop_token_ids),
        stop=read.stop(),
        ignore_eos=read.flag("ignore_eos"),
        logprobs=read.optional_integer("logprobs", 0, limits.max_logprobs),
        seed=read.integer("seed", seed, 0, _MAX_SEED),
        n=read.integer("n", 1, 1, limits.max_n),
    )
    _check_allowed(params, limits)
    return params


def _present(message: pb.SamplingParams) -> dict[str, object]:
    """Only the fields that were set; repeated ones as they are, copied after their check."""
    return {descriptor.name: value for descriptor, value in message.ListFields()}


def _max_tokens(read: "_Reader", num_prompt_tokens: int) -> int:
    room = read.limits.max_context - num_prompt_tokens
    given = read.optional_integer("max_tokens", 1, max(room, 1), _room(read.limits, room))
    return max(1, min(read.limits.default_max_tokens, room)) if given is None else given


def _room(limits: Limits, room: int) -> str:
    if room == limits.max_context:
        return ""
    return f" (the context of {limits.max_context} less the prompt)"


def _top_k(read: "_Reader") -> int:
    top_k = read.integer("top_k", 0, -1, 2**31 - 1)
    return 0 if top_k == -1 or top_k >= read.limits.vocab_size else top_k


def _check_allowed(params: SamplingParams, limits: Limits) -> None:
    """Refuse a request whose every token is forbidden for its first min_tokens tokens."""
    if not params.allowed_token_ids or params.min_tokens == 0:
        return
    ending = set(params.stop_token_ids)
    if not params.ignore_eos:
        ending.update(limits.eos_token_ids)
    if ending.issuperset(params.allowed_token_ids):
        raise InvalidParam(
            "allowed_token_ids",
            params.allowed_token_ids,
            f"must leave a token that does not end the text while min_tokens is"
            f" {params.min_tokens}",
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Takes one field at a time out of an untrusted mapping, checked."""

    fields: Mapping[str, object]
    limits: Limits

    def optional_integer(self, name: str, lowest: int, highest: int, why: str = "") -> int | None:
        value = self.fields.get(name)
        if value is None:
            return None
        limit = f"must be a whole number from {lowest} to {highest}{why}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidParam(name, value, limit)
        if not lowest <= value <= highest:
            raise InvalidParam(name, value, limit)
        return value

    def integer(self, name: str, default: int, lowest: int, highest: int) -> int:
        value = self.optional_integer(name, lowest, highest)
        return default if value is None else value

    def number(
        self, name: str, default: float, lowest: float, highest: float, *, above: bool = False
    ) -> float:
        value = self.fields.get(name)
        if value is None:
            return default
        start = "greater than" if above else "from"
        limit = f"must be a number {start} {lowest:g} and at most {highest:g}"
        number = _finite(value)
        if number is None or not lowest <= number <= highest or (above and number == lowest):
            raise InvalidParam(name, value, limit)
        return number

    def flag(self, name: str) -> bool:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidParam(name, value, "must be true or false")
        return bool(value)

    def token_ids(self, name: str, most: int) -> tuple[int, ...]:
        """Ascending and without repeats."""
        values = self._listed(name, most, "token ids")
        return tuple(sorted({_check_token_id(name, value, self.limits) for value in values}))

    def stop(self) -> tuple[str, ...]:
        value = self.fields.get("stop")
        values = [value] if isinstance(value, str) else self._listed("stop", self.limits.max_stop)
        most = self.limits.max_stop_chars
        for text in values:
            if not isinstance(text, str) or not 1 <= len(text) <= most:
                raise InvalidParam("stop", text, f"must hold strings of 1 to {most} characters")
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise InvalidParam("stop", text, "must hold valid Unicode text")
        return tuple(dict.fromkeys(str(text) for text in values))

    def logit_bias(self) -> tuple[tuple[int, float], ...]:
        """Ascending by token id. Keys may be decimal strings, as JSON has them."""
        value = self.fields.get("logit_bias")
        if value is None:
            return ()
        most = self.limits.max_logit_bias
        if not isinstance(value, Mapping):
            raise InvalidParam("logit_bias", value, "must map token ids to numbers")
        if len(value) > most:
            raise InvalidParam(
                "logit_bias", f"{len(value)} entries", f"must have at most {most} entries"
            )
        biases: dict[int, float] = {}
        for key, bias in value.items():
            token_id = _check_token_id("logit_bias", _decimal(key), self.limits)
            number = _finite(bias)
            if number is None or not -100 <= number <= 100:
                raise InvalidParam(
                    f"logit_bias[{token_id}]", bias, "must be a number from -100 to 100"
                )
            biases[token_id] = number
        return tuple(sorted(biases.items()))

    def _listed(self, name: str, most: int, what: str = "entries") -> Sequence[object]:
        value = self.fields.get(name)
        if value is None:
            return ()
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise InvalidParam(name, value, f"must be a list of {what}")
        if len(value) > most:
            raise InvalidParam(name, f"{len(value)} {what}", f"must have at most {most} {what}")
        return value


def _check_token_id(field: str, token_id: object, limits: Limits) -> int:
    limit = f"must hold token ids from 0 to {limits.vocab_size - 1}"
    if isinstance(token_id, bool) or not isinstance(token_id, int):
        raise InvalidParam(field, token_id, limit)
    if not 0 <= token_id < limits.vocab_size:
        raise InvalidParam(field, token_id, limit)
    return token_id


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _decimal(key: object) -> object:
    if isinstance(key, str) and len(key) <= 20 and key.removeprefix("-").isdecimal():
        return int(key)
    return key


def _shown(value: object) -> str:
    """A value as an error may quote it: short, on one line."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
