"""Both sides of transfers as their ledgers tell them, for what an audit is tried on."""

from dataclasses import dataclass, field
from typing import Any

from kvcache.block_pool import BlockPool
from kvcache.ledger import Ledger
from kvcache.ledger_row import Origin
from kvcache.spec import CacheSpec
from kvferry.audit.audit import audit
from kvferry.audit.report import Report
from protos.transfer_pb2 import CellRun, Chunk
from transport.books import ReceivingBook, SendingBook, adopted, lent
from transport.cell_runs import Cell
from transport.orders import Code, Lender, ShipmentKey
from transport.shipment import Shape

SPEC = CacheSpec.full(num_layers=2, num_kv_heads=2, head_dim=1, block_size=4, dtype="int8")
SHAPE = Shape.of(SPEC, 12)  # 3 blocks
HEADS = (0, 1)
CHUNK_BYTES = 3 * 2 * 8


def key(number: int = 1) -> ShipmentKey:
    return ShipmentKey(number.to_bytes(16, "big"), 1, 1, 1)


def chunk(layer: int, seq: int | None = None, **fields: int) -> Chunk:
    seq = layer if seq is None else seq
    values: dict[str, Any] = {"first_block": 0, "num_blocks": 3, "payload_bytes": CHUNK_BYTES}
    return Chunk(seq=seq, layer=layer, **(values | fields))


@dataclass
class Both:
    """A prefill and a decode process, and one transfer between them; each step is a method."""

    prefill: Ledger = field(default_factory=lambda: Ledger(Origin("p", "ip", 1, "prefill", 0, 1)))
    decode: Ledger = field(default_factory=lambda: Ledger(Origin("d", "id", 1, "decode", 0, 1)))
    rank_1: Ledger | None = None  # of decode, in a group of two

    def __post_init__(self) -> None:
        self.pools = BlockPool(8, self.prefill), BlockPool(8, self.decode)

    def widen(self) -> ReceivingBook:
        """Decode has a second rank, which takes part in transfer 1, but gets no cells."""
        self.decode = Ledger(Origin("d", "id", 1, "decode", 0, 2))
        self.rank_1 = Ledger(Origin("d", "id", 1, "decode", 1, 2))
        self.pools = self.pools[0], BlockPool(8, self.decode)
        return ReceivingBook(self.rank_1, key(), {}, SHAPE, 0, "ip")

    def begin(self, number: int = 1) -> None:
        self.key = key(number)
        self.source, self.target = (pool.take(3) for pool in self.pools)
        self.out = SendingBook(self.prefill, self.key, {0: HEADS}, SHAPE, "id")
        self.out.bound(0, self.source)
        self.into = ReceivingBook(self.decode, self.key, {0: HEADS}, SHAPE, 0, "ip")
        self.into.bound(0, self.target)
        self.out.resident(0, 0)

    def send(self, layer: int) -> None:
        self.out.gathering(0, layer)
        self.out.gathered(0, layer)
        self.out.sent(0, chunk(layer))

    def take(self, layer: int, bad: tuple[Cell, ...] = ()) -> None:
        self.into.arrived(0, chunk(layer))
        self.into.landed(0, chunk(layer), bad)
        self.out.acked(0, layer)

    def end(self) -> None:
        self.out.finished()
        self.into.whole()
        self.into.committed()
        self.out.committed(0)
        self.out.drained()
        adopted(self.decode, self.key)

    def let_go(self) -> None:
        for pool, blocks in zip(self.pools, (self.source, self.target), strict=True):
            pool.release(reversed(blocks))
            pool.take_stock()

    def give_up(self) -> None:
        self.into.failed(Code.CANCELLED)
        self.into.freed()
        self.out.failed(Code.CANCELLED)
        self.out.drained()

    def audit(self) -> Report:
        ledgers = [self.prefill, self.decode, *([self.rank_1] if self.rank_1 else [])]
        return audit([ledger.extract() for ledger in ledgers], at_rest=True)


def whole(both: Both) -> None:
    both.begin()
    for layer in range(2):
        both.send(layer)
        both.take(layer)
    both.end()
    both.let_go()


def pulled(both: Both, lent_to: int = 0, lent_head: int = 1) -> None:
    """A damaged cell comes by a call, and the other comes again over the link."""
    both.begin()
    bad = (Cell(0, 1, 1),)
    for layer in range(2):
        both.send(layer)
        both.take(layer, bad if layer == 0 else ())
    both.into.fetched(0, bad)
    both.into.mended(0, bad, ())
    run = CellRun(layer=0, first_block=1, num_blocks=1, heads=[lent_head])
    lent(both.prefill, both.key, lent_to, run)
    both.into.borrowed(both.key, Lender("ip", 0, "here"), bad)
    both.end()
    both.let_go()
