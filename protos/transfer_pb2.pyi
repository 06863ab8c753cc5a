from protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShipmentKey(_message.Message):
    __slots__ = ("transfer_id", "attempt", "prefill_epoch", "decode_epoch")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    attempt: int
    prefill_epoch: int
    decode_epoch: int
    def __init__(self, transfer_id: _Optional[bytes] = ..., attempt: _Optional[int] = ..., prefill_epoch: _Optional[int] = ..., decode_epoch: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("key", "hello", "welcome", "open", "credit", "chunk", "chunk_ack", "chunk_nack", "seal_all", "commit", "abort", "drain_ack", "renew", "meet", "cells_again", "quarantine")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ACK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_NACK_FIELD_NUMBER: _ClassVar[int]
    SEAL_ALL_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_ACK_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    MEET_FIELD_NUMBER: _ClassVar[int]
    CELLS_AGAIN_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    key: ShipmentKey
    hello: Hello
    welcome: Welcome
    open: Open
    credit: Credit
    chunk: Chunk
    chunk_ack: ChunkAck
    chunk_nack: ChunkNack
    seal_all: SealAll
    commit: Commit
    abort: Abort
    drain_ack: DrainAck
    renew: Renew
    meet: Meet
    cells_again: CellsAgain
    quarantine: Quarantine
    def __init__(self, key: _Optional[_Union[ShipmentKey, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., chunk_ack: _Optional[_Union[ChunkAck, _Mapping]] = ..., chunk_nack: _Optional[_Union[ChunkNack, _Mapping]] = ..., seal_all: _Optional[_Union[SealAll, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., drain_ack: _Optional[_Union[DrainAck, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., meet: _Optional[_Union[Meet, _Mapping]] = ..., cells_again: _Optional[_Union[CellsAgain, _Mapping]] = ..., quarantine: _Optional[_Union[Quarantine, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "prefill_worker", "prefill_instance", "prefill_epoch", "prefill_rank", "decode_instance", "manifest_digest", "wire", "rendezvous", "pool")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    DECODE_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    prefill_worker: str
    prefill_instance: str
    prefill_epoch: int
    prefill_rank: int
    decode_instance: str
    manifest_digest: bytes
    wire: str
    rendezvous: str
    pool: PoolMap
    def __init__(self, protocol: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., prefill_instance: _Optional[str] = ..., prefill_epoch: _Optional[int] = ..., prefill_rank: _Optional[int] = ..., decode_instance: _Optional[str] = ..., manifest_digest: _Optional[bytes] = ..., wire: _Optional[str] = ..., rendezvous: _Optional[str] = ..., pool: _Optional[_Union[PoolMap, _Mapping]] = ...) -> None: ...

class PoolMap(_message.Message):
    __slots__ = ("num_bytes", "num_blocks", "block_size", "first_head", "num_heads", "layers")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_blocks: int
    block_size: int
    first_head: int
    num_heads: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlace]
    def __init__(self, num_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerPlace, _Mapping]]] = ...) -> None: ...

class LayerPlace(_message.Message):
    __slots__ = ("offset", "block_stride", "plane_stride", "head_stride", "slot_stride")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_FIELD_NUMBER: _ClassVar[int]
    PLANE_STRIDE_FIELD_NUMBER: _ClassVar[int]
    HEAD_STRIDE_FIELD_NUMBER: _ClassVar[int]
    SLOT_STRIDE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    block_stride: int
    plane_stride: int
    head_stride: int
    slot_stride: int
    def __init__(self, offset: _Optional[int] = ..., block_stride: _Optional[int] = ..., plane_stride: _Optional[int] = ..., head_stride: _Optional[int] = ..., slot_stride: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("decode_epoch", "decode_rank")
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    decode_epoch: int
    decode_rank: int
    def __init__(self, decode_epoch: _Optional[int] = ..., decode_rank: _Optional[int] = ...) -> None: ...

class Meet(_message.Message):
    __slots__ = ("address", "ticket", "proof")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    address: str
    ticket: bytes
    proof: bytes
    def __init__(self, address: _Optional[str] = ..., ticket: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("num_tokens", "num_layers", "heads", "block_size")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_layers: int
    heads: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    def __init__(self, num_tokens: _Optional[int] = ..., num_layers: _Optional[int] = ..., heads: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("first_block", "window_bytes")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    window_bytes: int
    def __init__(self, first_block: _Optional[int] = ..., window_bytes: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("seq", "layer", "first_block", "num_blocks", "payload_bytes", "digests", "payload", "heads", "check", "piece_blocks", "pool_blocks", "tail_tokens", "num_layers")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    PIECE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    layer: int
    first_block: int
    num_blocks: int
    payload_bytes: int
    digests: bytes
    payload: bytes
    heads: _containers.RepeatedScalarFieldContainer[int]
    check: int
    piece_blocks: int
    pool_blocks: bytes
    tail_tokens: int
    num_layers: int
    def __init__(self, seq: _Optional[int] = ..., layer: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., digests: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., heads: _Optional[_Iterable[int]] = ..., check: _Optional[int] = ..., piece_blocks: _Optional[int] = ..., pool_blocks: _Optional[bytes] = ..., tail_tokens: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class CellRun(_message.Message):
    __slots__ = ("layer", "first_block", "num_blocks", "heads")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    first_block: int
    num_blocks: int
    heads: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., heads: _Optional[_Iterable[int]] = ...) -> None: ...

class Quarantine(_message.Message):
    __slots__ = ("reason", "left_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    left_ms: int
    def __init__(self, reason: _Optional[str] = ..., left_ms: _Optional[int] = ...) -> None: ...

class CellsAgain(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[CellRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[CellRun, _Mapping]]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("key", "names", "runs", "decode_rank", "lacks", "places", "parts", "block_size")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    LACKS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    key: ShipmentKey
    names: _containers.RepeatedScalarFieldContainer[bytes]
    runs: _containers.RepeatedCompositeFieldContainer[CellRun]
    decode_rank: int
    lacks: ShipmentKey
    places: _containers.RepeatedScalarFieldContainer[int]
    parts: int
    block_size: int
    def __init__(self, key: _Optional[_Union[ShipmentKey, _Mapping]] = ..., names: _Optional[_Iterable[bytes]] = ..., runs: _Optional[_Iterable[_Union[CellRun, _Mapping]]] = ..., decode_rank: _Optional[int] = ..., lacks: _Optional[_Union[ShipmentKey, _Mapping]] = ..., places: _Optional[_Iterable[int]] = ..., parts: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class FetchedCells(_message.Message):
    __slots__ = ("run", "missing", "digests", "payload")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    run: CellRun
    missing: bool
    digests: bytes
    payload: bytes
    def __init__(self, run: _Optional[_Union[CellRun, _Mapping]] = ..., missing: _Optional[bool] = ..., digests: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ChunkAck(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class ChunkNack(_message.Message):
    __slots__ = ("seq", "reason")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    seq: int
    reason: str
    def __init__(self, seq: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SealAll(_message.Message):
    __slots__ = ("num_chunks", "first_tokens")
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_chunks: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[_worker_pb2.GeneratedToken]
    def __init__(self, num_chunks: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[_worker_pb2.GeneratedToken, _Mapping]]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Abort(_message.Message):
    __slots__ = ("reason", "code")
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    code: str
    def __init__(self, reason: _Optional[str] = ..., code: _Optional[str] = ...) -> None: ...

class DrainAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Renew(_message.Message):
    __slots__ = ("num_received",)
    NUM_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    num_received: int
    def __init__(self, num_received: _Optional[int] = ...) -> None: ...
