"""Any legal history balances, and any single mistake in writing it down is found."""

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.block_hash import BlockHash
from kvcache.ledger_row import Account, Book, Extract, Reason
from kvferry.audit.audit import audit
from kvferry.audit.report import Rule
from protos.transfer_pb2 import CellRun
from tests.kvferry.audit_sides import Both, chunk, whole
from transport.books import lent
from transport.cell_runs import Cell
from transport.orders import Lender

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
