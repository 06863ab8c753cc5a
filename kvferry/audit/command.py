"""`kvferry audit`: the ledgers of several processes, merged and proved, or what broke them."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvcache.ledger_pages import read_pages
from kvferry.audit.audit import audit
from kvferry.audit.report import MOST_SHOWN, Report, Rule
from kvferry.errors import CommandError

SUFFIX = ".ledger"
COLUMNS = (
    "worker", "rows", "blocks", "in use", "transfers", "completed", "failed", "open", "cells",
    "MiB", "repaired", "dropped",
)  # fmt: skip


def run(paths: Sequence[Path], console: Console, *, at_rest: bool = False) -> bool:
    """Print the report; whether no rule was broken. Raises CommandError for what is no ledger.

    Files of workers that run may be read, too: a row that is being written is not there yet.
    """
    try:
        extracts = read_pages(_files(paths))
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    report = audit(extracts, at_rest=at_rest)
    console.print(_table(report))
    for broken in report.broken[:MOST_SHOWN]:
        console.print(f"[red]broken[/red] {broken}", highlight=False, soft_wrap=True)
    console.print(_verdict(report), highlight=False, soft_wrap=True)
    return report.whole


def _files(paths: Sequence[Path]) -> list[Path]:
    """The files themselves, and all ledgers of the folders."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not found:
            raise CommandError(
                f"{path} has no {SUFFIX} files: start workers with --set prefill.ledger_dir={path} "
                f"--set decode.ledger_dir={path}"
            )
        files += found
    return files


def _table(report: Report) -> Table:
    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "worker" else "right")
    for line in report.lines:
        numbers = (
            line.num_rows,
            line.num_blocks,
            line.blocks_in_use,
            line.transfers,
            line.completed,
            line.failed,
            line.still_open,
            line.cells,
            round(line.num_bytes / 2**20, 1),
            line.repaired,
            line.dropped,
        )
        table.add_row(str(line.origin), *map(str, numbers))
    return table


def _verdict(report: Report) -> str:
    words = [
        f"{len(Rule)} rules",
        f"{report.proved} transfers with both sides here",
        f"{len(report.one_sided)} seen from one side only",
        f"{report.still_open} open",
        f"{report.in_flight_lost} chunks lost on the way",
        f"{len(report.broken)} broken rules" if report.broken else "no rule broken",
    ]
    return ", ".join(words)
