"""Payloads that leave a TCP link while they are built: whole or not at all, and nobody waits."""

import asyncio
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from engine.clock import MonotonicClock
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import Chunk, Frame
from tests.transport.harness import cluster, network, soon
from transport.config import TransportConfig
from transport.frame_socket import HEADER, OF_LAST, FrameSocket
from transport.link import Outlet

PAYLOAD = np.random.default_rng(3).integers(0, 256, 3_000_000, dtype=np.uint8)


def frame_of(seq: int) -> Frame:
    return Frame(chunk=Chunk(seq=seq))


def all_of_it(outlet: Outlet, seq: int, num_bytes: int) -> Frame:
    """What a pool does: so much leaves while it is built, the rest at once."""
    fd, piece = outlet.begin()
    if num_bytes:
        piece[:num_bytes] = PAYLOAD[:num_bytes]
        with socket.socket(fileno=socket.dup(fd)) as sock:
            sock.sendall(piece[:num_bytes].data)
        outlet.gone(num_bytes)
    if (rest := outlet.rest()) is not None:
        rest[:] = PAYLOAD[: rest.nbytes]
    return frame_of(seq)


class Ends:
    """Two ends of a socket; `came` is what the second one took."""

    def __init__(self) -> None:
        first, second = socket.socketpair()
        self.ours, self.theirs = FrameSocket(first), FrameSocket(second)
        self.came: list[tuple[int, bytes | None]] = []
        self.ended = ""
        self.theirs.start(self._take, self._end)

    def _take(self, raw: bytes, num_bytes: int, place: int, payload: memoryview | None) -> None:
        seq = Frame.FromString(raw).chunk.seq
        self.came.append((seq, None if payload is None else bytes(payload)))

    def _end(self, reason: str) -> None:
        self.ended = reason

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.mark.parametrize("num_gone", [0, 1, 100_000, 500_000])
async def test_what_is_poured_comes_with_its_frame_and_in_order(num_gone: int) -> None:
    ends, size = Ends(), 500_000
    await ends.ours.pour(size, lambda outlet: all_of_it(outlet, 1, num_gone))
    sent = ends.ours.send(frame_of(2).SerializeToString())
    if sent is not None:
        await sent
    await ends.ours.pour(size, lambda outlet: all_of_it(outlet, 3, num_gone))
    await soon(lambda: len(ends.came) == 3)
    want = PAYLOAD[:size].tobytes()
    assert ends.came == [(1, want), (2, None), (3, want)]
    ends.close()


@pytest.mark.parametrize("how", ["raised", "answered None", "never began"])
async def test_a_payload_that_is_given_up_half_way_comes_to_nothing_and_the_next_is_whole(
    how: str,
) -> None:
    ends, size = Ends(), 2_000_000

    def given_up(outlet: Outlet) -> Frame | None:
        if how != "never began":
            all_of_it(outlet, 1, 300_000)
        if how == "raised":
            raise ValueError("rotten")
        return None

    (end,) = await asyncio.gather(ends.ours.pour(size, given_up), return_exceptions=True)
    assert isinstance(end, ValueError) == (how == "raised")
    await ends.ours.pour(size, lambda outlet: all_of_it(outlet, 2, 0))
    await soon(lambda: len(ends.came) == 1)
    assert ends.came == [(2, PAYLOAD[:size].tobytes())]
    ends.close()


async def test_a_frame_whose_payload_never_came_ahead_ends_the_link() -> None:
    ends = Ends()
    raw = frame_of(1).SerializeToString()
    await ends.ours.write(
        lambda: ends.ours.write_bytes(memoryview(HEADER.pack(len(raw), 7, OF_LAST) + raw))
    )
    await soon(lambda: bool(ends.ended))
    assert "7 bytes were to come ahead of their frame" in ends.ended
    assert ends.came == []
    ends.close()


class Stuck(KvStore):
    """Takes cells in only once it may."""

    may = threading.Event()

    @classmethod
    def of(cls, store: KvStore) -> "Stuck":
        made = cls(store.spec, store.kv_heads, store.num_blocks)
        made.may = threading.Event()
        return made

    def scatter_cells(
        self, layer: int, block_ids: Sequence[int], heads: Sequence[int], *rest: object
    ) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
        self.may.wait(10)
        return super().scatter_cells(layer, block_ids, heads, *rest)  # type: ignore[arg-type]


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
