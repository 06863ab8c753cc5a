"""The cells' own calls alone: what a transfer takes without the transport.

Cells leave from a pool, are verified, and written into a pool, chunk by chunk. Nothing is ordered,
told ahead, acknowledged or booked.

    tcp         prefill pours and decode catches, as they do over a link
    grpc, gloo  the calls of `limits`, but each message is gathered before it leaves, behind its
                digests, and scattered when it has come
"""

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.crew import at_once
from kvcache import host_memory
from kvcache.cell_pourer import CellPourer
from kvcache.kv_store import KvStore
from kvferry.transfer_bench import limits
from kvferry.transfer_bench.case import BLOCK_BYTES, NUM_KV_HEADS, NUM_LAYERS, Case
from kvferry.transfer_bench.loads import Memory
from protos.transfer_pb2 import Frame
from transport.joined import Unsent, split
from transport.pieces import SEAL_BYTES, Pieces, piece_blocks, without
from transport.tcp_wire import unpace

HEADS = range(NUM_KV_HEADS)
PIECE_BLOCKS = piece_blocks(BLOCK_BYTES, 2 * NUM_KV_HEADS)
PROOF_BYTES = 2 * NUM_KV_HEADS * 8  # of a block in a layer
SEAL = 1
PATIENCE_S = 30.0
WIRES = ("tcp", "grpc", "gloo")


def can(case: Case) -> bool:
    """Whether it is measured beside this case: of two ranks and one prompt."""
    alone = (case.prefill_tp, case.decode_tp, case.concurrency) == (1, 1, 1)
    return case.wire in WIRES and case.digests and not case.sealed and alone


async def serve(
    case: Case, store: KvStore, table: Sequence[int]
) -> tuple[str, "asyncio.Task[None]"]:
    """Where to push to, and what ends once all has been written: with ValueError for cells that are
    not what their digests say.
    """
    if case.wire != "tcp":
        return await limits.serve(case, _Cells(case, store, table))
    listener = _listen(case)
    taking = asyncio.to_thread(_take, case, store, table, listener)
    return str(listener.getsockname()[1]), asyncio.create_task(taking)


async def push(case: Case, store: KvStore, table: Sequence[int], address: str) -> float:
    """Seconds until all had been written there."""
    if case.wire != "tcp":
        return await limits.push(case, address, _Cells(case, store, table))
    return await asyncio.to_thread(_pour, case, store, table, address)


class _Cells:
    """A load of a pool's blocks, a layer's or less in each message, behind their digests."""

    def __init__(self, case: Case, store: KvStore, table: Sequence[int]) -> None:
        self._store = store
        self._chunks = list(_chunks(case, table))
        self.num_messages = len(self._chunks)
        sizes = {self._num_bytes(i) for i in range(self.num_messages)}
        self._unsent, self._rooms = dict[int, Unsent](), list[Memory]()
        if case.wire == "grpc":
            self._unsent = {size: Unsent(size) for size in sizes}
        else:
            self._rooms = [host_memory.buffer(max(sizes)) for _ in range(case.in_flight)]
        built_in = (np.frombuffer(one.payload, np.uint8) for one in self._unsent.values())
        for room in (*self._rooms, *built_in):
            room[:] = 1  # the first look at memory costs more than copying it

    def leaving(self, i: int) -> Memory | bytes:
        if not self._unsent:
            self._gather(i, self.room(i))
            return self.room(i)
        unsent = self._unsent[self._num_bytes(i)]
        self._gather(i, np.frombuffer(unsent.payload, np.uint8))
        return unsent.message(Frame())

    def room(self, i: int) -> Memory:
        return self._rooms[i % len(self._rooms)][: self._num_bytes(i)]

    def came(self, i: int, message: Memory | bytes) -> None:
        if isinstance(message, bytes):
            _, payload = split(message)
            message = np.frombuffer(payload or b"", np.uint8)
        layer, blocks, digests, cells = self._apart(i, message)
        bad = at_once(self._store.scattering(layer, blocks, HEADS, cells, digests))
        if len(bad):
            raise ValueError(f"{len(bad)} cells of layer {layer} came damaged")

    def _gather(self, i: int, room: Memory) -> None:
        layer, blocks, digests, cells = self._apart(i, room)
        known = self._store.known_digests(layer, blocks, HEADS)
        if known is None:
            self._store.gather_cells(layer, blocks, HEADS, None, cells, digests)
        else:
            self._store.gather_cells(layer, blocks, HEADS, None, cells)
            digests[:] = known

    def _apart(
        self, i: int, message: Memory
    ) -> tuple[int, Sequence[int], NDArray[np.uint64], Memory]:
        layers, blocks = self._chunks[i]
        proofs = len(blocks) * PROOF_BYTES
        return layers.start, blocks, message[:proofs].view(np.uint64), message[proofs:]

    def _num_bytes(self, i: int) -> int:
        return len(self._chunks[i][1]) * (BLOCK_BYTES + PROOF_BYTES)


