"""Cells that land while they come out of a socket: what `scatter_cells` would write, in turns."""

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvcache.cell_catcher import CellCatcher
from kvcache.kv_store import KvStore
from kvcache.layout import KvLayout
from kvcache.pool_cells import PoolCells
from tests.kvcache.test_pour_cells import IDS, pieces_of, random_store

TARGET = [2, 9, 4, 1, 17, 20]
HEADS = [1, 2]
SEAL = 77


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def gathered(store: KvStore | PoolCells, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    digests = np.zeros(len(ids) * len(HEADS) * 2, np.uint64)
    return store.gather_cells(1, ids, HEADS, digests=digests), digests


def catcher_of(
    store: KvStore | PoolCells,
    ids: list[int],
    count: int,
    digests: np.ndarray | None = None,
    layers: range = range(1, 2),
) -> CellCatcher:
    made = store.catcher(layers, ids, HEADS, count, digests)
    assert made is not None
    return made


def caught(pair: tuple[socket.socket, socket.socket], catcher: CellCatcher, raw: bytes) -> int:
    """How many turns it took."""
    ours, theirs = pair
    sender = threading.Thread(target=ours.sendall, args=[raw])
    sender.start()
    room, turns = np.zeros(catcher.room_bytes, np.uint8), 1
    while not catcher.turn(theirs.fileno(), room):
        turns += 1
    sender.join()
    return turns


def with_seal(raw: bytes) -> bytes:
    return raw + SEAL.to_bytes(8, "little")


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("count", [1, 4, 100])
@pytest.mark.parametrize("led", [True, False], ids=["digests come", "digests are here"])
def test_what_is_caught_is_what_would_be_scattered_and_bad_cells_are_not_written(
    layout: KvLayout, count: int, led: bool, pair: tuple[socket.socket, socket.socket]
) -> None:
    cells, digests = gathered(random_store(), IDS)
    spoilt = [0, 3, 13, len(digests) - 1]
    cells[spoilt, 5] ^= 1
    one, other = (random_store(layout) for _ in range(2))
    other.layer(1).copy_(one.layer(1))
    catcher = catcher_of(one, TARGET, count, None if led else digests)
    raw = with_seal(pieces_of(cells, digests, len(IDS), count)) if led else cells.tobytes()
    assert catcher.num_bytes == len(raw)
    caught(pair, catcher, raw)
    assert other.scatter_cells(1, TARGET, HEADS, cells, digests).tolist() == spoilt
    assert catcher.bad_rows().tolist() == spoilt
    assert (catcher.digests == digests).all()
    assert catcher.seal == (SEAL if led else 0)
    assert (one.layer(1) == other.layer(1)).all()


@pytest.mark.parametrize("led", [True, False], ids=["digests come", "digests are here"])
@pytest.mark.parametrize("count", [1, 4, 100])
def test_several_layers_are_caught_one_after_the_other_and_kept_each(
    count: int, led: bool, pair: tuple[socket.socket, socket.socket]
) -> None:
    source, store = random_store(), random_store()
    raw, all_digests = b"", []
    for layer in range(3):
        digests = np.zeros(len(IDS) * len(HEADS) * 2, np.uint64)
        cells = source.gather_cells(layer, IDS, HEADS, digests=digests)
        if layer == 2:
            cells[7, 3] ^= 1
        raw += pieces_of(cells, digests, len(IDS), count) if led else cells.tobytes()
        all_digests.append(digests)
    proofs = np.concatenate(all_digests)
    before = store.layer(2)[TARGET].clone()
    catcher = catcher_of(store, TARGET, count, None if led else proofs, range(3))
    raw = with_seal(raw) if led else raw
    assert catcher.num_bytes == len(raw)
    caught(pair, catcher, raw)
    catcher.keep()
    assert catcher.bad_rows().tolist() == [2 * len(all_digests[0]) + 7]
    assert (catcher.digests == proofs).all()
    for layer in range(3):
        whole = [i for i in range(len(IDS)) if layer < 2 or i != 7 // (len(HEADS) * 2)]
        ids, target = [IDS[i] for i in whole], [TARGET[i] for i in whole]
        here = store.gather_cells(layer, target, HEADS)
        assert (here == source.gather_cells(layer, ids, HEADS)).all()
        assert store.known_digests(layer, target, HEADS) is not None
        assert (store.known_digests(layer, TARGET, HEADS) is None) == (layer == 2)
    head, plane = divmod(7 % (len(HEADS) * 2), 2)
    block = 7 // (len(HEADS) * 2)
    assert (
        store.layer(2)[TARGET[block], plane, HEADS[head]] == before[block, plane, HEADS[head]]
    ).all()


def test_parts_of_blocks_are_caught_alike(pair: tuple[socket.socket, socket.socket]) -> None:
    ids, target = [29, 30, 31, 12, 13], [5, 77, 6, 50, 3]
    cells, digests = gathered(random_store().cut(4), ids)
    store = random_store()
    catcher = catcher_of(store.cut(4), target, 2)
    caught(pair, catcher, with_seal(pieces_of(cells, digests, len(ids), 2)))
    catcher.keep()
    assert not len(catcher.bad_rows())
    assert (store.cut(4).gather_cells(1, target, HEADS) == cells).all()
    assert store.recheck([7]) == []  # one of parts alone was not accused of what came


def test_who_sends_slowly_holds_nobody_for_longer_than_a_turn(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Nothing of a piece is written before it has come whole; it goes on where it was."""
    cells, digests = gathered(random_store(), IDS)
    raw = with_seal(pieces_of(cells, digests, len(IDS), 2))
    store = random_store()
    before = store.layer(1).clone()
    catcher = catcher_of(store, TARGET, 2)
    room, (ours, theirs) = np.zeros(catcher.room_bytes, np.uint8), pair
    assert not catcher.turn(theirs.fileno(), room)
    assert catcher.num_taken == 0
    ours.sendall(raw[:1000])
    assert not catcher.turn(theirs.fileno(), room)
    assert catcher.num_taken == 1000
    assert (store.layer(1) == before).all()
    ours.sendall(raw[1000 : len(raw) - 3])
    assert not catcher.turn(theirs.fileno(), room)
    ours.sendall(raw[-3:])
    assert catcher.turn(theirs.fileno(), room)
    assert (store.gather_cells(1, TARGET, HEADS) == cells).all()


def test_what_was_caught_is_kept_and_a_later_change_is_found(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    cells, digests = gathered(random_store(), IDS)
    cells[0, 0] ^= 1
    store = random_store()
    heads = list(store.kv_heads)
    store.gather_cells(1, TARGET, heads, digests=np.zeros(len(TARGET) * 8, np.uint64))
    catcher = catcher_of(store, TARGET, 4)
    caught(pair, catcher, with_seal(pieces_of(cells, digests, len(IDS), 4)))
    catcher.keep()
    assert store.recheck(TARGET) == []
    store.layer(1)[TARGET[2], 0, HEADS[0], 0, 0] += 1
    assert store.recheck(TARGET) == [TARGET[2]]


def test_an_end_in_the_middle_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    catcher, (ours, theirs) = catcher_of(random_store(), TARGET, 4), pair
    ours.sendall(bytes(100))
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(BrokenPipeError):
        catcher.turn(theirs.fileno(), np.zeros(catcher.room_bytes, np.uint8))


def test_heads_that_are_not_one_run_are_not_caught() -> None:
    store = random_store()
    assert store.catcher(range(1, 2), TARGET, [0, 2], 4) is None
    assert store.catcher(range(1, 2), TARGET, HEADS, 4, np.zeros(3, np.uint64)) is None


def test_over_tcp_what_comes_in_little_is_taken_and_the_socket_is_left_as_it_was() -> None:
    """While a turn waits it is woken for a good part of a piece: nobody after it shall be."""
    cells, digests = gathered(random_store(), IDS)
    raw = with_seal(pieces_of(cells, digests, len(IDS), 100))
    store = random_store()
    catcher = catcher_of(store, TARGET, 100)
    room = np.zeros(catcher.room_bytes, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        for begin in range(0, len(raw), 9000):
            ours.sendall(raw[begin : begin + 9000])
            whole = catcher.turn(theirs.fileno(), room)
            assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        while not whole:
            whole = catcher.turn(theirs.fileno(), room)
    assert catcher.num_taken == len(raw)
    assert (store.gather_cells(1, TARGET, HEADS) == cells).all()
