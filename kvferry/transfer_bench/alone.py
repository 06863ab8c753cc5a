"""The cells' own calls alone, over tcp: what a transfer takes without the transport.

Prefill pours and decode catches, chunk by chunk, as they do over a link: cells leave from a pool,
are verified, and written into a pool. Nothing is ordered, told ahead, acknowledged or booked.
"""

import socket
import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvcache.cell_pourer import CellPourer
from kvcache.kv_store import KvStore
from kvferry.transfer_bench.case import BLOCK_BYTES, NUM_KV_HEADS, NUM_LAYERS, Case
from transport.pieces import SEAL_BYTES, Pieces, piece_blocks, without
from transport.tcp_wire import unpace

HEADS = range(NUM_KV_HEADS)
PIECE_BLOCKS = piece_blocks(BLOCK_BYTES, 2 * NUM_KV_HEADS)
SEAL = 1
PATIENCE_S = 30.0


def can(case: Case) -> bool:
    """Whether it is measured beside this case: of two ranks and one prompt."""
    alone = (case.prefill_tp, case.decode_tp, case.concurrency) == (1, 1, 1)
    return case.wire == "tcp" and case.digests and not case.sealed and alone


def listen(case: Case) -> socket.socket:
    listener = socket.socket()
    listener.bind((case.host, 0))
    listener.listen(1)
    return listener


def push(case: Case, store: KvStore, table: Sequence[int], address: str) -> float:
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


def take(case: Case, store: KvStore, table: Sequence[int], listener: socket.socket) -> None:
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