def _listen(case: Case) -> socket.socket:
    listener = socket.socket()
    listener.bind((case.host, 0))
    listener.listen(1)
    return listener


def _pour(case: Case, store: KvStore, table: Sequence[int], address: str) -> float:
    """Seconds until all had been written there."""
    with socket.create_connection((case.host, int(address)), PATIENCE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        unpace(sock)
        began = time.perf_counter()
        for layers, blocks in _chunks(case, table):
            pourer = store.pourer(layers, blocks, HEADS, None, PIECE_BLOCKS)
            assert pourer is not None, "a store that cannot pour"
            room = np.empty(pourer.room_bytes, np.uint8)
            gone = pourer.pour(sock.fileno(), b"", room, SEAL if pourer.known else None)
            for view in _rest(store, layers, blocks, pourer, gone):
                sock.sendall(view)
        sock.recv(1)
        return time.perf_counter() - began


def _rest(
    store: KvStore, layers: range, blocks: Sequence[int], pourer: CellPourer, gone: int
) -> list[memoryview]:
    """What follows the `gone` bytes of a chunk: its seal, and what decode took too slowly."""
    seal = memoryview(SEAL.to_bytes(SEAL_BYTES, "little"))
    if gone >= pourer.num_bytes:
        return [seal[gone - pourer.num_bytes :]]
    digests = pourer.digests.reshape(len(layers), -1)
    gathered = [
        store.gather_cells(layer, blocks, HEADS, digests=own)
        for layer, own in zip(layers, digests, strict=True)
    ]
    proof_bytes = digests.nbytes // (len(layers) * len(blocks))
    pieces = Pieces(len(layers), len(blocks), PIECE_BLOCKS, BLOCK_BYTES, proof_bytes)
    views = pieces.views(
        digests.view(np.uint8).reshape(-1).data, np.concatenate(gathered).reshape(-1).data
    )
    return without([*views, seal], gone)


def _take(case: Case, store: KvStore, table: Sequence[int], listener: socket.socket) -> None:
    """Raises ValueError for cells that are not what their digests say."""
    with listener, listener.accept()[0] as sock:
        for layers, blocks in _chunks(case, table):
            catcher = store.catcher(layers, blocks, HEADS, PIECE_BLOCKS)
            assert catcher is not None, "a store that cannot catch"
            room = np.empty(catcher.room_bytes, np.uint8)
            while not catcher.turn(sock.fileno(), room):
                pass
            if len(bad := catcher.bad_rows()):
                raise ValueError(f"{len(bad)} cells of layers {list(layers)} came damaged")
            catcher.keep()
        sock.send(b"!")


def _chunks(case: Case, table: Sequence[int]) -> Iterator[tuple[range, Sequence[int]]]:
    """As a transfer has them: of some layers, or of a part of one."""
    count = case.message_bytes // BLOCK_BYTES
    num_layers, num_blocks = max(1, count // len(table)), min(count, len(table))
    for layer in range(0, NUM_LAYERS, num_layers):
        layers = range(layer, min(layer + num_layers, NUM_LAYERS))
        for first in range(0, len(table), num_blocks):
            yield layers, table[first : first + num_blocks]
