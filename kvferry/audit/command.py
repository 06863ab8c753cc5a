"""`kvferry audit`: the ledgers of several processes, merged and proved, or what broke them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from kvcache.ledger_pages import read_pages
from kvcache.ledger_row import Extract
from kvferry.audit.audit import audit
from kvferry.audit.live import absent_ranks, read_workers
from kvferry.audit.report import MOST_SHOWN, Report, Rule
from kvferry.errors import CommandError, NoCluster
from kvferry.ps import registered
from kvferry.settings import hide_password

SUFFIX = ".ledger"
COLUMNS = (
    "worker", "rows", "blocks", "in use", "transfers", "completed", "failed", "open", "fetches",
    "cells", "MiB", "repaired", "dropped",
)  # fmt: skip


def run(paths: Sequence[Path], console: Console, *, at_rest: bool = False) -> bool:
    """Print the report; whether no rule was broken. Raises CommandError for what is no ledger.

    Files of workers that run may be read, too: a row that is being written is not there yet.
    """
    extracts = read_files(paths)
    missing = absent_ranks([extract.origin for extract in extracts])
    return _shown(audit(extracts, at_rest=at_rest), missing, console)


async def run_live(
    redis_url: str,
    key_prefix: str,
    paths: Sequence[Path],
    console: Console,
    *,
    at_rest: bool = False,
) -> bool:
    """As `run`, over the workers that the index knows, and over the files of those that are gone.

    Raises CommandError when no worker is there.
    """
    workers = await registered(redis_url, key_prefix)
    if not workers:
        raise NoCluster(f"no worker is registered in {hide_password(redis_url)} under {key_prefix}")
    extracts, missing = await read_workers(workers)
    alive = {extract.origin for extract in extracts}
    extracts += [left for left in read_files(paths) if left.origin not in alive]
    missing += absent_ranks([extract.origin for extract in extracts])
    return _shown(audit(extracts, at_rest=at_rest), missing, console)


def read_files(paths: Sequence[Path]) -> list[Extract]:
    """Twice, as running workers are asked: theirs may grow meanwhile. Raises CommandError for what
    is no ledger.
    """
    try:
        before = {each.origin: each.last_seq for each in read_pages(_files(paths))}
        extracts = read_pages(_files(paths))
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    return [replace(each, common_seq=before.get(each.origin, 0)) for each in extracts]


def _shown(report: Report, missing: Sequence[str], console: Console) -> bool:
    console.print(_table(report))
    sides = Counter(report.one_sided.values())
    lost = [f"{sides[side]} transfers are without {side}" for side in sorted(sides)]
    for reason in (*missing, *lost):
        console.print(f"[yellow]side missing[/yellow] {reason}", highlight=False, soft_wrap=True)
    for line in report.lines:
        if line.rotten:
            what = f"{line.origin}: {line.rotten} cached blocks had changed, and were dropped"
            console.print(f"[yellow]rotten[/yellow] {what}", highlight=False, soft_wrap=True)
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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(COLUMNS[0], overflow="fold")  # a long name breaks, numbers never do
    for name in COLUMNS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    lives = Counter((line.origin.worker, line.origin.rank) for line in report.lines)
    for line in report.lines:
        numbers = (
            line.num_rows,
            line.num_blocks,
            line.blocks_in_use,
            line.transfers,
            line.completed,
            line.failed,
            line.still_open,
            line.fetches,
            line.cells,
            round(line.num_bytes / 2**20, 1),
            line.repaired,
            line.dropped,
        )
        named = f"{line.origin.worker} rank {line.origin.rank}"
        if lives[line.origin.worker, line.origin.rank] > 1:
            named += f"\nepoch {line.origin.epoch}"
        table.add_row(named, *map(str, numbers))
    return table


def _verdict(report: Report) -> str:
    words = [
        f"{len(Rule)} rules",
        f"{report.proved} transfers with both sides here",
        f"{report.proved_fetches} fetches likewise",
        f"{len(report.one_sided)} seen from one side only",
        f"{report.still_open} open",
        f"{report.in_flight_lost} chunks lost on the way",
        f"{len(report.broken)} broken rules" if report.broken else "no rule broken",
    ]
    return ", ".join(words)
