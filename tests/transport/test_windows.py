"""How much may be on its way at once, and how long word of it may wait."""

import asyncio
from dataclasses import replace

import pytest

from engine.clock import ManualClock
from kvcache.device_cells import DeviceCells
from kvcache.kv_store import KvStore
from tests.kvcache.late_device import LateDevice
from tests.transport.broken import SOURCE, TARGET
from tests.transport.harness import POOL, QUICK, WIRES, cluster, network
from transport.config import TransportConfig
from transport.from_prefill import PASSING_WINDOWS
from transport.outgoing_pair import SHOWN_CHUNKS, STREAMED_CHUNKS, OutgoingPair


@pytest.mark.parametrize("wire", ["tcp", POOL])
async def test_acknowledgements_wait_for_no_more_than_half_of_what_may_be_on_its_way(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else prefill would wait for them, however soon the other half has come."""
    monkeypatch.setattr("transport.from_prefill.ACK_WITHIN_S", 3600)
    config = TransportConfig(chunk_bytes=800, window_bytes=150)  # of which sixteen are 3 chunks
    async with network(wire) as net, cluster(net, config=config) as group:
        async with asyncio.timeout(10):
            ((report,), _) = await group.carry(18, SOURCE, TARGET)
        group.check_blocks(18, SOURCE, TARGET)
    assert report.bytes > 2 * PASSING_WINDOWS * config.window_bytes


async def test_an_acknowledgement_is_there_before_prefill_sends_its_chunk_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transport.from_prefill.ACK_WITHIN_S", 3600)
    short = replace(QUICK, lease_s=0.3)  # by a clock that stands still
    async with network("tcp") as net, cluster(net, config=short, clock=ManualClock()) as group:
        await group.carry_acknowledged(18, SOURCE, TARGET)


@pytest.mark.parametrize(
    ("wire", "stages", "windows", "chunks"),
    [
        ("tcp", False, PASSING_WINDOWS, STREAMED_CHUNKS),
        ("tcp", True, 1, 1),
        (POOL, False, PASSING_WINDOWS, SHOWN_CHUNKS),
    ]
    + [(wire, False, 1, 1) for wire in WIRES if wire != "tcp"],
)
async def test_more_may_be_on_its_way_only_where_decode_stores_none_of_it(
    wire: str, stages: bool, windows: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is bounded by the window else, as with a store on a device."""
    given = list[tuple[int, int]]()
    grant = OutgoingPair.grant

    def note(pair: OutgoingPair, first_block: int, window_bytes: int) -> bool:
        taken = grant(pair, first_block, window_bytes)
        given.append((window_bytes, max(pair.chunk_bytes, pair.most_bytes)))
        return taken

    def on_device(store: KvStore) -> KvStore:
        cells = DeviceCells(LateDevice(), piece_bytes=700)
        return KvStore(store.spec, store.kv_heads, store.num_blocks, on_device=cells)

    monkeypatch.setattr(OutgoingPair, "grant", note)
    config = TransportConfig(chunk_bytes=1000, window_bytes=3000)
    sink = on_device if stages else lambda store: store
    async with network(wire) as net, cluster(net, config=config, sink=sink) as group:
        await group.carry(18, SOURCE, TARGET)
    assert given == [(windows * config.window_bytes, chunks * config.chunk_bytes)]
