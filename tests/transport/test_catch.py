"""Cells that land while they are read off a TCP link: what is promised of staged ones holds."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcache.cell_pourer import CellPourer
from kvcache.kv_store import KvStore
from tests.transport.broken import failures
from tests.transport.harness import Cluster, cluster, network, soon
from transport.chunk_check import seal_of
from transport.orders import Receipt, ShipmentKey, ShipmentReport

SOURCE, TARGET, NUM_TOKENS = [9, 3, 17, 4, 0, 21], [2, 5, 11, 1, 8, 20], 23


@pytest.fixture
def never_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks; cells that are asked for again are."""
    scatter = KvStore.scatter_cells

    def few(store: KvStore, layer: int, ids: Any, heads: Any, *rest: Any) -> Any:
        assert len(ids) * len(heads) == 1, "more than one cell at once"
        return scatter(store, layer, ids, heads, *rest)

    monkeypatch.setattr(KvStore, "scatter_cells", few)


def poured_through(
    monkeypatch: pytest.MonkeyPatch, send: Callable[[int, bytearray, int], int]
) -> None:
    """`send` gets the socket, what a pool would pour through it, and the bytes of a cell."""
    pour: Any = CellPourer.pour

    def instead(pourer: CellPourer, fd: int, head: bytes, room: Any, seal: int | None) -> int:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            gone = pour(pourer, ours.fileno(), head, room, seal)
            raw = bytearray(theirs.recv(gone, socket.MSG_WAITALL))
        send_all(fd, head)
        pieces = raw[len(head) : len(head) + pourer.num_bytes]
        cells_bytes = pourer.num_bytes - pourer.digests.nbytes
        sent = send(fd, pieces, cells_bytes // len(pourer.digests))
        if sent == len(pieces):
            sent += send_all(fd, raw[len(head) + sent :])
        return len(head) + sent

    monkeypatch.setattr(CellPourer, "pour", instead)


def send_all(fd: int, raw: bytes | bytearray) -> int:
    with socket.socket(fileno=socket.dup(fd)) as sock:
        sock.sendall(raw)
    return len(raw)


async def carried(group: Cluster) -> None:
    await group.carry(NUM_TOKENS, SOURCE, TARGET)
    group.check_blocks(NUM_TOKENS, SOURCE, TARGET)


@pytest.mark.usefixtures("never_staged")
@pytest.mark.parametrize("tps", [(1, 1), (3, 1), (1, 3)], ids=str)
async def test_cells_land_without_being_staged(tps: tuple[int, int]) -> None:
    async with network("tcp") as net, cluster(net, *tps) as group:
        for _ in range(3):
            await carried(group)
        assert all(store.recheck(TARGET) == [] for store in group.decode.stores)


@pytest.mark.usefixtures("never_staged")
async def test_damage_on_the_way_is_asked_for_again_by_the_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoilt = iter([True, False, True])

    def flip(fd: int, raw: bytearray, cell_bytes: int) -> int:
        if next(spoilt, False):
            raw[-1] ^= 4
        return send_all(fd, raw)

    poured_through(monkeypatch, flip)
    async with network("tcp") as net, cluster(net) as group:
        await carried(group)
        counts = group.decode.receivers[0].counts
        assert (counts.damaged_cells, counts.repaired_cells) == (2, 2)


async def test_a_seal_that_does_not_fit_the_digests_makes_nothing_of_its_chunk_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cells fit their digests all the same: they may be of another place."""
    wrong = iter([True])

    def wrong_once(place: bytes, digests: Any) -> int:
        return seal_of(place, digests) ^ next(wrong, False)

    monkeypatch.setattr("transport.departure.seal_of", wrong_once)
    async with network("tcp") as net, cluster(net) as group:
        await carried(group)
        counts = group.decode.receivers[0].counts
        assert counts.damaged_chunks == 1
        assert counts.damaged_cells == counts.repaired_cells > 1


class Stall:
    """A prefill end that sends half of a payload, and the rest when it may."""

    def __init__(self) -> None:
        self.at_half, self.may = threading.Event(), threading.Event()

    def send(self, fd: int, raw: bytearray, cell_bytes: int) -> int:
        if self.may.is_set():
            return send_all(fd, raw)
        send_all(fd, raw[: len(raw) // 2])
        self.at_half.set()
        assert self.may.wait(20)
        send_all(fd, raw[len(raw) // 2 :])
        return len(raw)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    made = Stall()
    poured_through(monkeypatch, made.send)
    yield made
    made.may.set()


@pytest.mark.usefixtures("never_staged")
async def test_an_abort_waits_for_the_writer_and_not_for_what_is_still_to_come(
    stall: Stall,
) -> None:
    async with network("tcp") as net, cluster(net) as group:
        (receiver,), key = group.decode.receivers, group.key()
        expected, shipped = await half_shipped(group, stall, key)
        await soon(lambda: receiver.open_transfers == 1)
        await receiver.abort(key, "the client left")  # the stall lasts until this has returned
        before = group.snapshot()
        stall.may.set()
        await failures(*expected, *shipped)
        await carried_elsewhere(group)
        for old, new in zip(before, group.snapshot(), strict=True):
            assert (old[TARGET] == new[TARGET]).all()  # not a byte since the abort returned
        await carried(group)
        assert receiver.counts.links_lost == 0


@pytest.mark.usefixtures("never_staged")
async def test_a_chunk_that_was_decided_ahead_is_given_up_with_its_transfer(stall: Stall) -> None:
    """The one before it is still under way: nobody waits for either, and neither is written."""
    async with network("tcp") as net, cluster(net) as group:
        (receiver,), key = group.decode.receivers, group.key()
        expected, shipped = await half_shipped(group, stall, key)
        (landing,) = receiver._arrivals.live.values()
        await soon(lambda: len(landing.jobs) == 2)
        before = group.snapshot()
        await receiver.abort(key, "the client left")  # the stall lasts until this has returned
        assert not landing.jobs
        stall.may.set()
        await failures(*expected, *shipped)
        await carried_elsewhere(group)
        for old, new in zip(before, group.snapshot(), strict=True):
            assert (old[TARGET] == new[TARGET]).all()
        assert receiver.counts.links_lost == 0


async def half_shipped(
    group: Cluster, stall: Stall, key: ShipmentKey
) -> tuple["list[asyncio.Task[Receipt]]", "list[asyncio.Task[ShipmentReport]]"]:
    """Both legs of a transfer whose first payload has come by half."""
    expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
    group.seal_all(key, NUM_TOKENS, SOURCE)
    await asyncio.to_thread(stall.at_half.wait, 10)
    return expected, shipped


async def carried_elsewhere(group: Cluster) -> None:
    """Over the same link: what was under way has come to its end."""
    other = [block for block in range(24) if block not in TARGET][: len(TARGET)]
    await group.carry(NUM_TOKENS, SOURCE, other)


@pytest.mark.usefixtures("never_staged")
async def test_a_link_that_ends_within_a_payload_ends_its_transfer_and_frees_the_blocks(
    stall: Stall,
) -> None:
    async with network("tcp") as net, cluster(net) as group:
        (receiver,), key = group.decode.receivers, group.key()
        expected, shipped = await half_shipped(group, stall, key)
        (port,) = receiver._ports
        await port.link.close("the network is gone")
        ends = await failures(*expected)
        assert {end.code for end in ends} == {"UNAVAILABLE"}
        await receiver.abort(key, "over")
        assert receiver.open_transfers == 0
        stall.may.set()
        await failures(*shipped)
        await carried(group)


@pytest.mark.usefixtures("never_staged")
async def test_a_chunk_of_a_transfer_that_has_ended_is_read_past_and_not_written(
    stall: Stall,
) -> None:
    """It is known for what it is before a byte of its payload is read."""
    async with network("tcp") as net, cluster(net) as group:
        (receiver,), key = group.decode.receivers, group.key()
        before = group.snapshot()
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        await soon(lambda: bool(receiver._ports))
        await receiver.abort(key, "the client left")
        group.seal_all(key, NUM_TOKENS, SOURCE)
        stall.may.set()
        await failures(*expected, *shipped)
        assert all((old == new).all() for old, new in zip(before, group.snapshot(), strict=True))
        await carried(group)
