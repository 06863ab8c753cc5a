"""Payloads that leave a TCP link while they are built: whole or not at all, and nobody waits."""

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.clock import MonotonicClock
from kernels.crew import Steps
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import Chunk, Frame
from tests.transport.harness import cluster, network, soon
from transport.config import TransportConfig
from transport.frame_socket import HOLD_S, FrameSocket
from transport.link import Inlet, LinkClosed, NeverComes, Outlet, Payload, Pour, Pouring
from transport.messages import AHEAD, HEADER, TOLD
from transport.orders import Code
from transport.pieces import GIVEN_UP, staged

PAYLOAD = np.random.default_rng(3).integers(0, 256, 3_000_000, dtype=np.uint8)
DIGESTS = np.arange(20, dtype=np.uint64)
NUM_BLOCKS, PIECE_BLOCKS = 10, 4
NEVER = -1  # in place of a seal: it was told ahead, and did not come


def frame_of(seq: int, num_bytes: int = 0) -> Frame:
    """Of a chunk of so many bytes of cells, and all DIGESTS."""
    return Frame(
        chunk=Chunk(
            seq=seq, num_blocks=NUM_BLOCKS, piece_blocks=PIECE_BLOCKS, payload_bytes=num_bytes
        )
    )


def pouring(seq: int, num_bytes: int, pour: Pour) -> Pouring:
    return Pouring(frame_of(seq, num_bytes), num_bytes, len(DIGESTS), pour)


def in_pieces(num_bytes: int) -> bytes:
    """As they go over the wire."""
    cells = np.array_split(PAYLOAD[:num_bytes], NUM_BLOCKS)
    digests = np.array_split(DIGESTS, NUM_BLOCKS)
    parts = list[np.ndarray]()
    for first in range(0, NUM_BLOCKS, PIECE_BLOCKS):
        parts += [*digests[first : first + PIECE_BLOCKS], *cells[first : first + PIECE_BLOCKS]]
    return b"".join(part.tobytes() for part in parts)


def all_of_it(outlet: Outlet, seq: int, num_gone: int) -> int:
    """What a pool does: so much leaves while it is built, the rest at once. Returns the seal."""
    fd, head, piece = outlet.begin()
    assert piece.nbytes >= PIECE_BLOCKS * (outlet.num_bytes + DIGESTS.nbytes) // NUM_BLOCKS
    seal = (100 + seq).to_bytes(8, "little")
    gone = (head + in_pieces(outlet.num_bytes) + seal)[:num_gone]
    if gone:
        with socket.socket(fileno=socket.dup(fd)) as sock:
            sock.sendall(gone)
        outlet.gone(len(gone))
    if (rest := outlet.rest(DIGESTS)) is not None:
        rest[:] = PAYLOAD[: rest.nbytes]
    return 100 + seq


class Ends:
    """Two ends of a socket; `came` is what the second one took: seq, seal, payload."""

    def __init__(self) -> None:
        first, second = socket.socketpair()
        self.ours, self.theirs = FrameSocket(first), FrameSocket(second, unread=True)
        self.came: list[tuple[int, int, bytes | None]] = []
        self.ended = ""
        self.skipped: set[int] = set()
        self.held: set[int] = set()  # whose inlets are left to the test
        self.inlets: dict[int, Inlet] = {}
        self.told: list[int] = []
        self.poured: asyncio.Future[list[BaseException | None]] | None = None
        self._told: asyncio.Queue[tuple[Frame, Payload]] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())
        self.theirs.start(self._take, self._end)

    def _take(self, raw: bytes, num_bytes: int, place: int, payload: Payload) -> None:
        frame = Frame.FromString(raw)
        self.told.append(frame.chunk.seq)
        self._told.put_nowait((frame, payload))

    async def _read(self) -> None:
        while True:
            frame, payload = await self._told.get()
            seq = frame.chunk.seq
            if payload is None or isinstance(payload, memoryview):
                self.came.append((seq, 0, None))
            elif seq in self.skipped:
                payload.skip()
            elif seq in self.held:
                self.inlets[seq] = payload
            else:
                try:
                    frame, cells = await staged(frame, payload)
                except NeverComes:
                    self.came.append((seq, NEVER, None))
                    continue
                given_up = frame.chunk.check == GIVEN_UP
                assert given_up or frame.chunk.digests == DIGESTS.tobytes()
                self.came.append((seq, frame.chunk.check, bytes(cells)))

    def _end(self, reason: str) -> None:
        self.ended = reason

    def close(self) -> None:
        self._reading.cancel()
        self.ours.close()
        self.theirs.close()


