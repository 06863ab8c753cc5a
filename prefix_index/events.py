"""What happened to a worker's blocks, as its pool says it and as bytes that travel.

An event in bytes is 21 of them: `-` removed, or the tier's letter where it is stored; the depth as
u32 LE; the name. Thousands of them are stored, sent, read and applied without being taken apart.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import overload

from kvcache.block_hash import INDEX_KEY_BYTES, BlockHash, index_key
from kvcache.block_pool import BlockEvent, Removed, Stored, Tier

EVENT_BYTES = 5 + INDEX_KEY_BYTES
MAX_DEPTH = 2**32 - 1

_REMOVED = b"-"
_KINDS = frozenset(b"-" + b"".join(tier.value.encode() for tier in Tier))
_TIERS = {tier.value.encode()[0]: tier for tier in Tier}


class PackedEvents(Sequence[BlockEvent]):
    """Events in bytes; equal to any sequence of the same events. Parents are not told."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        assert len(data) % EVENT_BYTES == 0, f"{len(data)} bytes are not whole events"
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // EVENT_BYTES

    @overload
    def __getitem__(self, at: int) -> BlockEvent: ...

    @overload
    def __getitem__(self, at: slice) -> "PackedEvents": ...

    def __getitem__(self, at: int | slice) -> "BlockEvent | PackedEvents":
        if isinstance(at, int):
            start = range(len(self))[at] * EVENT_BYTES
            return _unpacked(self.data[start : start + EVENT_BYTES])
        start, stop, step = at.indices(len(self))
        assert step == 1, "only whole runs of events can be cut out"
        return PackedEvents(self.data[start * EVENT_BYTES : stop * EVENT_BYTES])

    def __iter__(self) -> Iterator[BlockEvent]:
        for start in range(0, len(self.data), EVENT_BYTES):
            yield _unpacked(self.data[start : start + EVENT_BYTES])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedEvents):
            return self.data == other.data
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return f"PackedEvents({list(islice(self, 4))}{', ...' if len(self) > 4 else ''})"


def pack(events: Iterable[BlockEvent]) -> PackedEvents:
    if isinstance(events, PackedEvents):
        return events
    packed = bytearray()
    for event in events:
        assert len(event.name) == INDEX_KEY_BYTES, f"a block name of {len(event.name)} bytes"
        if isinstance(event, Stored):
            packed += event.tier.value.encode()
            packed += event.depth.to_bytes(4, "little")
        else:
            packed += _REMOVED + bytes(4)
        packed += event.name
    return PackedEvents(bytes(packed))


def unpack(data: bytes) -> PackedEvents | None:
    """Events that came from somewhere; None when nobody of ours can have written them."""
    if len(data) % EVENT_BYTES or not _KINDS.issuperset(data[::EVENT_BYTES]):
        return None
    return PackedEvents(data)


def index_events(events: Iterable[BlockEvent]) -> list[BlockEvent]:
    """A pool's events as the index is told them: under the shorter names it knows blocks by."""
    return [
        Removed(index_key(event.name))
        if isinstance(event, Removed)
        else Stored(
            index_key(event.name),
            None if event.parent is None else index_key(event.parent),
            event.depth,
            event.tier,
        )
        for event in events
    ]


def _unpacked(data: bytes) -> BlockEvent:
    name = BlockHash(data[5:])
    if data[:1] == _REMOVED:
        return Removed(name)
    return Stored(name, None, int.from_bytes(data[1:5], "little"), _TIERS[data[0]])
