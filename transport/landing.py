"""From staging into live blocks: the one place where received bytes touch the cache."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.cells import first_mismatch
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import Chunk, Frame
from transport.incoming import Incoming
from transport.orders import Receipt, ReceiptOrder
from transport.port import Port

GIVEN_UP = "the transfer was given up"


class CellSink(Protocol):
    """Where cells land: `kvcache.kv_store.KvStore`."""

    @property
    def spec(self) -> CacheSpec: ...

    def cut(self, block_size: int) -> "CellSink":
        """The same cells, in smaller blocks."""
        ...

    def scatter_cells(
        self, layer: int, block_ids: Sequence[int], heads: Sequence[int], cells: NDArray[np.uint8]
    ) -> None: ...


@dataclass(slots=True)
class Landing:
    """One transfer on its way in: what is known of it, and what runs for it."""

    order: ReceiptOrder
    incoming: Incoming
    result: asyncio.Future[Receipt]
    expires_at: float
    renew_at: float
    ports: dict[int, Port] = field(default_factory=dict)  # by prefill rank, once it has called
    jobs: set[asyncio.Future[str]] = field(default_factory=set)
    told: bool = False  # that it failed
    drains: list[Port] = field(default_factory=list)  # that wait to hear of the fence
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def post(self, frame: Frame) -> None:
        for port in self.ports.values():
            port.post(frame)


def land(
    sink: CellSink,
    landing: Landing,
    heads: Sequence[int],
    chunk: Chunk,
    payload: memoryview | None,
) -> str:
    """In a copying thread: verify a chunk and scatter it; says what is wrong with it, if anything.

    A transfer given up meanwhile is not written to: its abort waits for this call to return, and
    what it says is GIVEN_UP.
    """
    layer = landing.incoming.shape.layers[chunk.layer]
    num_cells = chunk.num_blocks * len(heads) * len(layer.planes)
    want = num_cells * layer.cell_bytes
    have = payload.nbytes if payload is not None else 0
    where = f"layer {chunk.layer}, block {chunk.first_block}"
    if payload is None or have != want or chunk.payload_bytes != want:
        return f"{where}: {have} bytes came where {want} belong"
    if len(chunk.digests) != 8 * num_cells:
        return f"{where}: {len(chunk.digests)} bytes of digests for {num_cells} cells"
    cells = np.frombuffer(payload, dtype=np.uint8).reshape(num_cells, layer.cell_bytes)
    bad = first_mismatch(cells, np.frombuffer(chunk.digests, dtype="<u8"))
    if bad is not None:
        block, rest = divmod(bad, len(heads) * len(layer.planes))
        head, plane = divmod(rest, len(layer.planes))
        return (
            f"layer {chunk.layer}, block {chunk.first_block + block}, head {heads[head]}, "
            f"plane {layer.planes[plane]}: the digest does not match"
        )
    if landing.incoming.failure is not None:
        return GIVEN_UP
    first, shape = chunk.first_block, landing.incoming.shape
    block_ids = shape.part_ids(landing.order.block_table, first, first + chunk.num_blocks)
    if shape.parts > 1:
        sink = sink.cut(shape.block_size)
    sink.scatter_cells(chunk.layer, block_ids, heads, cells)
    return ""
