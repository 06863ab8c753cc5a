"""Bodies in OpenAI's shape, read into the wire message both doors share.

Here a body only has to have the right form; what its fields hold is checked in `validation`.
Fields that we do not serve are refused or ignored: see `unserved`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protos import inference_pb2 as pb
from router.errors import InvalidRequest, shown
from router.unserved import refuse_unserved

MAX_PROMPTS = 64
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for completions

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
TARGETS = ("ttft_ms", "token_ms", "deadline_ms")
INTEGERS = ("top_k", "seed", "n", "min_tokens")
TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids")

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request: a wire message for each prompt, and how the client wants its answer."""

    requests: tuple[pb.GenerateRequest, ...]
    chat: bool
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    logprobs: bool = False
    return_token_ids: bool = False

    @property
    def num_choices(self) -> int:
        """Choices of each prompt, if the number is one that will be accepted."""
        return self.requests[0].sampling.n or 1


def parse(body: bytes) -> Json:
    """Raises InvalidRequest for anything but a JSON object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
        raise InvalidRequest("body", f"must be JSON: {shown(str(error))}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("body", f"must be a JSON object, got {shown(value)}")
    return value


def completion(body: Json, request_id: str) -> Asked:
    """The body of /v1/completions."""
    fields = Fields(body)
    refuse_unserved(body, chat=False)
    logprobs = body.get("logprobs") is not None and body["logprobs"] is not False  # 0 counts
    echo = fields.flag("echo")
    if echo and logprobs:
        raise InvalidRequest("echo", "with logprobs is not served: prompts have no logprobs")
    sampling = _sampling(fields)
    length = body.get("max_tokens")
    _set(sampling, "max_tokens", DEFAULT_COMPLETION_TOKENS if length is None else length)
    if logprobs:
        _set(sampling, "logprobs", body["logprobs"])
    prompts = _prompts(body.get("prompt"))
    several = len(prompts) > 1
    requests = []
    for number, prompt in enumerate(prompts):
        request = _request(fields, sampling, f"{request_id}-{number}" if several else request_id)
        _put_prompt(request, prompt, f"prompt[{number}]" if several else "prompt")
        requests.append(request)
    return _asked(fields, requests, chat=False, echo=echo, logprobs=logprobs)


def chat(body: Json, request_id: str) -> Asked:
    """The body of /v1/chat/completions."""
    fields = Fields(body)
    refuse_unserved(body, chat=True)
    sampling = _sampling(fields)
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            _set(sampling, "max_tokens", body[name], name)
            break
    logprobs = fields.flag("logprobs")
    top = body.get("top_logprobs")
    if logprobs:
        _set(sampling, "logprobs", 0 if top is None else top, "top_logprobs")
    elif top not in (None, 0):
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    request = _request(fields, sampling, request_id)
    put_messages(request, body.get("messages"))
    if body.get("add_generation_prompt") is not None:
        request.chat.no_generation_prompt = not fields.flag("add_generation_prompt")
    return _asked(fields, [request], chat=True, logprobs=logprobs)


def tokenized(body: Json) -> pb.GenerateRequest:
    """The body of /tokenize: a prompt or messages."""
    fields = Fields(body)
    request = pb.GenerateRequest(model=fields.text("model"))
    if body.get("messages") is not None:
        put_messages(request, body["messages"])
        if body.get("add_generation_prompt") is not None:
            request.chat.no_generation_prompt = not fields.flag("add_generation_prompt")
    else:
        _put_prompt(request, body.get("prompt"), "prompt")
    return request


class Fields:
    """One value at a time out of an untrusted object, or InvalidRequest."""

    def __init__(self, body: Json) -> None:
        self.body = body

    def flag(self, name: str) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(name, f"must be true or false, got {shown(value)}")
        return bool(value)

    def text(self, name: str) -> str:
        value = self.body.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise InvalidRequest(name, f"must be text, got {shown(value)}")
        return encodable(value, name)

    def mapping(self, name: str) -> Json:
        value = self.body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InvalidRequest(name, f"must be an object, got {shown(value)}")
        return value


def encodable(text: str, field: str) -> str:
    """The text, unless it holds half of a surrogate pair, which JSON can say and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = f"U+{ord(text[error.start]):04X}"
        raise InvalidRequest(
            field, f"must be valid Unicode, got the lone surrogate {lone} at {error.start}"
        ) from None
    return text


def put_messages(request: pb.GenerateRequest, messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", f"must be a list with a message, got {shown(messages)}")
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise InvalidRequest(where, f"must be an object, got {shown(message)}")
        fields = Fields(message)
        content = _content(message.get("content"), f"{where}.content")
        try:
            role = fields.text("role")
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}.role", "must be text") from error
        request.chat.messages.append(pb.ChatMessage(role=role, content=content))


