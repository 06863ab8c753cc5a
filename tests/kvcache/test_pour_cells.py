"""Cells that leave through a socket while they are gathered: the same bytes, and no waiting."""

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvcache.head_map import HeadInterval
from kvcache.kept_digests import BlockRotten
from kvcache.kv_store import KvStore
from kvcache.layout import KvLayout
from kvcache.pool_cells import PoolCells
from kvcache.spec import CacheSpec

SPEC = CacheSpec.full(num_layers=2, num_kv_heads=4, head_dim=32, block_size=16, dtype="float32")
BLOCK_BYTES = 4 * 2 * 16 * 32 * 4  # of one layer, all heads
IDS = [7, 3, 21, 0, 12, 13]


def random_store(layout: KvLayout = KvLayout.HEAD_MAJOR, num_blocks: int = 24) -> KvStore:
    store = KvStore(SPEC, HeadInterval(0, 4), num_blocks, layout=layout)
    for layer in range(2):
        values = store.layer(layer)
        values.copy_(values.new_empty(values.shape).normal_())
    return store


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def poured(
    store: KvStore | PoolCells,
    pair: tuple[socket.socket, socket.socket],
    ids: list[int],
    heads: list[int],
    tail: int | None,
    room_bytes: int,
) -> tuple[bytes, np.ndarray]:
    """What came out at the other end, and the digests."""
    ours, theirs = pair
    got = bytearray()

    def read() -> None:
        while part := theirs.recv(1 << 16):
            got.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    digests = np.zeros(len(ids) * len(heads) * 2, np.uint64)
    room = np.zeros(room_bytes, np.uint8)
    try:
        gone = store.pour_cells(1, ids, heads, tail, ours.fileno(), room, digests)
    finally:
        ours.shutdown(socket.SHUT_WR)
        reader.join()
    assert gone == len(got)
    return bytes(got), digests


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("heads", [[0, 1, 2, 3], [1, 2], [3]], ids=str)
@pytest.mark.parametrize("tail", [None, 1, 15])
@pytest.mark.parametrize("pieces", [1, 2.5, 100])
def test_what_is_poured_is_what_is_gathered(
    layout: KvLayout,
    heads: list[int],
    tail: int | None,
    pieces: float,
    pair: tuple[socket.socket, socket.socket],
) -> None:
    store = random_store(layout)
    want_digests = np.zeros(len(IDS) * len(heads) * 2, np.uint64)
    want = store.gather_cells(1, IDS, heads, tail, digests=want_digests)
    room_bytes = round(pieces * BLOCK_BYTES * len(heads) / 4)
    got, digests = poured(store, pair, IDS, heads, tail, room_bytes)
    assert got == want.tobytes()
    assert (digests == want_digests).all()


def test_parts_of_blocks_are_poured_alike(pair: tuple[socket.socket, socket.socket]) -> None:
    parts = random_store().cut(4)
    ids = [29, 30, 31, 12, 13]
    want = parts.gather_cells(1, ids, [0, 1, 2, 3], 3)
    got, _ = poured(parts, pair, ids, [0, 1, 2, 3], 3, BLOCK_BYTES)
    assert got == want.tobytes()


def test_what_cannot_be_poured_leaves_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    """Heads that are not one run, and blocks that are larger than the room."""
    store = random_store()
    assert poured(store, pair, IDS, [0, 2], None, 1 << 20)[0] == b""
    assert store.pour_cells(1, IDS, [0], None, pair[0].fileno(), np.zeros(9, np.uint8), None) == 0


def test_a_reader_who_does_not_read_holds_the_blocks_for_some_milliseconds_only(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    store = random_store(num_blocks=512)
    room, ids = np.zeros(4 * BLOCK_BYTES, np.uint8), list(range(512))
    began = time.monotonic()
    gone = store.pour_cells(0, ids, [0, 1, 2, 3], None, pair[0].fileno(), room, None)
    assert time.monotonic() - began < 0.3
    assert 0 < gone < 512 * BLOCK_BYTES
    want = store.gather_cells(0, ids, [0, 1, 2, 3]).reshape(-1)[:gone]
    got = bytearray()
    while len(got) < gone:
        got += pair[1].recv(1 << 16)
    assert got == want.tobytes()


def test_a_block_that_has_changed_is_noticed_once_all_has_left(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    store = random_store()
    assert store.recheck(IDS) == []
    store.layer(1)[21, 0, 2, 1, 1] += 1.0
    with pytest.raises(BlockRotten, match=r"\[21\]"):
        poured(store, pair, IDS, [0, 1, 2, 3], None, BLOCK_BYTES)


def test_a_socket_that_the_other_end_closed_is_an_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        random_store().pour_cells(
            0, IDS, [0], None, pair[0].fileno(), np.zeros(1 << 16, np.uint8), None
        )