@pytest.mark.parametrize("num_gone", [0, 1, 30, 100_000, 500_000, 500_200, 500_235, 1_000_000])
async def test_what_is_poured_comes_behind_its_frame_and_in_order(num_gone: int) -> None:
    ends, size = Ends(), 500_000
    await ends.ours.pour(pouring(1, size, partial(all_of_it, seq=1, num_gone=num_gone)))
    sent = ends.ours.send(frame_of(2).SerializeToString())
    if sent is not None:
        await sent
    await ends.ours.pour(pouring(3, size, partial(all_of_it, seq=3, num_gone=num_gone)))
    await soon(lambda: len(ends.came) == 3)
    want = PAYLOAD[:size].tobytes()
    assert ends.came == [(1, 101, want), (2, 0, None), (3, 103, want)]
    ends.close()


@pytest.mark.parametrize("how", ["raised", "answered None", "never began"])
async def test_a_payload_that_is_given_up_half_way_says_so_and_the_next_is_whole(how: str) -> None:
    ends, size = Ends(), 2_000_000

    def given_up(outlet: Outlet) -> int | None:
        if how != "never began":
            outlet.gone(0)
            fd, head, _ = outlet.begin()
            with socket.socket(fileno=socket.dup(fd)) as sock:
                sock.sendall(head + bytes(300_000))
            outlet.gone(len(head) + 300_000)
        if how == "raised":
            raise ValueError("rotten")
        return None

    (end,) = await asyncio.gather(
        ends.ours.pour(pouring(1, size, given_up)), return_exceptions=True
    )
    assert isinstance(end, ValueError) == (how == "raised")
    await ends.ours.pour(pouring(2, size, partial(all_of_it, seq=2, num_gone=0)))
    began = how != "never began"
    await soon(lambda: len(ends.came) == 1 + began)
    assert [(seq, seal) for seq, seal, _ in ends.came[:-1]] == [(1, GIVEN_UP)] * began
    assert ends.came[-1] == (2, 102, PAYLOAD[:size].tobytes())
    ends.close()


async def test_nothing_follows_a_payload_of_which_nobody_knows_how_much_has_left() -> None:
    """The system refused it half way, and will not say where."""
    ends, size = Ends(), 500_000

    def refused(outlet: Outlet) -> int:
        fd, head, _ = outlet.begin()
        with socket.socket(fileno=socket.dup(fd)) as sock:
            sock.sendall(head + in_pieces(outlet.num_bytes)[:100_000])
        raise OSError(errno.ENOMEM, "no memory")

    following = partial(all_of_it, seq=2, num_gone=0)
    works = [pouring(1, size, refused), pouring(2, size, following)]
    poured = [ends.ours.pour(each) for each in works]
    found = await asyncio.gather(*poured, return_exceptions=True)
    assert all(isinstance(end, LinkClosed) for end in found)
    await soon(lambda: bool(ends.ended))
    assert "closed the socket" in ends.ended and ends.came == []
    ends.close()


