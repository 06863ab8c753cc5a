"""Cells that leave through a socket while they are gathered: the same bytes, and no waiting."""

import contextlib
import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from kvcache.cell_places import CellPlaces
from kvcache.head_map import HeadInterval
from kvcache.kept_digests import BlockRotten
from kvcache.kv_store import KvStore
from kvcache.layout import KvLayout
from kvcache.pool_cells import PoolCells
from kvcache.spec import CacheSpec

SPEC = CacheSpec.full(num_layers=3, num_kv_heads=4, head_dim=32, block_size=16, dtype="float32")
PIECE_BYTES = 4 * 2 * (8 + 16 * 32 * 4)  # of one block of one layer, all heads, with its digests
IDS = [7, 3, 21, 0, 12, 13]
HEAD, SEAL = b"what comes before", 0x0102_0304_0506_0708


def random_store(layout: KvLayout = KvLayout.HEAD_MAJOR, num_blocks: int = 24) -> KvStore:
    store = KvStore(SPEC, HeadInterval(0, 4), num_blocks, layout=layout)
    for layer in range(SPEC.num_layers):
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
    piece_blocks: int,
    layers: range = range(1, 2),
) -> tuple[bytes, np.ndarray]:
    """What came out at the other end, and the digests, made on the way or known before."""
    ours, theirs = pair
    got = bytearray()

    def read() -> None:
        while part := theirs.recv(1 << 16):
            got.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    pourer = store.pourer(layers, ids, heads, tail, piece_blocks)
    assert pourer is not None
    room = np.zeros(pourer.room_bytes, np.uint8)
    try:
        gone = pourer.pour(ours.fileno(), HEAD, room, SEAL if pourer.known else None)
    finally:
        ours.shutdown(socket.SHUT_WR)
        reader.join()
    seal = SEAL.to_bytes(8, "little") if pourer.known else b""
    assert gone == len(got) == len(HEAD) + pourer.num_bytes + len(seal)
    assert got.startswith(HEAD) and got.endswith(seal)
    return bytes(got[len(HEAD) : len(got) - len(seal)]), pourer.digests


def ready(sock: socket.socket) -> bytes:
    """What is there to be read; nothing when that is all."""
    with contextlib.suppress(BlockingIOError):
        return sock.recv(1 << 16, socket.MSG_DONTWAIT)
    return b""


def pieces_of(cells: np.ndarray, digests: np.ndarray, num_blocks: int, piece_blocks: int) -> bytes:
    """As they go over the wire: the digests of some blocks, then their cells."""
    cells_B, digests_B = cells.reshape(num_blocks, -1), digests.reshape(num_blocks, -1)
    firsts = range(0, num_blocks, piece_blocks)
    pairs = (
        (each[first : first + piece_blocks] for each in (digests_B, cells_B)) for first in firsts
    )
    return b"".join(part.tobytes() for pair in pairs for part in pair)


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("heads", [[0, 1, 2, 3], [1, 2], [3]], ids=str)
@pytest.mark.parametrize("tail", [None, 1, 15])
@pytest.mark.parametrize("piece_blocks", [1, 4, 100])
@pytest.mark.parametrize("layers", [range(1, 2), range(3)], ids=["a layer", "three"])
@pytest.mark.parametrize("known", [False, True], ids=["fresh", "known"])
def test_what_is_poured_is_what_is_gathered(
    known: bool,
    layers: range,
    layout: KvLayout,
    heads: list[int],
    tail: int | None,
    piece_blocks: int,
    pair: tuple[socket.socket, socket.socket],
) -> None:
    store = random_store(layout)
    want_digests, want = np.zeros((len(layers), len(IDS) * len(heads) * 2), np.uint64), b""
    for layer, own in zip(layers, want_digests, strict=True):
        cells = store.gather_cells(layer, IDS, heads, tail, digests=own)
        want += pieces_of(cells, own, len(IDS), piece_blocks)
    if not known:
        store.kept.forget_all()
    assert (store.known_digests(1, IDS, heads, tail) is not None) == known
    got, digests = poured(store, pair, IDS, heads, tail, piece_blocks, layers)
    assert got == want
    assert (digests == want_digests.reshape(-1)).all()
    for layer in layers:  # they are kept, made on the way or not
        assert store.known_digests(layer, IDS, heads, tail) is not None


