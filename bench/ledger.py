"""What the ledger costs: a row, a page, and its share of a transfer's time.

`make bench-ledger`. A transfer runs with the ledger and without it in turn, both ends in one
process, over a real wire; the rows it wrote, at the price of a row, stand beside the difference.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from kvcache.block_pool import BlockPool
from kvcache.ledger import Ledger
from kvcache.ledger_pages import PageConfig
from kvcache.ledger_row import ROW_BYTES, Account, Book, Origin, Reason
from kvferry.audit.audit import audit
from kvferry.bench_report import Row, publish, row
from kvferry.transfer_bench.case import Case
from kvferry.transfer_bench.ends import DecodeEnd, PrefillEnd

OUT = Path("bench/out/ledger.json")
ORIGIN = Origin("bench", "i", 1, "decode", 0, 1)
RUNS = 21
ROWS = 50_000  # three pages
CASES = (Case("tcp", 128), Case("tcp", 16), Case("shm", 128))


def price(what: str, values: Sequence[float], unit: str) -> Row:
    """The least of the repetitions, which is the machine's own."""
    ours = min(values)
    spread = round((max(values) - ours) / ours, 3) if ours else 0.0
    return Row(what, round(ours, 4), unit, None, None, None, None, None, len(values), spread)


def post_us(folder: Path | None) -> float:
    """Microseconds a row, page turns included."""
    ledger = Ledger(ORIGIN, PageConfig(folder=folder))
    began = time.perf_counter()
    for number in range(ROWS):
        taken = number % 2 == 0
        ledger.post(
            Book.BLOCKS,
            Account.FREE if taken else Account.IN_USE,
            Account.IN_USE if taken else Account.FREE,
            Reason.TAKEN if taken else Reason.RELEASED,
            first=number // 2 % 4096,
            count=8,
        )
    return (time.perf_counter() - began) / ROWS * 1e6


def turn_ms() -> float:
    """The longest that one row waits, because a page is full."""
    ledger = Ledger(ORIGIN)
    pool = BlockPool(4096, ledger)
    longest = 0.0
    for _ in range(ROWS // 4):
        began = time.perf_counter()
        pool.release(pool.take(64))
        longest = max(longest, time.perf_counter() - began)
    return longest * 1e3


def audit_us() -> float:
    """Microseconds a row."""
    ledger = Ledger(ORIGIN)
    pool = BlockPool(4096, ledger)
    while ledger.num_rows < 16_000:
        pool.release(pool.take(8))
    extract = ledger.extract()
    began = time.perf_counter()
    audit([extract]).check()
    return (time.perf_counter() - began) / len(extract.rows) * 1e6


async def transfers(case: Case) -> tuple[list[float], list[float], int]:
    """Milliseconds with a ledger and without, and the rows of one transfer at both ends."""
    decode = DecodeEnd(case)
    addresses = await decode.start()
    prefill = PrefillEnd(case, addresses)
    await prefill.start()
    on: list[float] = []
    off: list[float] = []
    num_rows, posted = 0, Ledger.post

    def count(*args: object, **kwargs: object) -> None:
        nonlocal num_rows
        num_rows += 1
        posted(*args, **kwargs)  # type: ignore[arg-type]

    def nothing(*args: object, **kwargs: object) -> None:
        pass

    async def once(number: int) -> float:
        decode.expect(number)
        took = await prefill.ship(number)
        await decode.settle()
        return took * 1e3

    with patch.object(Ledger, "post", count):
        await once(0)
        num_rows = 0
        await once(1)
    for run in range(RUNS):
        for times, silent in ((on, False), (off, True)):
            number = 2 + 2 * run + silent
            with patch.object(Ledger, "post", nothing) if silent else nullcontext():
                times.append(await once(number))
    await prefill.close()
    await decode.close()
    return on, off, num_rows


async def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        to_file = [post_us(Path(folder)) for _ in range(RUNS)]
    in_memory = [post_us(None) for _ in range(RUNS)]
    rows = [
        price("a row, in memory", in_memory, "us"),
        price("a row, in a mapped file", to_file, "us"),
        price("rows a second, in memory", [1e6 / min(in_memory)], "rows/s"),
        price("bytes of a row", [ROW_BYTES], "bytes"),
        price("longest wait for a page", [turn_ms() for _ in range(RUNS)], "ms"),
        price("a row, audited", [audit_us() for _ in range(RUNS)], "us"),
    ]
    row_us = min(in_memory)
    for case in CASES:
        on, off, num_rows = await transfers(case)
        rows.append(row(f"{case}", on, peer="no ledger", peer_values=off, unit="ms"))
        share = num_rows * row_us / 1e3 / statistics.median(on) * 100
        rows.append(price(f"{case}: {num_rows} rows, their share", [share], "%"))
    return rows


def main() -> None:
    load = os.getloadavg()[0]
    rows = asyncio.run(measure())
    publish(OUT, rows, Console(width=110), load)


if __name__ == "__main__":
    main()
