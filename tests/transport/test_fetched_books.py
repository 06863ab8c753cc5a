"""The ledgers prove what was fetched from both sides, and find mistakes planted in either."""

from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.engine import Engine
from kvferry.audit.audit import audit
from kvferry.audit.report import Report
from prefill_worker.borrowing import Borrowing
from tests.system.in_process import (
    calls_answered,
    decode_worker,
    disaggregated,
    prefill_worker,
)
from tests.system.test_disaggregation import SOURCE, greedy, prompt_of
from tests.system.test_fetched_prefixes import NUM_BLOCKS, failing, fetch
from tests.transport.test_planted_mistakes import Plant, note_nothing, plant
from transport.books import ReceivingBook
from transport.cells_servicer import CellsServicer
from transport.loopback_wire import LoopbackWire
from worker.named_blocks import NamedBlocks


async def fetch_a_prefix(tp: int = 1, *, damaged: bool = False) -> Report:
    """Six blocks, of which some come damaged; all ledgers are audited in the end."""
    wire, prompt = LoopbackWire(), prompt_of(100)
    async with (
        prefill_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as warm,
        prefill_worker(SOURCE, wire, tp, num_blocks=NUM_BLOCKS) as cold,
        decode_worker(SOURCE, wire, num_blocks=NUM_BLOCKS) as decode,
        failing(warm, 100, damaged=90) if damaged else calls_answered(warm) as addresses,
    ):
        await disaggregated(warm, decode, prompt, greedy(3))
        decode.engine.flush_cache()
        answer = await disaggregated(cold, decode, prompt, greedy(5), 0, fetch(warm, addresses))
        assert (answer.fetched_tokens < 96) == damaged
        for worker in (warm, cold, decode):
            await worker.settled()
        ledgers = warm.ledgers + cold.ledgers + decode.ledgers
        return audit([each.extract() for each in ledgers], at_rest=True)


@pytest.mark.parametrize(("tp", "damaged"), [(1, True), (3, False), (3, True)])
async def test_what_is_fetched_is_proved_from_both_sides(tp: int, damaged: bool) -> None:
    report = await fetch_a_prefix(tp, damaged=damaged)
    report.check()
    assert (report.proved, report.proved_fetches, report.one_sided) == (2, 1, {})
    assert [line.fetches for line in report.lines] == [0, *[1] * tp, 0]


@asynccontextmanager
async def let_go_before_reading(right: Any, self: NamedBlocks, names: Any) -> Any:
    async with right(self, names) as ids:
        pass
    yield ids


def keep_one_block_more(right: Any, self: Engine, reservation: Any, num_whole: int = 0) -> bool:
    return bool(right(self, reservation, num_whole + 1))


def say_that_all_came(right: Any, self: ReceivingBook, num_whole: int) -> None:
    right(self, 6)


def borrow_without_a_row(right: Any, self: ReceivingBook, peer: int, cells: Any) -> None:
    """It comes, and nobody writes that down."""


def count_the_best_rank(right: Any, self: Borrowing, order: Any, num_blocks: int) -> None:
    right(self, order, len(order.block_ids))


MISTAKES: dict[str, tuple[Plant, str]] = {
    "lends without a row": (plant(CellsServicer, "_note", note_nothing), "NEVER_LENT"),
    "lends what it has let go": (
        plant(NamedBlocks, "pinned", let_go_before_reading),
        "FREED_UNDER_LOAN",
    ),
    "keeps a block that has not come": (
        plant(Engine, "abandon", keep_one_block_more),
        "KEPT_UNFETCHED",
    ),
    "says that all came": (plant(ReceivingBook, "came", say_that_all_came), "INCOMPLETE"),
    "says that all is kept": (plant(Borrowing, "_enter", count_the_best_rank), "KEPT_UNFETCHED"),
    "takes cells without a row": (
        plant(ReceivingBook, "fetched", borrow_without_a_row),
        "WRONG_ACCOUNT",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_mistake_in_fetching_is_found(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, rule = MISTAKES[mistake]
    put(monkeypatch)
    with pytest.raises(AssertionError, match=rule):
        (await fetch_a_prefix(damaged=True)).check()
