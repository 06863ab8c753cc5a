"""Rows, pages and files of a ledger."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block_pool import BlockPool
from kvcache.ledger import Ledger
from kvcache.ledger_pages import PageConfig, read_pages
from kvcache.ledger_row import Account, Book, Origin, Reason, TransferKey, runs
from kvferry.audit.audit import audit

ORIGIN = Origin("w", "i1", 1, "decode", 0, 1)
SMALL = PageConfig(rows_per_page=16, num_kept=2)


def key(number: int) -> TransferKey:
    return TransferKey.of(number.to_bytes(16, "big"), 1, 1, 1)


def work(pool: BlockPool, num_requests: int) -> Iterator[list[int]]:
    """Blocks come and go; the last three stay with their owners."""
    held: list[list[int]] = []
    for _ in range(num_requests):
        held.append(pool.take(2))
        if len(held) > 3:
            pool.release(held.pop(0))
        yield held[-1]


def test_rows_are_numbered_from_one_and_say_what_was_posted() -> None:
    ledger = Ledger(ORIGIN)
    ledger.post_blocks(Account.FREE, Account.IN_USE, Reason.TAKEN, [4, 5, 6, 9])
    rows = ledger.extract().rows
    assert rows["seq"].tolist() == [1, 2]
    assert rows["first"].tolist() == [4, 9]
    assert rows["count"].tolist() == [3, 1]
    assert set(rows["book"].tolist()) == {Book.BLOCKS}


@pytest.mark.parametrize("before", [0, 10, 16])
def test_bindings_are_the_rows_that_post_would_write_over_pages_too(before: int) -> None:
    one_by_one, at_once = Ledger(ORIGIN, SMALL), Ledger(ORIGIN, SMALL)
    bound = [(7 * number % 40, 1 + number % 2) for number in range(20)]
    for ledger in (one_by_one, at_once):
        for number in range(before):
            ledger.post(Book.JOBS, Account.OUTSIDE, Account.READING, Reason.GATHERING, peer=number)
    accounts = (Account.OUTSIDE, Account.OUTSIDE)
    for block, count in bound:
        one_by_one.post(
            Book.BINDINGS, *accounts, Reason.READ, key=key(3), first=5, count=count, detail=block
        )
    at_once.post_bindings(Reason.READ, key(3), 5, bound)
    assert at_once.num_rows == one_by_one.num_rows == before + len(bound)
    found, want = at_once.extract(), one_by_one.extract()
    assert found.rows.tobytes() == want.rows.tobytes() and found.first_seq == want.first_seq
    at_once.post_bindings(Reason.READ, key(3), 5, [])
    assert at_once.num_rows == before + len(bound)


@given(st.lists(st.integers(0, 30), unique=True))
def test_runs_cover_the_same_blocks(numbers: list[int]) -> None:
    covered = [n for first, count in runs(numbers) for n in range(first, first + count)]
    assert sorted(covered) == sorted(numbers)


def test_only_newer_rows_are_read_since_a_number() -> None:
    ledger = Ledger(ORIGIN)
    for number in range(5):
        ledger.post(Book.JOBS, Account.OUTSIDE, Account.READING, Reason.GATHERING, key=key(number))
    assert ledger.extract(since=3).rows["seq"].tolist() == [4, 5]


def test_a_ledger_that_has_dropped_its_first_pages_still_balances() -> None:
    ledger = Ledger(ORIGIN, SMALL)
    pool = BlockPool(12, ledger)
    for _ in work(pool, 200):
        pool.take_stock()
    extract = ledger.extract()
    assert extract.first_seq > 1000
    report = audit([extract])
    report.check()
    assert report.lines[0].blocks_in_use == 6
    assert report.lines[0].num_blocks == 12


def test_transfers_that_are_open_are_brought_forward_and_ended_ones_are_not() -> None:
    ledger = Ledger(ORIGIN, SMALL)
    move = (Book.TRANSFERS, Account.OUTSIDE, Account.RESERVED, Reason.ORDERED)
    ledger.post(*move, key=key(1))
    ledger.post(*move, key=key(2))
    ledger.post(Book.TRANSFERS, Account.RESERVED, Account.ABORTING, Reason.CANCELLED, key=key(2))
    ledger.post(Book.TRANSFERS, Account.ABORTING, Account.FREED, Reason.FENCED, key=key(2))
    pool = BlockPool(12, ledger)
    for _ in work(pool, 50):
        pass
    extract = ledger.extract()
    transfers = extract.rows[extract.rows["book"] == Book.TRANSFERS]
    assert transfers["transfer_lo"].tolist() == [1]
    assert transfers["seq"].tolist() == [1]
    assert extract.first_seq > 1


def test_promises_are_brought_forward() -> None:
    ledger = Ledger(ORIGIN, SMALL)
    pool = BlockPool(12, ledger)
    pool.promise(3)
    for _ in work(pool, 50):
        pass
    pool.unpromise(3)
    audit([ledger.extract()]).check()


def test_pages_in_files_hold_the_same_rows(tmp_path: Path) -> None:
    ledger = Ledger(ORIGIN, PageConfig(16, 3, tmp_path))
    pool = BlockPool(12, ledger)
    for _ in work(pool, 60):
        pass
    (read,) = read_pages(tmp_path.iterdir())
    there = ledger.extract()
    assert read.origin == ORIGIN
    assert read.first_seq == there.first_seq > 1
    assert np.array_equal(read.rows, there.rows)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_killed_process_leaves_every_row_it_wrote(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from kvcache.ledger import Ledger;"
        "from kvcache.ledger_pages import PageConfig; from kvcache.ledger_row import Origin;"
        "from kvcache.block_pool import BlockPool;"
        "origin = Origin('w', 'i1', 1, 'decode', 0, 1);"
        "pool = BlockPool(12, Ledger(origin, PageConfig(64, 4, Path(sys.argv[1]))));"
        "[pool.release(pool.take(2)) for _ in range(40)]; pool.take(5);"
        "print('done', flush=True); time.sleep(60)"
    )
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        process.send_signal(signal.SIGKILL)
    report = audit(read_pages(tmp_path.iterdir()))
    report.check()
    assert report.lines[0].blocks_in_use == 5


def test_a_folder_that_takes_no_more_costs_the_file_and_no_row(tmp_path: Path) -> None:
    told: list[OSError] = []
    folder = tmp_path / "pages"
    config = PageConfig(rows_per_page=10, num_kept=100, folder=folder)
    ledger = Ledger(ORIGIN, config, told.append)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    for number in range(25):
        ledger.post_blocks(Account.FREE, Account.IN_USE, Reason.TAKEN, [number])
    assert len(told) == 2 and isinstance(told[0], OSError)
    assert ledger.extract().rows["first"].tolist() == list(range(25))
    with pytest.raises(OSError, match="pages"):
        Ledger(ORIGIN, config)


def test_a_disk_that_is_full_from_the_start_keeps_no_worker_from_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: list[OSError] = []
    monkeypatch.setattr(os, "posix_fallocate", full)
    ledger = Ledger(ORIGIN, PageConfig(folder=tmp_path), told.append)
    ledger.post_blocks(Account.FREE, Account.IN_USE, Reason.TAKEN, [7])
    assert ledger.extract().rows["first"].tolist() == [7]
    assert list(tmp_path.iterdir()) == []
    assert f"1049600 bytes: '{tmp_path}/w.i1.rank0.000000.ledger'" in str(told[0])


def test_a_page_has_its_room_on_the_disk_before_its_first_row(tmp_path: Path) -> None:
    Ledger(ORIGIN, PageConfig(folder=tmp_path))
    (page,) = tmp_path.glob("*.ledger")
    assert page.stat().st_blocks * 512 >= page.stat().st_size > 1 << 20


def test_a_torn_last_row_does_not_count(tmp_path: Path) -> None:
    ledger = Ledger(ORIGIN, PageConfig(16, 2, tmp_path))
    BlockPool(12, ledger).take(1)
    ledger.close()
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[1024 + 64 + 56 : 1024 + 128] = bytes(8)  # the number, written last
    path.write_bytes(data)
    (read,) = read_pages([path])
    assert read.rows["seq"].tolist() == [1]


def test_a_file_that_is_no_page_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * 2000)
    with pytest.raises(ValueError, match="other is no page of a ledger"):
        read_pages(tmp_path.iterdir())