class Gate:
    """Pours some bytes, and the rest when it may."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def pour(self, outlet: Outlet) -> int:
        fd, head, _ = outlet.begin()
        raw = head + in_pieces(outlet.num_bytes)
        with socket.socket(fileno=socket.dup(fd)) as sock:
            sock.sendall(raw[:1000])
            assert self.may.wait(10)
            sock.sendall(raw[1000:])
        outlet.pieces_gone()
        return 101


async def begun(ends: Ends, *others: Pouring) -> Gate:
    """The others wait behind a payload that has not come whole."""
    gate, first = Gate(), threading.Event()

    def pour(outlet: Outlet) -> int:
        assert first.wait(10)
        return gate.pour(outlet)

    poured = [ends.ours.pour(pouring(1, 500_000, pour)), *map(ends.ours.pour, others)]
    first.set()
    ends.poured = asyncio.gather(*poured, return_exceptions=True)
    return gate


async def test_the_next_payload_is_told_while_one_is_under_way() -> None:
    ends, size = Ends(), 500_000
    ours = [pouring(seq, size, partial(all_of_it, seq=seq, num_gone=0)) for seq in (2, 3)]
    gate = await begun(ends, *ours)
    await soon(lambda: ends.told == [1, 2])  # and not 3: what is told must come
    assert ends.came == []
    gate.may.set()
    await soon(lambda: len(ends.came) == 3)
    want = PAYLOAD[:size].tobytes()
    assert ends.came == [(1, 101, want), (2, 102, want), (3, 103, want)]
    ends.close()


async def test_a_payload_that_was_told_and_is_not_wanted_any_more_takes_no_time() -> None:
    """Not a byte of it is sent, and the next one is whole."""
    ends, size = Ends(), 500_000
    third = partial(all_of_it, seq=3, num_gone=0)
    gate = await begun(ends, pouring(2, 60_000_000, lambda _: None), pouring(3, size, third))
    await soon(lambda: ends.told == [1, 2])
    gate.may.set()
    await soon(lambda: len(ends.came) == 3)
    want = PAYLOAD[:size].tobytes()
    assert ends.came == [(1, 101, want), (2, NEVER, None), (3, 103, want)]
    ends.close()


async def test_what_was_to_be_done_with_a_payload_is_not_once_it_is_withdrawn() -> None:
    """Unless it has begun; either way the payload is read past, and the next one is whole."""
    ends, size, done = Ends(), 500_000, list[str]()
    ends.held = {1, 2}
    third = partial(all_of_it, seq=3, num_gone=0)
    second = partial(all_of_it, seq=2, num_gone=0)
    gate = await begun(ends, pouring(2, size, second), pouring(3, size, third))
    await soon(lambda: set(ends.inlets) == {1, 2})
    works = {seq: ends.inlets[seq].take(partial(done.append, f"read {seq}")) for seq in (1, 2)}
    await works[1]
    for inlet in ends.inlets.values():
        inlet.withdraw("the client left")
    with pytest.raises(LinkClosed, match="the client left"):
        await works[2]
    gate.may.set()
    await soon(lambda: len(ends.came) == 1)
    assert (done, ends.came) == (["read 1"], [(3, 103, PAYLOAD[:size].tobytes())])
    ends.close()


@pytest.mark.parametrize(
    ("unread", "messages", "reason"),
    [
        (True, [(TOLD, 100)], "100 bytes came where 0 were told ahead"),
        (True, [(AHEAD, 100), (TOLD, 99)], "99 bytes came where 100 were told ahead"),
        (True, [(AHEAD, 0)], "0 bytes was told ahead"),
        (True, [(AHEAD, 100)] * 5, "after 4 others"),
        (False, [(AHEAD, 100)], "told ahead"),
    ],
    ids=str,
)
async def test_what_makes_no_sense_of_payloads_told_ahead_ends_the_link(
    unread: bool, messages: list[tuple[int, int]], reason: str
) -> None:
    ours, theirs = socket.socketpair()
    stream, ends = FrameSocket(theirs, unread), list[str]()
    stream.start(lambda *_: None, ends.append)
    for place, num_bytes in messages:
        raw = b"" if place == TOLD else frame_of(1).SerializeToString()
        ours.sendall(HEADER.pack(len(raw), num_bytes, place) + raw)
    await soon(lambda: bool(ends))
    assert reason in ends[0]
    stream.close()
    ours.close()


async def test_what_comes_of_a_payload_is_counted_before_it_has_come_whole() -> None:
    ends, size, before = Ends(), 3_000_000, 2_500_000
    gate = threading.Event()

    def pour(outlet: Outlet) -> int:
        all_of_it(outlet, 1, before)
        assert gate.wait(10)
        return 101

    poured = ends.ours.pour(pouring(1, size, pour))
    await soon(lambda: 1 << 20 < ends.theirs.num_bytes_read <= before)
    gate.set()
    await poured
    await soon(lambda: len(ends.came) == 1)
    assert ends.theirs.num_bytes_read == len(in_pieces(size)) + 8
    ends.close()


async def test_how_much_a_wire_takes_in_a_moment_is_learnt_from_what_has_left() -> None:
    """Step by step: what the system's buffers took at once says little."""
    ends = Ends()

    async def pour(size: int, wait_s: float = 0) -> int:
        def slowly(outlet: Outlet) -> int:
            time.sleep(wait_s)
            return all_of_it(outlet, 1, 0)

        await ends.ours.pour(pouring(1, size, slowly))
        return ends.ours.reach

    assert ends.ours.reach == 0
    assert await pour(50_000) == 0, "too short to tell"
    slow = await pour(1_000_000, wait_s=0.1)
    assert 0 < slow <= 1_000_000 * HOLD_S / 0.1
    async with asyncio.timeout(30):  # until two have left without a pause of this machine
        while await pour(100_000) < 200_000 or await pour(500_000) < 1_000_000:
            pass
    assert ends.ours.reach == 1_000_000
    assert await pour(500_000, wait_s=1) <= 500_000 * HOLD_S
    ends.close()


