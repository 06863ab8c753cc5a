"""The life of one transfer, as each end sees it.

One prefill rank, which owes cells to its share of the decode ranks:

    NEW           the order is taken; no decode rank has answered
    ADMITTED      a decode rank has given credit
    STREAMING     chunks are on the wire while later layers and tokens are still computed
    SEALED        the engine will seal no more; the rest is on its way
    AWAIT_COMMIT  every chunk is acknowledged
    RELEASED      every decode rank has committed: the blocks may go
    ABORTING      given up: the other end is told, a gather may still read the blocks
    EXPIRED       as ABORTING, because a decode rank fell silent
    DRAINED       given up, and nothing reads the blocks any more

One decode rank, once a prefill rank has called and the promised blocks are bound:

    RESERVED      the order is taken; no prefill rank of this one has credit yet
    OPEN          a prefill rank has called and was given credit
    RECEIVING     chunks arrive; cells are verified in staging, only then written to blocks
    REPAIRING     a chunk was damaged or lost and is on its way again
    VERIFYING     all has been sent; the last chunks are being verified
    WHOLE         every cell is in its block
    COMMITTED     the group has every cell: the blocks belong to the request
    ABORTING      given up, the other end is told
    QUARANTINE    given up, but a scatter still runs: the blocks must not be used again yet
    FREED         given up, and nothing writes the blocks any more

Terminal states absorb whatever comes late: a success never overrides a failure.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from kvcache.spec import CacheSpec
from transport.plan import LayerCells, layer_cells


class Sending(Enum):
    NEW = "new"
    ADMITTED = "admitted"
    STREAMING = "streaming"
    SEALED = "sealed"
    AWAIT_COMMIT = "await_commit"
    RELEASED = "released"
    ABORTING = "aborting"
    EXPIRED = "expired"
    DRAINED = "drained"


class Receiving(Enum):
    RESERVED = "reserved"
    OPEN = "open"
    RECEIVING = "receiving"
    REPAIRING = "repairing"
    VERIFYING = "verifying"
    WHOLE = "whole"
    COMMITTED = "committed"
    ABORTING = "aborting"
    QUARANTINE = "quarantine"
    FREED = "freed"


S = TypeVar("S", Sending, Receiving)

_GIVE_UP = {Sending.ABORTING, Sending.EXPIRED}

SENDING: Mapping[Sending, set[Sending]] = {
    Sending.NEW: {Sending.ADMITTED, Sending.RELEASED, *_GIVE_UP},  # RELEASED: owes nobody
    Sending.ADMITTED: {Sending.STREAMING, Sending.SEALED, *_GIVE_UP},
    Sending.STREAMING: {Sending.SEALED, *_GIVE_UP},
    Sending.SEALED: {Sending.AWAIT_COMMIT, *_GIVE_UP},
    Sending.AWAIT_COMMIT: {Sending.RELEASED, *_GIVE_UP},
    Sending.RELEASED: set(),
    Sending.ABORTING: {Sending.DRAINED},
    Sending.EXPIRED: {Sending.DRAINED},
    Sending.DRAINED: set(),
}

RECEIVING: Mapping[Receiving, set[Receiving]] = {
    Receiving.RESERVED: {Receiving.OPEN, Receiving.ABORTING},
    Receiving.OPEN: {Receiving.RECEIVING, Receiving.VERIFYING, Receiving.ABORTING},
    Receiving.RECEIVING: {Receiving.REPAIRING, Receiving.VERIFYING, Receiving.ABORTING},
    Receiving.REPAIRING: {Receiving.RECEIVING, Receiving.VERIFYING, Receiving.ABORTING},
    Receiving.VERIFYING: {Receiving.REPAIRING, Receiving.WHOLE, Receiving.ABORTING},
    Receiving.WHOLE: {Receiving.COMMITTED, Receiving.ABORTING},
    Receiving.COMMITTED: set(),
    Receiving.ABORTING: {Receiving.QUARANTINE, Receiving.FREED},
    Receiving.QUARANTINE: {Receiving.FREED},
    Receiving.FREED: set(),
}


def moved(moves: Mapping[S, set[S]], old: S, new: S) -> S:
    """`new`, if the table lets `old` become it."""
    assert new in moves[old], f"a transfer cannot go from {old.value} to {new.value}"
    return new


@functools.lru_cache(maxsize=64)
def _wire_cells(spec: CacheSpec, peer_block_size: int) -> tuple[int, tuple[LayerCells, ...]]:
    """The smaller of both block sizes, and a block's cells in it, layer by layer."""
    peer = replace(spec, block_size=peer_block_size)
    peer.validate()
    wire = min(spec, peer, key=lambda either: either.block_size)
    return wire.block_size, layer_cells(wire)


@dataclass(frozen=True, slots=True)
class Shape:
    """The cells of one prompt on the wire, whose blocks are as large as the smaller of both ends'.

    One of this end's own blocks is `parts` of them: part p of block b has the id b * parts + p.
    """

    num_blocks: int
    block_size: int  # tokens
    layers: tuple[LayerCells, ...]
    parts: int = 1

    @classmethod
    def of(cls, spec: CacheSpec, num_tokens: int, peer_block_size: int = 0) -> "Shape":
        """`peer_block_size` 0 is like ours. Raises ValueError for what cannot be carried."""
        if num_tokens < 1:
            raise ValueError(f"a prompt of {num_tokens} tokens has no cells")
        size, layers = _wire_cells(spec, peer_block_size or spec.block_size)
        return cls(-(-num_tokens // size), size, layers, spec.block_size // size)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def part_ids(self, block_table: Sequence[int], first: int, stop: int) -> list[int]:
        """The wire's blocks `first` to `stop` of a prompt that lies in our blocks `block_table`."""
        parts = self.parts
        if parts == 1:
            return list(block_table[first:stop])
        return [block_table[i // parts] * parts + i % parts for i in range(first, stop)]
