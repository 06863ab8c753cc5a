"""Where digests and cells lie that travel together, and what makes no sense."""

import pytest

from protos.transfer_pb2 import Chunk
from transport.pieces import SEAL_BYTES, Pieces, piece_blocks, within, without

CELLS = memoryview(bytes(range(1, 31)))  # 5 blocks of 6
DIGESTS = memoryview(bytes(100 + i for i in range(40)))  # one for each


def chunk(**fields: int) -> Chunk:
    usual = {"num_blocks": 5, "piece_blocks": 2, "payload_bytes": 30}
    return Chunk(**(usual | fields))  # type: ignore[arg-type]


def test_digests_of_some_blocks_come_before_their_cells() -> None:
    pieces = Pieces.of(chunk(), 30 + 40 + SEAL_BYTES)
    assert pieces is not None
    assert (pieces.room_bytes, pieces.num_bytes) == (2 * 14, 78)
    raw = b"".join(pieces.views(DIGESTS, CELLS))
    want = (DIGESTS[:16], CELLS[:12], DIGESTS[16:32], CELLS[12:24], DIGESTS[32:], CELLS[24:])
    assert raw == b"".join(want)
    for num_gone in range(len(raw) + 1):
        assert b"".join(without(pieces.views(DIGESTS, CELLS), num_gone)) == raw[num_gone:]
        assert b"".join(within(pieces.views(DIGESTS, CELLS), num_gone)) == raw[:num_gone]


@pytest.mark.parametrize(
    ("fields", "num_bytes"),
    [
        ({"piece_blocks": 0}, 78),
        ({"num_blocks": 0}, 78),
        ({"num_blocks": 4_000_000_000, "payload_bytes": 0}, SEAL_BYTES),
        ({"payload_bytes": 31}, 78),
        ({}, 77),
        ({}, 30),
    ],
)
def test_a_chunk_that_makes_no_sense_has_no_pieces(fields: dict[str, int], num_bytes: int) -> None:
    assert Pieces.of(chunk(**fields), num_bytes) is None


@pytest.mark.parametrize("fields", [{"num_layers": 1 << 20}, {"num_blocks": 1 << 20}], ids=str)
def test_what_would_come_in_endless_pieces_has_none(fields: dict[str, int]) -> None:
    """Each costs who stages it two objects, on the loop: ours come in some thousands at most."""
    num_blocks = 1 << 20
    usual = {"num_layers": 1, "num_blocks": 1, "piece_blocks": 1, "payload_bytes": num_blocks}
    made = Chunk(**(usual | fields))  # type: ignore[arg-type]
    assert Pieces.of(made, 9 * num_blocks + SEAL_BYTES) is None


def test_a_block_that_is_larger_than_a_piece_is_one() -> None:
    assert piece_blocks(64 << 10, 16) == 7
    assert piece_blocks(600 << 10, 16) == 1
