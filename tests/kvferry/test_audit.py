"""The audit proves legal histories, and names the rule that a planted mistake breaks."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.block_hash import BlockHash
from kvcache.block_pool import BlockPool
from kvcache.ledger import Ledger
from kvcache.ledger_row import Account, Book, Extract, Origin, Reason
from kvcache.spec import CacheSpec
from kvferry.audit.audit import audit
from kvferry.audit.report import Report, Rule
from protos.transfer_pb2 import CellRun, Chunk
from transport.books import ReceivingBook, SendingBook, adopted, confirmed, lent
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


def test_a_whole_transfer_is_proved_from_both_sides() -> None:
    both = Both()
    whole(both)
    report = both.audit()
    report.check()
    assert report.proved == 1
    assert not report.one_sided
    prefill, decode = report.lines
    assert (prefill.cells, decode.cells) == (12, 12)
    assert (prefill.num_bytes, decode.num_bytes) == (2 * CHUNK_BYTES, 2 * CHUNK_BYTES)
    assert (prefill.num_blocks, prefill.blocks_in_use) == (8, 0)


def test_damaged_cells_that_are_fetched_again_are_proved() -> None:
    both = Both()
    both.begin()
    both.send(0)
    both.send(1)
    bad = (Cell(0, 1, 1),)
    both.take(0, bad)
    both.take(1)
    again = Chunk(layer=0, first_block=1, num_blocks=1, heads=[1], payload_bytes=8)
    both.out.sent(0, again)
    both.into.fetched(0, bad)
    both.into.mended(0, bad, ())
    both.end()
    both.let_go()
    report = both.audit()
    report.check()
    assert report.lines[1].repaired == 1


def test_a_transfer_that_is_given_up_is_proved() -> None:
    both = Both()
    both.begin()
    both.send(0)
    both.take(0)
    both.send(1)
    both.into.arrived(0, chunk(1))
    both.into.failed(Code.CANCELLED)
    both.into.given_up(0, chunk(1))
    both.into.freed()
    both.out.failed(Code.CANCELLED)
    both.out.drained()
    both.let_go()
    report = both.audit()
    report.check()
    assert report.lines[0].failed == report.lines[1].failed == 1


def test_blocks_are_let_go_when_the_last_rank_has_confirmed_its_fence() -> None:
    both = Both()
    other = both.widen()
    both.begin()
    both.give_up()
    other.failed(Code.CANCELLED)
    other.freed()
    confirmed(both.decode, both.key, 1)
    both.let_go()
    both.audit().check()


def _pulled(both: Both, lent_to: int = 0, lent_head: int = 1) -> None:
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


def test_cells_that_came_by_a_call_are_proved_by_both_sides() -> None:
    both = Both()
    _pulled(both)
    report = both.audit()
    report.check()
    assert report.proved == 1


# planted mistakes


def _free_before_a_rank_confirms(both: Both) -> None:
    other = both.widen()
    both.begin()
    both.give_up()
    both.let_go()
    other.failed(Code.CANCELLED)
    other.freed()
    confirmed(both.decode, both.key, 1)


def _confirm_before_the_fence(both: Both) -> None:
    both.widen()
    both.begin()
    both.give_up()
    confirmed(both.decode, both.key, 1)
    both.let_go()


def _borrow_what_was_not_lent(both: Both) -> None:
    _pulled(both, lent_head=0)


def _borrow_what_another_was_lent(both: Both) -> None:
    _pulled(both, lent_to=1)


def _fetch_from_nowhere(both: Both) -> None:
    both.begin()
    bad = (Cell(0, 1, 1),)
    for layer in range(2):
        both.send(layer)
        both.take(layer, bad if layer == 0 else ())
    both.into.fetched(0, bad)
    both.into.mended(0, bad, ())
    both.end()
    both.let_go()


def _free_early(both: Both) -> None:
    both.begin()
    both.send(0)
    both.pools[1].release(both.target)
    both.target = []
    both.take(0)
    both.give_up()
    both.let_go()


def _free_under_reader(both: Both) -> None:
    both.begin()
    both.pools[0].release(both.source)
    both.source = []
    both.give_up()
    both.let_go()


def _double_commit(both: Both) -> None:
    whole(both)
    both.into.committed()


def _forget_the_fence(both: Both) -> None:
    both.begin()
    both.send(0)
    both.into.arrived(0, chunk(0))
    both.give_up()
    both.let_go()


def _drain_under_a_gather(both: Both) -> None:
    both.begin()
    both.out.gathering(0, 0)
    both.give_up()
    both.let_go()


def _write_after_the_fence(both: Both) -> None:
    both.begin()
    both.send(0)
    both.give_up()
    both.into.arrived(0, chunk(0))
    both.let_go()


def _take_after_failure(both: Both) -> None:
    both.begin()
    both.send(0)
    both.into.failed(Code.CANCELLED)
    both.into.arrived(0, chunk(0))
    both.into.given_up(0, chunk(0))
    both.into.freed()
    both.out.failed(Code.CANCELLED)
    both.out.drained()
    both.let_go()


def _whole_too_early(both: Both) -> None:
    both.begin()
    both.send(0)
    both.send(1)
    both.take(0)
    both.end()
    both.let_go()


def _never_sent(both: Both) -> None:
    both.begin()
    both.send(0)
    both.take(0)
    both.into.arrived(0, chunk(1))
    both.into.landed(0, chunk(1), ())
    both.into.whole()
    both.into.committed()
    both.out.finished()
    both.out.failed(Code.UNAVAILABLE)
    both.out.drained()
    both.let_go()


def _swapped(both: Both) -> None:
    both.begin()
    both.send(0)
    both.send(1)
    for layer in range(2):
        both.into.arrived(0, chunk(1 - layer, seq=layer))
        both.into.landed(0, chunk(1 - layer, seq=layer), ())
        both.out.acked(0, layer)
    both.end()
    both.let_go()


def _acked_before_written(both: Both) -> None:
    both.begin()
    both.send(0)
    both.out.acked(0, 0)
    both.give_up()
    both.let_go()


def _written_twice(both: Both) -> None:
    both.begin()
    both.send(0)
    both.take(0)
    both.into.arrived(0, chunk(0))
    both.into.landed(0, chunk(0), ())
    both.give_up()
    both.let_go()


def _released_uncommitted(both: Both) -> None:
    both.begin()
    for layer in range(2):
        both.send(layer)
        both.take(layer)
    both.out.finished()
    both.out.committed(0)
    both.out.drained()
    both.into.failed(Code.CANCELLED)
    both.into.freed()
    both.let_go()


def _committed_unsealed(both: Both) -> None:
    both.begin()
    for layer in range(2):
        both.send(layer)
        both.take(layer)
    both.into.whole()
    both.into.committed()
    both.out.failed(Code.CANCELLED)
    both.out.drained()
    both.let_go()


def _resent_undamaged(both: Both) -> None:
    both.begin()
    both.send(0)
    both.out.nacked(0, 0)
    both.send(0)
    both.take(0)
    both.give_up()
    both.let_go()


def _two_writers(both: Both) -> None:
    both.begin()
    other = ReceivingBook(both.decode, key(2), {0: HEADS}, SHAPE, 0, "ip")
    other.bound(0, both.target)
    other.failed(Code.CANCELLED)
    other.freed()
    both.give_up()
    both.let_go()


def _head_from_two(both: Both) -> None:
    both.begin()
    other = ReceivingBook(both.decode, key(2), {0: (0, 1), 1: (1,)}, SHAPE, 0, "ip")
    other.failed(Code.CANCELLED)
    other.freed()
    both.give_up()
    both.let_go()


def _foreign_epoch(both: Both) -> None:
    both.begin()
    stale = replace(key(2), decode_epoch=7)
    other = ReceivingBook(both.decode, stale, {0: HEADS}, SHAPE, 0, "ip")
    other.failed(Code.CANCELLED)
    other.freed()
    both.give_up()
    both.let_go()


def _other_plan(both: Both) -> None:
    both.begin()
    both.give_up()
    out = SendingBook(both.prefill, key(2), {0: (0,)}, SHAPE, "id")
    into = ReceivingBook(both.decode, key(2), {0: HEADS}, SHAPE, 0, "ip")
    for book in (out, into):
        book.failed(Code.CANCELLED)
    out.drained()
    into.freed()
    both.let_go()


def _short_payload(both: Both) -> None:
    both.begin()
    both.send(0)
    both.send(1)
    both.take(0)
    short = chunk(1, payload_bytes=CHUNK_BYTES - 8)
    both.into.arrived(0, short)
    both.into.landed(0, short, ())
    both.end()
    both.let_go()


def _never_ends(both: Both) -> None:
    both.begin()
    both.let_go()


def _never_released(both: Both) -> None:
    both.begin()
    both.give_up()


def _lose_a_block(both: Both) -> None:
    both.begin()
    both.give_up()
    both.pools[1]._free.pop()
    both.let_go()


def _hand_out_twice(both: Both) -> None:
    both.begin()
    both.pools[1]._free.appendleft(both.target[0])
    both.pools[1].take(1)
    both.give_up()
    both.let_go()


def _free_twice(both: Both) -> None:
    both.begin()
    both.give_up()
    both.let_go()
    move = (Account.IN_USE, Account.FREE, Reason.RELEASED)
    both.decode.post_blocks(*move, [both.target[0]])


def _other_end_knows_nothing(both: Both) -> None:
    whole(both)
    lone = SendingBook(both.prefill, key(2), {0: HEADS}, SHAPE, "id")
    lone.sent(0, chunk(0))
    lone.acked(0, 0)
    lone.failed(Code.CANCELLED)
    lone.drained()


PLANTED: list[tuple[Callable[[Both], None], Rule]] = [
    (_free_before_a_rank_confirms, Rule.FREED_UNCONFIRMED),
    (_confirm_before_the_fence, Rule.CONFIRMED_UNFENCED),
    (_borrow_what_was_not_lent, Rule.NEVER_LENT),
    (_borrow_what_another_was_lent, Rule.NEVER_LENT),
    (_fetch_from_nowhere, Rule.NEVER_FETCHED),
    (_free_early, Rule.FREED_UNDER_WRITER),
    (_free_under_reader, Rule.FREED_UNDER_READER),
    (_double_commit, Rule.WRONG_STATE),
    (_forget_the_fence, Rule.FENCE_SKIPPED),
    (_drain_under_a_gather, Rule.FENCE_SKIPPED),
    (_write_after_the_fence, Rule.MOVED_AFTER_END),
    (_take_after_failure, Rule.TAKEN_AFTER_FAILURE),
    (_whole_too_early, Rule.INCOMPLETE),
    (_never_sent, Rule.NEVER_SENT),
    (_swapped, Rule.NEVER_SENT),
    (_acked_before_written, Rule.ACKED_UNWRITTEN),
    (_written_twice, Rule.WRONG_ACCOUNT),
    (_released_uncommitted, Rule.RELEASED_UNCOMMITTED),
    (_committed_unsealed, Rule.COMMITTED_UNSEALED),
    (_resent_undamaged, Rule.RESENT_UNDAMAGED),
    (_two_writers, Rule.WRITTEN_BY_TWO),
    (_head_from_two, Rule.HEAD_TWICE),
    (_foreign_epoch, Rule.FOREIGN_EPOCH),
    (_other_plan, Rule.PLAN_DIFFERS),
    (_short_payload, Rule.BYTES_DIFFER),
    (_never_ends, Rule.OPEN_AT_REST),
    (_never_released, Rule.HELD_AT_REST),
    (_lose_a_block, Rule.COUNT_DIFFERS),
    (_hand_out_twice, Rule.OWNED_TWICE),
    (_free_twice, Rule.FREED_TWICE),
    (_other_end_knows_nothing, Rule.NO_COUNTERPART),
]


@pytest.mark.parametrize(("plant", "rule"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_mistake_is_named(plant: Callable[[Both], None], rule: Rule) -> None:
    both = Both()
    plant(both)
    report = both.audit()
    assert rule in report.rules(), [str(broken) for broken in report.broken]


def test_a_broken_rule_names_transfer_rank_layer_and_block() -> None:
    both = Both()
    _never_sent(both)
    (line,) = [str(broken) for broken in both.audit().broken if broken.rule is Rule.NEVER_SENT]
    transfer = "0" * 31 + "1/1"
    assert line.startswith(f"NEVER_SENT: d rank 0, transfer {transfer}, layer 1, block 0: ")


def test_a_group_that_adopts_before_every_rank_has_committed_is_named() -> None:
    ledgers = [Ledger(Origin("d", "id", 1, "decode", rank, 2)) for rank in range(2)]
    books = [ReceivingBook(ledger, key(), {0: ()}, SHAPE, 0, "ip") for ledger in ledgers]
    for book in books:
        book.whole()
    books[0].committed()
    adopted(ledgers[0], key())
    books[1].failed(Code.CANCELLED)
    books[1].freed()
    assert Rule.PARTIAL_GROUP in audit([ledger.extract() for ledger in ledgers]).rules()


def test_a_missing_side_is_reported_and_is_no_alarm() -> None:
    both = Both()
    whole(both)
    report = audit([both.decode.extract()])
    report.check()
    assert report.proved == 0
    assert list(report.one_sided.values()) == ["prefill rank 0"]


def test_a_transfer_that_ended_after_the_other_side_was_read_is_no_alarm() -> None:
    both = Both()
    before = both.decode.extract()
    whole(both)
    ours = both.prefill.extract()
    report = audit([replace(ours, common_seq=1), before])
    report.check()
    assert len(report.one_sided) == 1


# any history, and any single mistake in writing it down

TELLING = {  # rows that nothing else repeats: each must be there once
    Book.BLOCKS: set(Reason) - {Reason.COUNTED},
    Book.CELLS: {Reason.ORDERED, Reason.SENT, Reason.ARRIVED, Reason.VERIFIED, Reason.COMMITTED},
    Book.TRANSFERS: set(Reason) - {Reason.ADOPTED},
    Book.JOBS: {Reason.GATHERING},
}


def history(seed: int) -> Both:
    """Any order of transfers that succeed, mend or fail, with blocks that are shared and named."""
    random, both = Random(seed), Both()
    for number in range(1, random.randint(2, 4)):
        both.begin(number)
        pool, names = both.pools[1], [BlockHash(bytes([number, i]) * 16) for i in range(3)]
        layers = [0, 1]
        random.shuffle(layers)
        fails = random.random() < 0.3
        for layer in layers[: random.randint(0, 1) if fails else 2]:
            both.send(layer)
            bad = (Cell(layer, random.randint(0, 2), random.randint(0, 1)),)
            if random.random() < 0.3:
                both.take(layer, bad)
                (_, block, head), by_a_call = bad[0], random.random() < 0.5
                run = CellRun(layer=layer, first_block=block, num_blocks=1, heads=[head])
                if by_a_call:
                    lent(both.prefill, both.key, 0, run)
                else:
                    again = chunk(layer, first_block=block, num_blocks=1, payload_bytes=8)
                    again.heads.append(head)
                    both.out.sent(0, again)
                both.into.fetched(0, bad)
                both.into.mended(0, bad, ())
                if by_a_call:
                    both.into.borrowed(both.key, Lender("ip", 0, "here"), bad)
            else:
                both.take(layer)
        both.give_up() if fails else both.end()
        if not fails:
            for block, name, parent in zip(both.target, names, [None, *names], strict=False):
                pool.name(block, name, parent)
            if random.random() < 0.5:
                pool.fork(both.target)
                pool.release(reversed(both.target))
        both.let_go()
        if not fails and random.random() < 0.5:
            pool.release(reversed(pool.share(names)))
    both.pools[1].take_stock()
    return both


def renumbered(extract: Extract, rows: "list[np.void]") -> Extract:
    made = np.array(rows, dtype=extract.rows.dtype)
    made["seq"] = np.arange(1, len(made) + 1)
    return replace(extract, rows=made)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_any_legal_history_balances(seed: int) -> None:
    history(seed).audit().check()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 300), st.integers(0, 10_000), st.booleans(), st.sampled_from("-+~"))
def test_one_row_dropped_doubled_or_altered_is_found(
    seed: int, place: int, on_decode: bool, how: str
) -> None:
    both = history(seed)
    extracts = [both.prefill.extract(), both.decode.extract()]
    rows = [row.copy() for row in extracts[on_decode].rows]
    telling = [
        i
        for i, row in enumerate(rows)
        if int(row["reason"]) in TELLING.get(Book(int(row["book"])), set())
    ]
    i = telling[place % len(telling)]
    if how == "-":
        del rows[i]
    elif how == "+":
        rows.insert(i, rows[i])
    else:
        others = [account for account in Account if account != int(rows[i]["target"])]
        rows[i]["target"] = others[place % len(others)]
    extracts[on_decode] = renumbered(extracts[on_decode], rows)
    assert not audit(extracts, at_rest=True).whole


def test_a_row_that_is_gone_is_missed_by_its_number() -> None:
    both = Both()
    whole(both)
    extract = both.prefill.extract()
    rows = np.delete(extract.rows, 5)
    report = audit([replace(extract, rows=rows), both.decode.extract()])
    assert Rule.ROWS_MISSING in report.rules()
