"""Chunks of several layers, over every wire: only one that streams has them cut so, but a chunk
that was is the same when another wire carries it, and decode may have to store it.
"""

from dataclasses import replace

import pytest

from engine.clock import MonotonicClock
from kvcache.ledger import Ledger
from kvcache.ledger_row import Origin, Reason
from protos.transfer_pb2 import Chunk
from tests.transport.broken import IMPATIENT, NUM_TOKENS, SOURCE, TARGET
from tests.transport.harness import SPEC, WAYS, cluster, network, soon
from transport.books import ReceivingBook
from transport.config import TransportConfig
from transport.fault_wire import FaultWire
from transport.faults import DAMAGES, Faults
from transport.lander import Lander
from transport.orders import ShipmentKey
from transport.outgoing_pair import STREAMED_CHUNKS, OutgoingPair
from transport.sealed_runs import Part
from transport.shipment import Shape

LARGE = TransportConfig(chunk_bytes=1 << 20, max_damage_share=1.0)  # all layers are one chunk
FAULTS = (
    "flip:chunk@2 swap:chunk@4 duplicate:chunk@5 truncate:chunk@7 stale:chunk@9 foreign:chunk@11 "
    "reorder:chunk@12 drop:chunk@14"
)


@pytest.fixture
def cut_together(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """Every pair takes layers together, whatever its wire; returns what they took."""
    taken: list[Part] = []
    take = OutgoingPair.take

    def take_together(pair: OutgoingPair, _: int) -> Part | None:
        pair.most_chunks = STREAMED_CHUNKS
        part = take(pair)
        taken.extend([part] if part is not None else [])
        return part

    monkeypatch.setattr(OutgoingPair, "take", take_together)
    return taken


@pytest.mark.parametrize("wire", WAYS)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (3, 2)])
async def test_all_layers_arrive_byte_exact_in_one_chunk(
    wire: str, prefill_tp: int, decode_tp: int, cut_together: list[Part]
) -> None:
    """Fresh, and with digests that are known."""
    async with network(wire) as net, cluster(net, prefill_tp, decode_tp, config=LARGE) as group:
        for target in (TARGET, [1, 3, 5, 6, 8]):
            cut_together.clear()
            await group.carry(NUM_TOKENS, SOURCE, target)
            group.check_blocks(NUM_TOKENS, SOURCE, target)
            assert {part.num_layers for part in cut_together} == {SPEC.num_layers}
            assert not any(part.seq for part in cut_together)


async def test_decode_that_stores_what_streams_takes_layers_together_too(
    cut_together: list[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lander, "catches", lambda *_: False)
    monkeypatch.setattr(Lander, "catcher", lambda *_: None)
    async with network("tcp") as net, cluster(net, config=LARGE) as group:
        ((report,), _) = await group.carry(NUM_TOKENS, SOURCE, TARGET)
        group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
    assert report.chunks == len(cut_together) == 1


async def test_parts_of_blocks_go_together_too(cut_together: list[Part]) -> None:
    async with (
        network("tcp") as net,
        cluster(net, config=LARGE, decode_block_size=SPEC.block_size // 2) as group,
    ):
        await group.carry(NUM_TOKENS, SOURCE, [*TARGET, *range(8, 13)])
        group.check_blocks(NUM_TOKENS, SOURCE, [*TARGET, *range(8, 13)])
    assert [part.num_layers for part in cut_together] == [SPEC.num_layers]


@pytest.mark.parametrize("wire", ["loopback", "tcp", "shm", "grpc"])
async def test_faults_that_can_be_made_good_end_in_equal_bytes(
    wire: str, cut_together: list[Part]
) -> None:
    config = replace(IMPATIENT, chunk_bytes=LARGE.chunk_bytes, lease_s=1.2, max_link_asks=12)
    with Faults.of(FAULTS) as faults:
        async with (
            network(wire) as net,
            cluster(
                net, config=config, wrap=lambda inner: FaultWire(inner, faults, MonotonicClock())
            ) as group,
        ):
            for _ in range(12):
                await group.carry(NUM_TOKENS, SOURCE, TARGET)
                group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
            assert {fault.kind for fault in faults.log} >= DAMAGES
            await soon(lambda: all(s.open_shipments == 0 for s in group.prefill.shippers))
    assert {part.num_layers for part in cut_together if not part.heads} == {SPEC.num_layers}


def test_a_chunk_that_is_refused_takes_no_more_rows_than_there_are_layers() -> None:
    """However many it says it has: rows are pages of what happened, and those are soon full."""
    ledger = Ledger(Origin("d", "id", 1, "decode", 0, 1))
    shape, key = Shape.of(SPEC, NUM_TOKENS), ShipmentKey(bytes(16), 1, 1, 1)
    book = ReceivingBook(ledger, key, {0: (0, 1)}, shape, 0, "ip")
    for num_layers, most in ((0, 1), (1, 1), (2**32 - 1, shape.num_layers)):
        before = ledger.num_rows
        book.refused(0, Chunk(num_blocks=1, num_layers=num_layers), Reason.BAD)
        assert ledger.num_rows - before == most
