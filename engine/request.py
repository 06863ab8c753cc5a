"""One request's progress, counted in tokens, and what it tells its owner.

    queued     waits for blocks and a seat
    running    has both; its choices are what the scheduler schedules
    reserved   was promised blocks, or holds those that a transfer is filling (decode); joins
               running when adopted
    held       ended, but its blocks stay until released (prefill, while they are shipped)
    ended      holds nothing

A request has n choices. Choice 0 computes the prompt; at its end the others fork from it. A choice
has tokens and a number of them whose KV is in the cache; the rest are pending.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from engine.sampling_params import SamplingParams
from engine.stop_rules import StopRules
from kvcache.block_hash import PUBLIC, BlockHash, TenantKey
from protos import inference_pb2, worker_pb2


class Refused(Exception):
    """The engine does not take a request; nothing of it is kept.

    Refused             it contradicts itself, or a token is outside the vocabulary
      DuplicateRequest  its id is taken
      QueueFull         too many requests are here already; a later attempt may succeed
      TooLarge          this pool can never hold the request
      EngineStopped     the engine takes no more requests
    """

    code = "INVALID_ARGUMENT"


class DuplicateRequest(Refused):
    code = "ALREADY_EXISTS"


class QueueFull(Refused):
    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class TooLarge(Refused):
    code = "RESOURCE_EXHAUSTED"


class EngineStopped(Refused):
    code = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request has blocks and runs; `num_cached_tokens` of its prompt need no computing."""

    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One token of one choice. `finish_reason` is empty while the choice goes on."""

    choice: int
    index: int
    token_id: int
    logprob: float | None = None  # None: none were asked for
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str = ""
    stop: str = ""
    stop_token_id: int | None = None

    def to_proto(self) -> worker_pb2.GeneratedToken:
        message = worker_pb2.GeneratedToken(
            choice=self.choice,
            index=self.index,
            token_id=self.token_id,
            finish_reason=self.finish_reason,
            stop=self.stop,
        )
        if self.stop_token_id is not None:
            message.stop_token_id = self.stop_token_id
        if self.logprob is not None:
            message.logprobs.CopyFrom(
                inference_pb2.TokenLogprobs(
                    token_id=self.token_id,
                    logprob=self.logprob,
                    top=[
                        inference_pb2.TopLogprob(token_id=token_id, logprob=logprob)
                        for token_id, logprob in self.top
                    ],
                )
            )
        return message

    @classmethod
    def from_proto(cls, message: worker_pb2.GeneratedToken) -> "TokenOutput":
        logprobs = message.logprobs if message.HasField("logprobs") else None
        return cls(
            choice=message.choice,
            index=message.index,
            token_id=message.token_id,
            logprob=None if logprobs is None else logprobs.logprob,
            top=() if logprobs is None else tuple((t.token_id, t.logprob) for t in logprobs.top),
            finish_reason=message.finish_reason,
            stop=message.stop,
            stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        )


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended early. `code` is the name of a gRPC status; its tokens so far stand."""

    code: str
    reason: str


Output = Admitted | TokenOutput | Failed
OnOutput = Callable[[Output], None]


class State(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    RESERVED = "reserved"
    HELD = "held"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """What the caller sets, then what the engine keeps.

    `on_output` is called on the engine's thread: Admitted once, TokenOutput in order of index for
    each choice, and as the last either the finishing token of the last choice, or Failed.

    `hold` asks for the prompt and the first token of each choice only. However such a request ends,
    its blocks stay as they are until `release_held`: somebody may be reading them. Its blocks are
    pinned. `pinned` blocks are all taken at admission, and never given up to another request.
    """

    request_id: str
    request_key: int  # names the request in step plans; unique in the engine's life
    prompt: Sequence[int]
    params: SamplingParams
    on_output: OnOutput
    tenant: TenantKey = PUBLIC
    eos_token_ids: tuple[int, ...] = ()
    names: list[BlockHash] = field(default_factory=list)  # of the prompt's full blocks
    hold: bool = False
    pinned: bool = False
    max_chunk_tokens: int = 0  # 0: as many as the step has room for

    state: State = State.QUEUED
    arrival: int = 0  # older requests have smaller numbers
    choices: list["Choice"] = field(default_factory=list)  # the unfinished ones
    num_cached_tokens: int = -1  # of the prompt, when it was first admitted
    num_computed_tokens: int = 0  # of the prompt, here; again after a preemption
    queued_at: float = 0.0  # on the engine's clock, as is the next
    begun_at: float | None = None  # when the first step with tokens of it began
    compute_ms: float = 0.0  # of the steps that computed its prompt, its share by tokens

    @property
    def queue_ms(self) -> float:
        return 0.0 if self.begun_at is None else (self.begun_at - self.queued_at) * 1000

    def __post_init__(self) -> None:
        self.pinned = self.pinned or self.hold

    @property
    def max_tokens(self) -> int:
        """Output tokens this engine will sample for each choice."""
        return 1 if self.hold else self.params.max_tokens

    @property
    def max_slots(self) -> int:
        """Tokens of one choice whose KV may be stored: the last output token's never is."""
        return len(self.prompt) + self.max_tokens - 1


@dataclass(slots=True, eq=False)
class Choice:
    """One of a request's n outputs: what the scheduler schedules."""

    request: Request
    number: int
    rules: StopRules
    output: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    names: list[BlockHash] = field(default_factory=list)  # of full blocks, at least computed ones
    num_computed: int = 0  # tokens whose KV is in the cache
    num_named: int = 0  # blocks of the table that were named, or shared under their name
    num_promised: int = 0  # blocks still to be had from the pool, whoever else wants some
    sampled: bool = False  # a share of what it may share has been checked since it was queued
    tainted: bool = False  # a block of its table has been found changed

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def age(self) -> tuple[int, int]:
        """Orders choices by arrival: who is served first, and who is preempted last."""
        return self.request.arrival, self.number

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        num_prompt = len(self.request.prompt)
        head = self.request.prompt[start : min(stop, num_prompt)]
        if stop <= num_prompt:
            return tuple(head)
        return (*head, *self.output[max(0, start - num_prompt) : stop - num_prompt])