def _content(content: object, where: str) -> str:
    """Text, or parts of text, which are joined as the reference chat templates join them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return encodable(content, where)
    if not isinstance(content, list):
        raise InvalidRequest(where, f"must be text or a list of parts, got {shown(content)}")
    texts: list[str] = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{where}[{number}]", f"must be a part of type text, got {shown(part)}"
            )
        texts.append(encodable(text, f"{where}[{number}].text"))
    return "\n".join(texts)


def _prompts(prompt: object) -> Sequence[object]:
    """One prompt as a list of one; a batch of prompts as it is."""
    if not isinstance(prompt, list) or not any(isinstance(each, str | list) for each in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"must be at most {MAX_PROMPTS} prompts, got {len(prompt)}")
    return prompt


def _put_prompt(request: pb.GenerateRequest, prompt: object, field: str) -> None:
    if isinstance(prompt, str):
        request.text = encodable(prompt, field)
        return
    if not isinstance(prompt, list):
        raise InvalidRequest(field, f"must be text or a list of token ids, got {shown(prompt)}")
    request.token_ids.SetInParent()
    for token_id in prompt:
        if type(token_id) is not int or not -(2**63) <= token_id < 2**63:
            raise InvalidRequest(field, f"must hold token ids, got {shown(token_id)}")
    request.token_ids.ids.extend(prompt)


def _request(fields: Fields, sampling: pb.SamplingParams, request_id: str) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        request_id=request_id, model=fields.text("model"), sampling=sampling
    )
    _put_wishes(request, fields)
    return request


def _put_wishes(request: pb.GenerateRequest, fields: Fields) -> None:
    """Our extensions: how fast, before whom, and where its session went before."""
    wanted = Fields(fields.mapping("slo"))
    for name in wanted.body:
        if name not in (*TARGETS, "strict"):
            raise InvalidRequest("slo", f"has {', '.join(TARGETS)} and strict, got {shown(name)}")
    for name in TARGETS:
        value = wanted.body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"slo.{name}", f"must be a number, got {shown(value)}")
        try:
            setattr(request.targets, name, value)
        except OverflowError:
            raise InvalidRequest(f"slo.{name}", f"must be a number, got {shown(value)}") from None
    try:
        request.targets.strict = wanted.flag("strict")
    except InvalidRequest as error:
        raise InvalidRequest(
            "slo.strict", f"must be true or false, got {shown(wanted.body['strict'])}"
        ) from error
    priority = fields.body.get("priority")
    if priority is not None:
        if type(priority) is not int or not -(2**31) <= priority < 2**31:
            raise InvalidRequest("priority", f"must be a whole number, got {shown(priority)}")
        request.priority = priority
    request.session = fields.text("session_id")


def _sampling(fields: Fields) -> pb.SamplingParams:
    sampling = pb.SamplingParams()
    for name in (*NUMBERS, *INTEGERS):
        if fields.body.get(name) is not None:
            _set(sampling, name, fields.body[name])
    for name in TOKEN_LISTS:
        if fields.body.get(name) is not None:
            _extend(sampling, name, fields.body[name], int, "a list of token ids")
    stop = fields.body.get("stop")
    if stop is not None:
        _extend(sampling, "stop", [stop] if isinstance(stop, str) else stop, str, "text or a list")
    for key, bias in fields.mapping("logit_bias").items():
        _bias(sampling, key, bias)
    sampling.ignore_eos = fields.flag("ignore_eos")
    return sampling


def _set(sampling: pb.SamplingParams, name: str, value: object, said: str = "") -> None:
    """Put a number where it belongs; whether it is a sensible one is for `validation` to say."""
    whole = name not in NUMBERS
    if whole and isinstance(value, float) and value.is_integer():
        value = int(value)
    kind = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise InvalidRequest(said or name, f"must be {kind}, got {shown(value)}")
    try:
        setattr(sampling, name, value)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            said or name, f"must be {kind} of 64 bits, got {shown(value)}"
        ) from None


def _extend(sampling: pb.SamplingParams, name: str, values: object, of: type, kind: str) -> None:
    if not isinstance(values, list) or any(type(each) is not of for each in values):
        raise InvalidRequest(name, f"must be {kind}, got {shown(values)}")
    try:
        getattr(sampling, name).extend(values)
    except (ValueError, OverflowError):  # a lone surrogate, or more than 64 bits
        raise InvalidRequest(name, f"must be {kind}, got {shown(values)}") from None


def _bias(sampling: pb.SamplingParams, key: str, bias: object) -> None:
    if isinstance(bias, bool) or not isinstance(bias, int | float):
        raise InvalidRequest(f"logit_bias[{shown(key)}]", f"must be a number, got {shown(bias)}")
    try:
        sampling.logit_bias[int(key)] = bias
    except (ValueError, OverflowError):
        raise InvalidRequest("logit_bias", f"must map token ids, got {shown(key)}") from None


def _asked(
    fields: Fields,
    requests: list[pb.GenerateRequest],
    *,
    chat: bool,
    echo: bool = False,
    logprobs: bool = False,
) -> Asked:
    options = Fields(fields.mapping("stream_options"))
    return Asked(
        requests=tuple(requests),
        chat=chat,
        stream=fields.flag("stream"),
        include_usage=options.flag("include_usage"),
        echo=echo,
        logprobs=logprobs,
        return_token_ids=fields.flag("return_token_ids"),
    )