def test_of_several_layers_all_are_looked_at_if_one_is_not_known(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    store = random_store()
    assert store.recheck(IDS) == []
    store.kept.forget_cells(range(2, 3), [IDS[-1]], [3])
    store.layer(1)[21, 0, 2, 1, 1] += 1.0
    with pytest.raises(BlockRotten, match=r"\[21\] have changed in layer 1"):
        poured(store, pair, IDS, [0, 1, 2, 3], None, 2, range(3))


def test_layers_that_are_not_alike_are_not_poured_together() -> None:
    store, other = random_store(), random_store(KvLayout.PLANE_MAJOR)
    layers = {0: store.layer(0), 1: store.layer(1), 2: other.layer(2)}
    places = CellPlaces(SPEC, HeadInterval(0, 4), layers, 24)
    assert places.head_run(range(2), [0, 1]) is not None
    assert places.head_run(range(3), [0, 1]) is None
    assert places.head_run(range(2, 4), [0, 1]) is None


def test_parts_of_blocks_are_poured_alike(pair: tuple[socket.socket, socket.socket]) -> None:
    parts = random_store().cut(4)
    ids = [29, 30, 31, 12, 13]
    want_digests = np.zeros(len(ids) * 8, np.uint64)
    want = parts.gather_cells(1, ids, [0, 1, 2, 3], 3, digests=want_digests)
    got, _ = poured(parts, pair, ids, [0, 1, 2, 3], 3, 2)
    assert got == pieces_of(want, want_digests, len(ids), 2)


def test_heads_that_are_no_run_cannot_be_poured() -> None:
    store = random_store()
    assert store.pourer(range(1, 2), IDS, [0, 2], None, 6) is None
    assert [store.streams(heads) for heads in ([], [0, 2], [1, 2])] == [False, False, True]


def test_a_reader_who_does_not_read_holds_the_blocks_for_some_milliseconds_only(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    store = random_store(num_blocks=512)
    ids = list(range(512))
    pourer = store.pourer(range(1), ids, [0, 1, 2, 3], None, 4)
    assert pourer is not None
    pourer.proved = False
    began = time.monotonic()
    gone = pourer.pour(pair[0].fileno(), HEAD, np.zeros(pourer.room_bytes, np.uint8))
    assert time.monotonic() - began < 0.3
    assert 0 < gone < 512 * PIECE_BYTES
    cells = store.gather_cells(0, ids, [0, 1, 2, 3])
    want = HEAD + pieces_of(cells, np.zeros(512 * 8, np.uint64), 512, 4)
    got = bytearray()
    while part := ready(pair[1]):
        got += part
    assert got == want[:gone]


def test_a_block_that_has_changed_is_noticed_once_all_has_left(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Where they are looked at, as nobody knows the digests of all of them."""
    store = random_store()
    assert store.recheck(IDS) == []
    store.kept.forget([IDS[0]])
    store.layer(1)[21, 0, 2, 1, 1] += 1.0
    with pytest.raises(BlockRotten, match=r"\[21\]"):
        poured(store, pair, IDS, [0, 1, 2, 3], None, 1)


def test_what_is_known_leaves_without_a_look_at_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Whoever reads it finds out: the digests are those of before."""
    store = random_store()
    assert store.recheck(IDS) == []
    before = store.known_digests(1, IDS, [0, 1, 2, 3])
    store.layer(1)[21, 0, 2, 1, 1] += 1.0
    got, digests = poured(store, pair, IDS, [0, 1, 2, 3], None, 1)
    assert (digests == before).all()
    cells = store.gather_cells(1, IDS, [0, 1, 2, 3])
    assert got == pieces_of(cells, digests, len(IDS), 1)


def test_a_reader_who_does_not_read_is_not_waited_for_where_digests_are_known(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    store = random_store(num_blocks=512)
    ids = list(range(512))
    assert store.recheck(ids) == []
    pourer = store.pourer(range(1), ids, [0, 1, 2, 3], None, 4)
    assert pourer is not None and pourer.known
    began = time.monotonic()
    gone = pourer.pour(pair[0].fileno(), HEAD, np.zeros(pourer.room_bytes, np.uint8), SEAL)
    assert time.monotonic() - began < 0.3
    want = HEAD + pieces_of(store.gather_cells(0, ids, [0, 1, 2, 3]), pourer.digests, 512, 4)
    got = bytearray()
    while part := ready(pair[1]):
        got += part
    assert got == want[:gone] and gone < len(want)


def test_more_pieces_of_memory_than_the_system_takes_at_once_leave_all_the_same(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Of each block two, keys and values, in another order than they lie in."""
    spec = CacheSpec.full(num_layers=2, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
    store = KvStore(spec, HeadInterval(0, 1), 700, layout=KvLayout.PLANE_MAJOR)
    store.layer(1).copy_(store.layer(1).new_empty(store.layer(1).shape).normal_())
    ids = [block * 3 % 700 for block in range(700)]
    assert store.recheck(ids) == []
    got, digests = poured(store, pair, ids, [0], 1, 700)
    assert got == pieces_of(store.gather_cells(1, ids, [0], 1), digests, 700, 700)


def test_a_socket_that_the_other_end_closed_is_an_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[1].close()
    pourer = random_store().pourer(range(1), IDS, [0], None, 1)
    assert pourer is not None
    with pytest.raises(BrokenPipeError):
        pourer.pour(pair[0].fileno(), HEAD, np.zeros(pourer.room_bytes, np.uint8))


def test_who_reads_or_writes_by_address_holds_what_lies_there() -> None:
    store = random_store()
    pool = weakref.ref(store.layer(0))
    pourer, catcher = (
        store.pourer(range(1), IDS, [0], None, 1),
        store.catcher(range(1), IDS, [0], 1),
    )
    del store
    gc.collect()
    assert pourer is not None and pool() is not None
    del pourer
    gc.collect()
    assert catcher is not None and pool() is not None
    del catcher
    gc.collect()
    assert pool() is None
