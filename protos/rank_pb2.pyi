from protos import transfer_pb2 as _transfer_pb2
from protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NamedBlocks(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SuspectBlocks(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PinnedBlocks(_message.Message):
    __slots__ = ("places", "block_ids")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, places: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RankReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("pid", "open_transfers", "asyncio_tasks", "open_files", "quarantines")
    PID_FIELD_NUMBER: _ClassVar[int]
    OPEN_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ASYNCIO_TASKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    open_transfers: int
    asyncio_tasks: int
    open_files: int
    quarantines: _containers.RepeatedCompositeFieldContainer[QuarantineReport]
    def __init__(self, pid: _Optional[int] = ..., open_transfers: _Optional[int] = ..., asyncio_tasks: _Optional[int] = ..., open_files: _Optional[int] = ..., quarantines: _Optional[_Iterable[_Union[QuarantineReport, _Mapping]]] = ...) -> None: ...

class QuarantineReport(_message.Message):
    __slots__ = ("prefill", "epoch", "wire", "for_s", "left_s", "reason")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    epoch: int
    wire: str
    for_s: float
    left_s: float
    reason: str
    def __init__(self, prefill: _Optional[str] = ..., epoch: _Optional[int] = ..., wire: _Optional[str] = ..., for_s: _Optional[float] = ..., left_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class ShipmentOrder(_message.Message):
    __slots__ = ("key", "request_key", "num_tokens", "target", "wire", "other_wires")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    OTHER_WIRES_FIELD_NUMBER: _ClassVar[int]
    key: _transfer_pb2.ShipmentKey
    request_key: int
    num_tokens: int
    target: _worker_pb2.DecodeTarget
    wire: str
    other_wires: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[_Union[_transfer_pb2.ShipmentKey, _Mapping]] = ..., request_key: _Optional[int] = ..., num_tokens: _Optional[int] = ..., target: _Optional[_Union[_worker_pb2.DecodeTarget, _Mapping]] = ..., wire: _Optional[str] = ..., other_wires: _Optional[_Iterable[str]] = ...) -> None: ...

class BorrowOrder(_message.Message):
    __slots__ = ("key", "names", "block_ids", "holder", "timeout_ms")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    key: _transfer_pb2.ShipmentKey
    names: _containers.RepeatedScalarFieldContainer[bytes]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    holder: _worker_pb2.Holder
    timeout_ms: int
    def __init__(self, key: _Optional[_Union[_transfer_pb2.ShipmentKey, _Mapping]] = ..., names: _Optional[_Iterable[bytes]] = ..., block_ids: _Optional[_Iterable[int]] = ..., holder: _Optional[_Union[_worker_pb2.Holder, _Mapping]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class Borrowed(_message.Message):
    __slots__ = ("whole_blocks", "bytes", "why")
    WHOLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    whole_blocks: int
    bytes: int
    why: str
    def __init__(self, whole_blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class ShipmentReport(_message.Message):
    __slots__ = ("chunks", "bytes", "transfer_ms")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    bytes: int
    transfer_ms: float
    def __init__(self, chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., transfer_ms: _Optional[float] = ...) -> None: ...

class ReceiptOrder(_message.Message):
    __slots__ = ("key", "num_tokens", "first_block", "block_table", "prefill_instance", "kv_head_starts", "kv_head_stops", "timeout_ms", "source_block_size", "source_addresses", "holders", "block_names")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_STARTS_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_STOPS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    key: _transfer_pb2.ShipmentKey
    num_tokens: int
    first_block: int
    block_table: _containers.RepeatedScalarFieldContainer[int]
    prefill_instance: str
    kv_head_starts: _containers.RepeatedScalarFieldContainer[int]
    kv_head_stops: _containers.RepeatedScalarFieldContainer[int]
    timeout_ms: int
    source_block_size: int
    source_addresses: _containers.RepeatedScalarFieldContainer[str]
    holders: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Holder]
    block_names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, key: _Optional[_Union[_transfer_pb2.ShipmentKey, _Mapping]] = ..., num_tokens: _Optional[int] = ..., first_block: _Optional[int] = ..., block_table: _Optional[_Iterable[int]] = ..., prefill_instance: _Optional[str] = ..., kv_head_starts: _Optional[_Iterable[int]] = ..., kv_head_stops: _Optional[_Iterable[int]] = ..., timeout_ms: _Optional[int] = ..., source_block_size: _Optional[int] = ..., source_addresses: _Optional[_Iterable[str]] = ..., holders: _Optional[_Iterable[_Union[_worker_pb2.Holder, _Mapping]]] = ..., block_names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("chunks", "bytes", "first_tokens")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    bytes: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[_worker_pb2.GeneratedToken]
    def __init__(self, chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[_worker_pb2.GeneratedToken, _Mapping]]] = ...) -> None: ...

class RankCommit(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _transfer_pb2.ShipmentKey
    def __init__(self, key: _Optional[_Union[_transfer_pb2.ShipmentKey, _Mapping]] = ...) -> None: ...

class RankAbort(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: _transfer_pb2.ShipmentKey
    reason: str
    def __init__(self, key: _Optional[_Union[_transfer_pb2.ShipmentKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class RankAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankWhole(_message.Message):
    __slots__ = ("whole_blocks",)
    WHOLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    whole_blocks: int
    def __init__(self, whole_blocks: _Optional[int] = ...) -> None: ...