async def test_what_has_not_left_tells_nothing_of_how_much_a_wire_takes() -> None:
    """Chunks of a transfer that was given up cost no time: that is not the wire's pace."""
    ends = Ends()
    for _ in range(3):
        await ends.ours.pour(pouring(1, 1_000_000, lambda _: None))
        assert ends.ours.reach == 0
    ends.close()


async def test_what_nobody_wants_is_read_past_and_the_next_comes_whole() -> None:
    ends, size = Ends(), 1_000_000
    ends.skipped = {1, 2}
    for seq in (1, 2, 3):
        await ends.ours.pour(pouring(seq, size, partial(all_of_it, seq=seq, num_gone=0)))
    await soon(lambda: len(ends.came) == 1)
    assert ends.came == [(3, 103, PAYLOAD[:size].tobytes())]
    ends.close()


async def test_a_block_that_has_rotted_ends_its_transfer_and_leaves_the_link_whole() -> None:
    """Its digests are known: decode notices, and prefill when it is asked for the cell again."""
    async with network("tcp") as net, cluster(net) as group:
        (shipper,), (store,) = group.prefill.shippers, group.prefill.stores
        assert store.recheck(range(5)) == []
        store.layer(0)[2, 0, 0, 0, 0] += 1
        key = group.key()
        expected, shipped = group.expect(key, 20, range(5)), group.ship(key, 20)
        group.seal_all(key, 20, range(5))
        ends = await asyncio.gather(*expected, *shipped, return_exceptions=True)
        assert {getattr(end, "code", None) for end in ends} == {Code.DATA_LOSS}
        assert all("blocks [2] have changed in layer 0" in str(end) for end in ends)
        assert group.decode.receivers[0].counts.damaged_cells == 1
        await group.decode.receivers[0].abort(key, "over")
        await group.carry(20, range(5, 10), range(5))
        group.check_blocks(20, range(5, 10), range(5))
        assert shipper.counts.links_lost == group.decode.receivers[0].counts.links_lost == 0


class Stuck(KvStore):
    """Takes cells in only once it may."""

    may = threading.Event()

    @classmethod
    def of(cls, store: KvStore) -> "Stuck":
        made = cls(store.spec, store.kv_heads, store.num_blocks)
        made.may = threading.Event()
        return made

    def catcher(self, *what: object) -> None:
        """Nothing: all is staged."""

    def scattering(
        self, layer: int, block_ids: Sequence[int], heads: Sequence[int], *rest: Any
    ) -> Steps[NDArray[np.intp]]:
        yield [partial(self.may.wait, 10)]
        return (yield from super().scattering(layer, block_ids, heads, *rest))


async def test_an_abort_waits_for_no_reader_however_full_the_socket_is() -> None:
    """Decode takes in nothing of 32 MiB: prefill's blocks are free at once all the same."""
    spec = CacheSpec.full(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
    config = TransportConfig(1 << 20, window_bytes=64 << 20, max_staged_chunks=1)
    stuck: list[Stuck] = []

    def sink(store: KvStore) -> KvStore:
        stuck.append(Stuck.of(store))
        return stuck[-1]

    async with (
        network("tcp") as net,
        cluster(
            net,
            spec=spec,
            num_query_heads=2,
            num_blocks=512,
            config=config,
            clock=MonotonicClock(),
            sink=sink,
        ) as group,
    ):
        key, blocks = group.key(), list(range(512))
        expected, shipped = group.expect(key, 8192, blocks), group.ship(key, 8192)
        group.seal_all(key, 8192, blocks)
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        counts, seen = shipper.counts, -1
        while seen != counts.chunks or not seen:  # until nothing moves any more
            seen = counts.chunks
            await asyncio.sleep(0.2)
        assert 0 < seen < 30
        began = time.monotonic()
        await shipper.abort(key, "the client has left")
        assert time.monotonic() - began < 0.5
        assert shipper.open_shipments == 0
        stuck[0].may.set()
        await asyncio.gather(*expected, *shipped, return_exceptions=True)
        await receiver.abort(key, "over")
        await soon(lambda: receiver.open_transfers == 0)

        # The link is as good as before: what was under way is let through, and comes to nothing.
        await group.carry(8192, blocks, blocks)
        assert counts.links_lost == 0
