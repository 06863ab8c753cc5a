"""A chunk whose digests travel with its cells, piece by piece: where each lies.

piece    the digests of `piece_blocks` blocks, u64 each, then their cells; the last of a layer less
seal     u64 after the last piece: `chunk_check` of the chunk with its digests, or 0, given up
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from protos.transfer_pb2 import Chunk, Frame
from transport.link import Inlet, LinkClosed

PIECE_BYTES = 512 << 10  # that are built and sent, read and written before the next: in a cache
SEAL_BYTES = 8
GIVEN_UP = 0  # as a seal
MAX_PIECES = 16 << 10  # of a chunk: each costs who stages it two views


@dataclass(frozen=True, slots=True)
class Pieces:
    num_layers: int
    num_blocks: int  # of each
    piece_blocks: int
    block_bytes: int  # of cells
    proof_bytes: int  # of digests, for each block

    @classmethod
    def of(cls, chunk: Chunk, num_bytes: int) -> Self | None:
        """Of a chunk that takes `num_bytes` on the wire; None for one that makes no sense."""
        proof_bytes = num_bytes - SEAL_BYTES - chunk.payload_bytes
        num_layers = max(1, chunk.num_layers)
        all_blocks = num_layers * chunk.num_blocks
        if chunk.piece_blocks < 1 or not 0 < all_blocks <= num_bytes or proof_bytes < 0:
            return None
        if proof_bytes % (8 * all_blocks) or chunk.payload_bytes % all_blocks:
            return None
        if num_layers * -(-chunk.num_blocks // chunk.piece_blocks) > MAX_PIECES:
            return None
        return cls(
            num_layers,
            chunk.num_blocks,
            min(chunk.piece_blocks, chunk.num_blocks),
            chunk.payload_bytes // all_blocks,
            proof_bytes // all_blocks,
        )

    @property
    def all_blocks(self) -> int:
        """Of all layers."""
        return self.num_layers * self.num_blocks

    @property
    def room_bytes(self) -> int:
        """Of the largest."""
        return self.piece_blocks * (self.block_bytes + self.proof_bytes)

    @property
    def num_bytes(self) -> int:
        return self.all_blocks * (self.block_bytes + self.proof_bytes) + SEAL_BYTES

    def views(self, digests: memoryview, cells: memoryview) -> list[memoryview]:
        """Both as they follow each other on the wire, without the seal."""
        found = []
        for first, last in self._places():
            found.append(digests[first * self.proof_bytes : last * self.proof_bytes])
            found.append(cells[first * self.block_bytes : last * self.block_bytes])
        return found

    def _places(self) -> Iterator[tuple[int, int]]:
        """Of each piece, the first of its blocks among those of all layers, and past its last."""
        for layer in range(self.num_layers):
            begin, end = layer * self.num_blocks, (layer + 1) * self.num_blocks
            for first in range(begin, end, self.piece_blocks):
                yield first, min(first + self.piece_blocks, end)


def piece_blocks(block_bytes: int, num_digests: int) -> int:
    """How many blocks of so many bytes, and digests, make a piece."""
    return max(1, PIECE_BYTES // max(1, block_bytes + 8 * num_digests))


async def staged(frame: Frame, inlet: Inlet) -> tuple[Frame, memoryview]:
    """All of a payload, and the frame as if it had come after it: with its digests, and its seal
    as its check. Raises LinkClosed.
    """
    pieces = Pieces.of(frame.chunk, inlet.nbytes)
    if pieces is None:
        room = inlet.room(inlet.nbytes)
        await _stage(inlet, [room])
        return frame, room
    cells = inlet.room(pieces.all_blocks * pieces.block_bytes)
    digests = memoryview(bytearray(pieces.all_blocks * pieces.proof_bytes))
    seal = memoryview(bytearray(SEAL_BYTES))
    await _stage(inlet, [*pieces.views(digests, cells), seal])
    whole = Frame()
    whole.CopyFrom(frame)
    whole.chunk.digests = bytes(digests)
    whole.chunk.check = int.from_bytes(seal, "little")
    return whole, cells


async def _stage(inlet: Inlet, views: Sequence[memoryview]) -> None:
    try:
        await inlet.stage(views)
    except OSError as error:
        raise LinkClosed(f"a payload did not come: {error}") from error


def within(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """The first `num_bytes` of them, as far as there are so many."""
    first = []
    for view in views:
        if not num_bytes:
            break
        first.append(view[:num_bytes])
        num_bytes -= first[-1].nbytes
    return first


def without(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of them behind the first `num_bytes`."""
    left = []
    for view in views:
        if num_bytes < view.nbytes:
            left.append(view[num_bytes:])
        num_bytes = max(0, num_bytes - view.nbytes)
    return left
