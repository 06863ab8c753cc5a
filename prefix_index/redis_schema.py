"""How the index lies in Redis: names of keys, and what their values mean. docs/prefix-index.md.

Anything may be found under our keys, for Redis is shared and outlives us. What cannot be read is
None here, never an exception.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from redis.exceptions import ResponseError

from kvcache.block_hash import BlockHash
from prefix_index.index import (
    UNPROVEN,
    BlockEvent,
    Change,
    EntriesCleared,
    EntriesPublished,
    Fingerprint,
    Load,
    MalformedRecord,
    Removed,
    Residency,
    Stored,
    WorkerGone,
    WorkerRecord,
    WorkerRegistered,
)
from prefix_index.redis_link import Reply

# Every command that the index sends: an ACL needs to allow no other.
COMMANDS = (
    *("PING", "TIME", "WATCH", "MULTI", "EXEC"),
    *("GET", "SET", "INCR", "EXPIRE", "PEXPIRE", "UNLINK"),
    *("HSET", "HMGET", "HDEL", "HLEN", "HSCAN"),
    *("SADD", "SREM", "SMEMBERS"),
    *("XADD", "XREAD", "XREVRANGE"),
)

VERSION = 1
TIER = b"g"  # the value of an entry: which of the worker's caches holds the block
MAX_NAME_BYTES = 255

_STORED, _REMOVED = b"+"[0], b"-"[0]


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key begins with `prefix` and the schema's version: two versions never meet."""

    prefix: str

    @property
    def workers(self) -> str:
        return f"{self.prefix}{VERSION}:workers"

    @property
    def events(self) -> str:
        return f"{self.prefix}{VERSION}:events"

    def epoch(self, worker: str) -> str:
        return f"{self.prefix}{VERSION}:epoch:{worker}"

    def state(self, worker: str) -> str:
        return f"{self.prefix}{VERSION}:state:{worker}"

    def lease(self, worker: str, epoch: int) -> str:
        return f"{self.prefix}{VERSION}:lease:{worker}:{epoch}"

    def blocks(self, worker: str, epoch: int) -> str:
        return f"{self.prefix}{VERSION}:blocks:{worker}:{epoch}"


@dataclass(frozen=True, slots=True)
class State:
    """The life that holds a worker's name now, as `HMGET state:<worker> epoch seq fp` tells."""

    epoch: int
    sequence: int
    fingerprint: Fingerprint

    @staticmethod
    def read(reply: Reply) -> "State | None":
        if isinstance(reply, ResponseError):
            return None
        epoch, sequence = read_int(reply[0]), read_int(reply[1])
        if epoch is None or sequence is None:
            return None
        return State(epoch, sequence, read_fingerprint(reply[2]))

    def residency(self, num_blocks: Reply) -> Residency:
        """`num_blocks` is what HLEN answered; an error there agrees with nobody's count."""
        return Residency(
            self.sequence, self.fingerprint, num_blocks if isinstance(num_blocks, int) else -1
        )


def read_int(reply: Reply) -> int | None:
    """A natural number, or None."""
    return int(reply) if isinstance(reply, bytes) and reply.isdigit() else None


def read_fingerprint(reply: Reply) -> Fingerprint:
    try:
        return Fingerprint(int(reply, 16))
    except (TypeError, ValueError):
        return UNPROVEN


def read_record(reply: Reply) -> WorkerRecord | None:
    try:
        return WorkerRecord.from_json(reply) if isinstance(reply, bytes) else None
    except MalformedRecord:
        return None


def read_load(reply: Reply) -> Load | None:
    try:
        return Load.from_json(reply) if isinstance(reply, bytes) else None
    except MalformedRecord:
        return None


def pack_events(events: Iterable[BlockEvent]) -> bytes:
    """One byte `+` or `-`, one byte length, the name; one after the other."""
    packed = bytearray()
    for event in events:
        assert len(event.name) <= MAX_NAME_BYTES, f"a block name of {len(event.name)} bytes"
        packed.append(_STORED if isinstance(event, Stored) else _REMOVED)
        packed.append(len(event.name))
        packed += event.name
    return bytes(packed)


def unpack_events(packed: bytes) -> tuple[BlockEvent, ...] | None:
    events: list[BlockEvent] = []
    at = 0
    while at < len(packed):
        if at + 2 > len(packed):
            return None
        kind, end = packed[at], at + 2 + packed[at + 1]
        name = BlockHash(packed[at + 2 : end])
        if end > len(packed) or kind not in (_STORED, _REMOVED):
            return None
        events.append(Stored(name, None) if kind == _STORED else Removed(name))
        at = end
    return tuple(events)


def entry_fields(change: Change) -> tuple[bytes | str | int, ...]:
    """The fields of a change's stream entry: k kind, w worker, e epoch, s sequence, p payload."""
    match change:
        case WorkerRegistered(record, residency):
            found = f"{residency.fingerprint:x}:{residency.num_blocks}"
            head = ("k", "r", "w", record.name, "e", record.epoch, "s", residency.sequence)
            return (*head, "f", found, "p", record.to_json())
        case EntriesPublished(worker, epoch, sequence, events):
            head = ("k", "b", "w", worker, "e", epoch, "s", sequence)
            return (*head, "p", pack_events(events))
        case EntriesCleared(worker, epoch, sequence):
            return ("k", "c", "w", worker, "e", epoch, "s", sequence)
        case WorkerGone(worker, epoch):
            return ("k", "g", "w", worker, "e", epoch)


def read_entry(reply: Reply) -> Change | None:
    """The change that a stream entry's fields tell of."""
    fields = dict(zip(reply[::2], reply[1::2], strict=False)) if isinstance(reply, list) else {}
    try:
        worker = fields.get(b"w", b"").decode()
    except UnicodeDecodeError:
        return None
    kind, epoch = fields.get(b"k"), read_int(fields.get(b"e"))
    sequence, payload = read_int(fields.get(b"s")), fields.get(b"p", b"")
    if not worker or epoch is None:
        return None
    if kind == b"g":
        return WorkerGone(worker, epoch)
    if sequence is None:
        return None
    if kind == b"c":
        return EntriesCleared(worker, epoch, sequence)
    if kind == b"b":
        events = unpack_events(payload)
        return None if events is None else EntriesPublished(worker, epoch, sequence, events)
    if kind == b"r":
        record = read_record(payload)
        found, _, num_blocks = fields.get(b"f", b"").partition(b":")
        count = read_int(num_blocks)
        if record is None or count is None or (record.name, record.epoch) != (worker, epoch):
            return None
        return WorkerRegistered(record, Residency(sequence, read_fingerprint(found), count))
    return None


def changed_names(
    events: Sequence[BlockEvent], present: Set[bytes]
) -> tuple[list[bytes], list[bytes]]:
    """What `events` add to and remove from the names that are `present`, in the end."""
    after: dict[bytes, bool] = {event.name: isinstance(event, Stored) for event in events}
    added = [name for name, there in after.items() if there and name not in present]
    removed = [name for name, there in after.items() if not there and name in present]
    return added, removed
