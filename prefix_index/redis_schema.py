"""How the index lies in Redis: names of keys, and what their values mean. docs/prefix-index.md.

Anything may be found under our keys, for Redis is shared and outlives us. What cannot be read is
None here, never an exception.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from redis.exceptions import ResponseError

from kvcache.block_hash import INDEX_KEY_BYTES
from prefix_index.events import PackedEvents, pack, unpack
from prefix_index.index import (
    UNPROVEN,
    BlockEvent,
    Change,
    EntriesCleared,
    EntriesPublished,
    Fingerprint,
    Load,
    MalformedRecord,
    Residency,
    Stored,
    Tier,
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

VERSION = 2
MAX_VALUE_BYTES = 5

_TIERS = frozenset(tier.value.encode() for tier in Tier)


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key begins with `prefix` and the schema's version: two versions never meet.

    The prefix is in braces, so that a Redis Cluster keeps all of it in one slot: an operation
    changes entries, state and stream together.
    """

    prefix: str

    def _key(self, *parts: str | int) -> str:
        return ":".join((f"{{{self.prefix}}}", str(VERSION), *map(str, parts)))

    @property
    def workers(self) -> str:
        return self._key("workers")

    @property
    def events(self) -> str:
        return self._key("events")

    def epoch(self, worker: str) -> str:
        return self._key("epoch", worker)

    def state(self, worker: str) -> str:
        return self._key("state", worker)

    def lease(self, worker: str, epoch: int) -> str:
        return self._key("lease", worker, epoch)

    def blocks(self, worker: str, epoch: int) -> str:
        return self._key("blocks", worker, epoch)


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


def entry_value(event: Stored) -> bytes:
    """The tier's letter, then the depth in as few bytes as it needs, lowest first."""
    num_bytes = (event.depth.bit_length() + 7) // 8
    return event.tier.value.encode() + event.depth.to_bytes(num_bytes, "little")


def read_entries(pairs: Sequence[Reply]) -> PackedEvents:
    """The entries that name, value, name, value... stand for, less those that are none of ours."""
    return PackedEvents(
        b"".join(
            value[:1] + value[1:].ljust(4, b"\0") + name
            for name, value in zip(pairs[::2], pairs[1::2], strict=True)
            if len(name) == INDEX_KEY_BYTES
            and len(value) <= MAX_VALUE_BYTES
            and value[:1] in _TIERS
        )
    )


def entry_fields(change: Change) -> tuple[bytes | str | int, ...]:
    """The fields of a change's stream entry: k kind, w worker, e epoch, s sequence, p payload."""
    match change:
        case WorkerRegistered(record, residency):
            found = f"{residency.fingerprint:x}:{residency.num_blocks}"
            head = ("k", "r", "w", record.name, "e", record.epoch, "s", residency.sequence)
            return (*head, "f", found, "p", record.to_json())
        case EntriesPublished(worker, epoch, sequence, events):
            head = ("k", "b", "w", worker, "e", epoch, "s", sequence)
            return (*head, "p", pack(events).data)
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
        events = unpack(payload)
        return None if events is None else EntriesPublished(worker, epoch, sequence, events)
    if kind == b"r":
        record = read_record(payload)
        found, _, num_blocks = fields.get(b"f", b"").partition(b":")
        count = read_int(num_blocks)
        if record is None or count is None or (record.name, record.epoch) != (worker, epoch):
            return None
        return WorkerRegistered(record, Residency(sequence, read_fingerprint(found), count))
    return None


@dataclass(frozen=True, slots=True)
class Changed:
    """What events do to a worker's entries in the end."""

    written: Mapping[bytes, bytes]  # by name: values that are new or other than before
    added: Sequence[bytes]  # of those, the names that were not there
    removed: Sequence[bytes]


def changes_of(events: Iterable[BlockEvent]) -> Changed:
    """Of events on as many blocks, each of which changes what is there."""
    stored = [event for event in events if isinstance(event, Stored)]
    written: dict[bytes, bytes] = {event.name: entry_value(event) for event in stored}
    removed = [event.name for event in events if not isinstance(event, Stored)]
    return Changed(written, list(written), removed)


def changed_entries(events: Iterable[BlockEvent], found: Mapping[bytes, bytes | None]) -> Changed:
    """`found` has the values of the names as they are, None of those that are not there."""
    last = {event.name: event for event in events}
    after = {name: entry_value(e) for name, e in last.items() if isinstance(e, Stored)}
    return Changed(
        written={name: value for name, value in after.items() if found[name] != value},
        added=[name for name in after if found[name] is None],
        removed=[name for name in last if name not in after and found[name] is not None],
    )
