"""The audit names the rule that a planted mistake breaks."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcache.ledger import Ledger
from kvcache.ledger_row import Account, Origin, Reason
from kvferry.audit.audit import audit
from kvferry.audit.report import Rule
from tests.kvferry.audit_sides import (
    CHUNK_BYTES,
    HEADS,
    SHAPE,
    Both,
    chunk,
    key,
    pulled,
    whole,
)
from transport.books import ReceivingBook, SendingBook, adopted, confirmed
from transport.cell_runs import Cell
from transport.orders import Code


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
    pulled(both, lent_head=0)


def _borrow_what_another_was_lent(both: Both) -> None:
    pulled(both, lent_to=1)


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
    where = f"d rank 0 (epoch 1), transfer {transfer}, layer 1, block 0"
    assert line.startswith(f"NEVER_SENT: {where}: ")


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
