"""The audit proves legal transfers, and a side that is missing is no alarm."""

from dataclasses import replace

from kvcache.ledger import Ledger
from kvcache.ledger_row import Origin
from kvferry.audit.audit import audit
from protos.transfer_pb2 import Chunk
from tests.kvferry.audit_sides import CHUNK_BYTES, Both, chunk, pulled, whole
from transport.books import confirmed
from transport.cell_runs import Cell
from transport.orders import Code


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


def test_cells_that_came_by_a_call_are_proved_by_both_sides() -> None:
    both = Both()
    pulled(both)
    report = both.audit()
    report.check()
    assert report.proved == 1


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


def test_two_lives_of_one_worker_are_told_apart() -> None:
    lives = [Origin("p", f"i{epoch}", epoch, "prefill", 0, 1) for epoch in (1, 2)]
    report = audit([Ledger(origin).extract() for origin in lives])
    assert [str(line.origin) for line in report.lines] == [
        "p rank 0 (epoch 1)",
        "p rank 0 (epoch 2)",
    ]
