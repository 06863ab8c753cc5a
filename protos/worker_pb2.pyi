from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling", "tenant_key", "eos_token_ids", "num_public_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_KEY_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PUBLIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    tenant_key: bytes
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_public_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., tenant_key: _Optional[bytes] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_public_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("work", "transfer_id", "attempt", "expected_instance", "target", "wire", "max_chunk_tokens", "other_wires", "fetch")
    WORK_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OTHER_WIRES_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    work: WorkRequest
    transfer_id: bytes
    attempt: int
    expected_instance: str
    target: DecodeTarget
    wire: str
    max_chunk_tokens: int
    other_wires: _containers.RepeatedScalarFieldContainer[str]
    fetch: Fetch
    def __init__(self, work: _Optional[_Union[WorkRequest, _Mapping]] = ..., transfer_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., expected_instance: _Optional[str] = ..., target: _Optional[_Union[DecodeTarget, _Mapping]] = ..., wire: _Optional[str] = ..., max_chunk_tokens: _Optional[int] = ..., other_wires: _Optional[_Iterable[str]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("holder", "num_blocks", "timeout_ms")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    holder: Holder
    num_blocks: int
    timeout_ms: int
    def __init__(self, holder: _Optional[_Union[Holder, _Mapping]] = ..., num_blocks: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class DecodeTarget(_message.Message):
    __slots__ = ("worker", "instance", "epoch", "rank_addresses", "kv_head_starts", "kv_head_stops", "block_size")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_STARTS_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_STOPS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    instance: str
    epoch: int
    rank_addresses: _containers.RepeatedScalarFieldContainer[str]
    kv_head_starts: _containers.RepeatedScalarFieldContainer[int]
    kv_head_stops: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    def __init__(self, worker: _Optional[str] = ..., instance: _Optional[str] = ..., epoch: _Optional[int] = ..., rank_addresses: _Optional[_Iterable[str]] = ..., kv_head_starts: _Optional[_Iterable[int]] = ..., kv_head_stops: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("admitted", "first_tokens", "done")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    admitted: PrefillAdmitted
    first_tokens: FirstTokens
    done: PrefillDone
    def __init__(self, admitted: _Optional[_Union[PrefillAdmitted, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class PrefillAdmitted(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("tokens", "cached_tokens", "queue_ms", "compute_ms", "fetched_tokens", "fetched_bytes", "fetch_ms")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[GeneratedToken]
    cached_tokens: int
    queue_ms: float
    compute_ms: float
    fetched_tokens: int
    fetched_bytes: int
    fetch_ms: float
    def __init__(self, tokens: _Optional[_Iterable[_Union[GeneratedToken, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., fetched_tokens: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., fetch_ms: _Optional[float] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("computed_tokens", "shipped_bytes", "transfer_ms")
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    shipped_bytes: int
    transfer_ms: float
    def __init__(self, computed_tokens: _Optional[int] = ..., shipped_bytes: _Optional[int] = ..., transfer_ms: _Optional[float] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("work", "expected_instance", "transfer_id", "attempt", "source", "holders")
    WORK_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    work: WorkRequest
    expected_instance: str
    transfer_id: bytes
    attempt: int
    source: PrefillSource
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    def __init__(self, work: _Optional[_Union[WorkRequest, _Mapping]] = ..., expected_instance: _Optional[str] = ..., transfer_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., source: _Optional[_Union[PrefillSource, _Mapping]] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("instance", "rank_addresses", "kv_head_starts", "kv_head_stops", "block_size", "worker", "epoch")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RANK_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_STARTS_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_STOPS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    instance: str
    rank_addresses: _containers.RepeatedScalarFieldContainer[str]
    kv_head_starts: _containers.RepeatedScalarFieldContainer[int]
    kv_head_stops: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    worker: str
    epoch: int
    def __init__(self, instance: _Optional[str] = ..., rank_addresses: _Optional[_Iterable[str]] = ..., kv_head_starts: _Optional[_Iterable[int]] = ..., kv_head_stops: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., worker: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class PrefillSource(_message.Message):
    __slots__ = ("worker", "instance", "epoch", "kv_head_starts", "kv_head_stops", "block_size", "rank_addresses", "wires")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_STARTS_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_STOPS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    WIRES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    instance: str
    epoch: int
    kv_head_starts: _containers.RepeatedScalarFieldContainer[int]
    kv_head_stops: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    rank_addresses: _containers.RepeatedScalarFieldContainer[str]
    wires: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker: _Optional[str] = ..., instance: _Optional[str] = ..., epoch: _Optional[int] = ..., kv_head_starts: _Optional[_Iterable[int]] = ..., kv_head_stops: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., rank_addresses: _Optional[_Iterable[str]] = ..., wires: _Optional[_Iterable[str]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("reserved", "adopted", "token", "done", "kept")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    reserved: DecodeReserved
    adopted: DecodeAdopted
    token: GeneratedToken
    done: DecodeDone
    kept: DecodeKept
    def __init__(self, reserved: _Optional[_Union[DecodeReserved, _Mapping]] = ..., adopted: _Optional[_Union[DecodeAdopted, _Mapping]] = ..., token: _Optional[_Union[GeneratedToken, _Mapping]] = ..., done: _Optional[_Union[DecodeDone, _Mapping]] = ..., kept: _Optional[_Union[DecodeKept, _Mapping]] = ...) -> None: ...

class DecodeReserved(_message.Message):
    __slots__ = ("cached_blocks",)
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    cached_blocks: int
    def __init__(self, cached_blocks: _Optional[int] = ...) -> None: ...

class DecodeKept(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class DecodeAdopted(_message.Message):
    __slots__ = ("shipped_blocks", "shipped_bytes")
    SHIPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    shipped_blocks: int
    shipped_bytes: int
    def __init__(self, shipped_blocks: _Optional[int] = ..., shipped_bytes: _Optional[int] = ...) -> None: ...

class DecodeDone(_message.Message):
    __slots__ = ("cached_tokens", "computed_tokens", "queue_ms", "compute_ms")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    computed_tokens: int
    queue_ms: float
    compute_ms: float
    def __init__(self, cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ...) -> None: ...

class GeneratedToken(_message.Message):
    __slots__ = ("choice", "index", "token_id", "logprobs", "finish_reason", "stop", "stop_token_id")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    choice: int
    index: int
    token_id: int
    logprobs: _inference_pb2.TokenLogprobs
    finish_reason: str
    stop: str
    stop_token_id: int
    def __init__(self, choice: _Optional[int] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ..., finish_reason: _Optional[str] = ..., stop: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("name", "instance", "epoch", "role", "pool", "waiting_requests", "running_requests", "held_requests", "open_transfers", "asyncio_tasks", "open_files", "rank_pids", "steps", "preemptions", "draining")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HELD_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ASYNCIO_TASKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    RANK_PIDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    name: str
    instance: str
    epoch: int
    role: str
    pool: PoolBooks
    waiting_requests: int
    running_requests: int
    held_requests: int
    open_transfers: int
    asyncio_tasks: int
    open_files: int
    rank_pids: _containers.RepeatedScalarFieldContainer[int]
    steps: int
    preemptions: int
    draining: bool
    def __init__(self, name: _Optional[str] = ..., instance: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[str] = ..., pool: _Optional[_Union[PoolBooks, _Mapping]] = ..., waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., held_requests: _Optional[int] = ..., open_transfers: _Optional[int] = ..., asyncio_tasks: _Optional[int] = ..., open_files: _Optional[int] = ..., rank_pids: _Optional[_Iterable[int]] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class PoolBooks(_message.Message):
    __slots__ = ("total_blocks", "free_blocks", "cached_blocks", "used_blocks", "reserved_blocks", "promised_blocks")
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    reserved_blocks: int
    promised_blocks: int
    def __init__(self, total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., promised_blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ("since", "only_numbers")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ONLY_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    since: int
    only_numbers: bool
    def __init__(self, since: _Optional[int] = ..., only_numbers: _Optional[bool] = ...) -> None: ...

class LedgerPart(_message.Message):
    __slots__ = ("worker", "instance", "epoch", "role", "rank", "tp", "first_seq", "last_seq", "rows")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    instance: str
    epoch: int
    role: str
    rank: int
    tp: int
    first_seq: int
    last_seq: int
    rows: bytes
    def __init__(self, worker: _Optional[str] = ..., instance: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[str] = ..., rank: _Optional[int] = ..., tp: _Optional[int] = ..., first_seq: _Optional[int] = ..., last_seq: _Optional[int] = ..., rows: _Optional[bytes] = ...) -> None: ...
