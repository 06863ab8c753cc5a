"""`kvferry audit` reads what processes left in files, and says what it proves."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvcache.block_hash import BlockHash
from kvcache.ledger import Ledger
from kvcache.ledger_pages import PageConfig
from kvcache.ledger_row import Account, Book, Origin, Reason
from kvferry.audit.command import run
from kvferry.errors import CommandError
from tests.kvferry.audit_sides import Both, whole


def both_in(folder: Path) -> Both:
    pages = PageConfig(folder=folder)
    prefill = Ledger(Origin("p", "ip", 1, "prefill", 0, 1), pages)
    return Both(
        prefill, Ledger(replace(prefill.origin, worker="d", instance="id", role="decode"), pages)
    )


def said(paths: list[Path]) -> tuple[bool, str]:
    console = Console(width=200, record=True, quiet=False)
    return run(paths, console, at_rest=True), console.export_text()


def test_a_folder_of_both_sides_is_proved(tmp_path: Path) -> None:
    both = both_in(tmp_path)
    whole(both)
    proved, text = said([tmp_path])  # the processes still run
    assert proved
    assert "1 transfers with both sides here, 0 fetches likewise" in text
    assert "0 seen from one side only, 0 open" in text
    assert "no rule broken" in text


def test_a_side_without_a_file_is_no_alarm_and_no_proof(tmp_path: Path) -> None:
    whole(both_in(tmp_path))
    proved, text = said(sorted(tmp_path.glob("d.*")))
    assert proved
    assert "0 transfers with both sides here, 0 fetches likewise, 1 seen from one side only" in text


def test_a_broken_rule_is_named_with_transfer_layer_and_block(tmp_path: Path) -> None:
    both = both_in(tmp_path)
    both.begin()
    both.send(0)
    both.take(0)
    both.take(1)  # which was never sent
    both.end()
    both.let_go()
    proved, text = said([tmp_path])
    assert not proved
    assert "broken NEVER_SENT: " in text
    assert f"transfer {both.key.transfer_id.hex()}/1, layer 1, block 0" in text


def test_a_block_let_go_twice_is_named(tmp_path: Path) -> None:
    both = both_in(tmp_path)
    whole(both)
    both.decode.post(
        Book.BLOCKS, Account.IN_USE, Account.FREE, Reason.RELEASED, first=both.target[0], count=1
    )
    proved, text = said([tmp_path])
    assert not proved
    assert f"block {both.target[0]}" in text


def test_blocks_that_had_changed_are_counted_and_nobody_is_blamed(tmp_path: Path) -> None:
    pool = both_in(tmp_path).pools[1]
    first, second = pool.take(2)
    pool.name(first, BlockHash(b"a" * 32), None)
    pool.name(second, BlockHash(b"b" * 32), BlockHash(b"a" * 32))
    pool.release([second])
    assert pool.disown(BlockHash(b"a" * 32), first) == 2
    pool.release([first])
    pool.take_stock()
    proved, text = said([tmp_path])
    assert proved
    assert "rotten d rank 0 (epoch 1): 1 cached blocks had changed, and were dropped" in text


def test_what_is_no_ledger_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"has no .ledger files: start workers with --set"):
        said([tmp_path])
    (tmp_path / "a.ledger").write_bytes(b"x" * 2000)
    with pytest.raises(CommandError, match="is no page of a ledger"):
        said([tmp_path])
    with pytest.raises(CommandError, match="No such file"):
        said([tmp_path / "none.ledger"])


def test_lines_of_120_characters_have_room_for_each_name_and_number(tmp_path: Path) -> None:
    pages, console = PageConfig(folder=tmp_path), Console(width=120, record=True, quiet=False)
    lives = [("prefill-0", 1796068344326)]
    lives += [("prefill-1", 1796068348396), ("prefill-1", 1796068400000)]
    for name, epoch in lives:
        Ledger(Origin(name, f"{name}-{epoch}", epoch, "prefill", 0, 1), pages).close()
    assert run([tmp_path], console)
    text = console.export_text()
    assert "\u2026" not in text
    first = [line.split("  ")[0].strip() for line in text.splitlines()]
    assert [name for name in first if name.startswith(("prefill", "epoch"))] == [
        "prefill-0 rank 0",
        *("prefill-1 rank 0", "epoch 1796068348396"),
        *("prefill-1 rank 0", "epoch 1796068400000"),
    ]
