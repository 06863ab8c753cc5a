"""Binds digests to their place: a digest says what bytes are, not where they belong."""

import struct

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvcache.cells import digests_to_bytes
from protos.transfer_pb2 import Chunk
from transport.orders import ShipmentKey

_PLACE = struct.Struct("<IQQIIIIIQII")


def chunk_check(key: ShipmentKey, chunk: Chunk) -> int:
    """xxh3-64 over the shipment's key and everything a chunk says of itself, its digests included.

    A chunk of another shipment, or with a damaged header, does not bear it. It is never 0, which in
    place of one says that a chunk was given up.
    """
    return check_of(place_of(key, chunk), chunk.digests)


def seal_of(place: bytes, digests: NDArray[np.uint64]) -> int:
    """The check of a chunk of that place with digests that come, or came, with its cells."""
    return check_of(place, digests_to_bytes(digests))


def place_of(key: ShipmentKey, chunk: Chunk) -> bytes:
    """What a check is over, but for the digests."""
    place = _PLACE.pack(
        key.attempt,
        key.prefill_epoch,
        key.decode_epoch,
        chunk.seq,
        chunk.layer,
        chunk.num_layers,
        chunk.first_block,
        chunk.num_blocks,
        chunk.payload_bytes,
        len(chunk.heads),
        chunk.piece_blocks,
    )
    heads = struct.pack(f"<{len(chunk.heads)}I", *chunk.heads)
    return b"".join((key.transfer_id, place, heads))


def check_of(place: bytes, proofs: bytes) -> int:
    """The check of a chunk of that place with these digests in its header."""
    return xxh3_64_intdigest(place + proofs) or 1
