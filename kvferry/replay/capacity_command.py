"""`kvferry capacity`: goodput by split, and the smallest fleet for a load."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvferry.errors import CommandError
from kvferry.replay.capacity import Capacity, Found, Split, Trial, splits
from kvferry.replay.command import silence
from kvferry.replay.report import COLOURS
from kvferry.replay.steadiness import may_mislead
from kvferry.replay.trials import Trials


def capacity_command(
    asked: Capacity,
    rate: float | None,
    max_workers: int,
    out: Path,
    picture: Path,
    console: Console,
    pool: Executor | None = None,
) -> list[Found]:
    """Search, show, and leave the figures in `out`; without a `pool` in as many processes as there
    are cores. Raises CommandError.
    """
    _refuse(asked, rate, max_workers)
    silence()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with ExitStack() as stack:
        pool = pool or stack.enter_context(
            ProcessPoolExecutor(os.cpu_count(), get_context("spawn"))
        )
        bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        trials = Trials(asked, pool, _Bar(asked, stack.enter_context(bar)))
        wanted = trials.smallest(rate, max_workers) if rate is not None else []
        found = trials.goodput([split for split, _ in wanted] or _all(max_workers))
    console.print(table(found, rate))
    if rate is not None:
        console.print(verdict(wanted, asked, rate), highlight=False, soft_wrap=True)
    doubts = list(may_mislead(asked, found))
    for sentence in doubts:
        console.print(f"too short: {sentence}", style="yellow", highlight=False, soft_wrap=True)
    _write(out, asked, rate, found, wanted, doubts)
    console.print(f"figures: {out}", highlight=False, soft_wrap=True)
    plot(picture, found, rate, console)
    return found


def _refuse(asked: Capacity, rate: float | None, max_workers: int) -> None:
    asked.targets.check()
    if rate is not None and not isfinite(rate):
        raise CommandError(f"--rate {rate}: must be a finite number")
    if max_workers < 2:
        raise CommandError(f"--max-workers {max_workers}: a fleet has at least 2")
    targets, best = asked.targets, asked.best_share()
    if best < targets.share:
        raise CommandError(
            f"no fleet keeps --ttft {targets.ttft_ms / 1000:g} and --per-token"
            f" {targets.tpot_ms / 1000:g} for {targets.share:.1%} of the requests: only {best:.1%}"
            " could be in time if each were served alone and everything stayed cached"
        )
    if asked.trace.duration_s <= 0:
        raise CommandError(
            f"{asked.trace.name} has no rate that could be changed: its"
            f" {len(asked.trace.arrivals)} requests come at one time"
        )


def _all(max_workers: int) -> list[Split]:
    return [split for size in range(2, max_workers + 1) for split in splits(size)]


class _Bar:
    """How far the search is, and what the last replay found."""

    def __init__(self, asked: Capacity, bar: Progress) -> None:
        self._asked = asked
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def replayed(self, trial: Trial, share: float) -> None:
        kept = share >= self._asked.targets.share
        said = f"{share:.1%} in time" if kept or trial.whole else "too many late"
        self._bar.update(
            self._task, description=f"{trial.split} at {trial.rate:.3g} requests/s: {said}"
        )

    def got_to(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)


def table(found: Sequence[Found], rate: float | None) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("workers", "prefill + decode", "goodput, requests/s", "of each worker"):
        made.add_column(heading, justify="right")
    made.add_column("in time", justify="right")
    if rate is not None:
        made.add_column(f"{rate:g}/s")
    for each in found:
        workers = each.split.num_workers
        cells = [str(workers), str(each.split), f"{each.rate:.3g}", f"{each.rate / workers:.3g}"]
        cells.append(f"{each.attained:.1%}" if each.rate else "-")
        if rate is not None:
            cells.append("enough" if each.rate >= rate else "")
        made.add_row(*cells)
    return made


def verdict(wanted: Sequence[tuple[Split, float]], asked: Capacity, rate: float) -> str:
    split, share = max(wanted, key=lambda each: each[1])
    kept = f"{share:.1%} of the requests in time at {rate:g}/s"
    if share >= asked.targets.share:
        return f"the smallest fleet is {split.num_workers} workers, {split}: {kept}"
    return f"no fleet of up to {split.num_workers} workers is enough; the best is {split}: {kept}"


def _write(
    path: Path,
    asked: Capacity,
    rate: float | None,
    found: Sequence[Found],
    wanted: Sequence[tuple[Split, float]],
    doubts: Sequence[str],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    options = asdict(asked.options) | {"policy": asked.options.policy.value}
    about: dict[str, Any] = {
        "trace": asked.trace.name,
        "targets": asdict(asked.targets),
        "options": options,
        "rate": rate,
        "at_rate": [{**asdict(split), "in_time": share} for split, share in wanted],
        "goodput": [asdict(each) for each in found],
        "too_short": list(doubts),
    }
    path.write_text(json.dumps(about, indent=2) + "\n")


def plot(path: Path, found: Sequence[Found], rate: float | None, console: Console) -> None:
    """Goodput over the number of prefill workers, a line for each size of fleet."""
    try:
        import matplotlib
    except ImportError:
        console.print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, workers in enumerate(sorted({each.split.num_workers for each in found})):
        mine = [each for each in found if each.split.num_workers == workers]
        places = [each.split.num_prefill for each in mine]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(places, [each.rate for each in mine], "o-", label=f"{workers}", color=colour)
    if rate is not None:
        axes.axhline(rate, color="#718096", linestyle="--")
    axes.set_xlabel("prefill workers; the others decode")
    axes.set_ylabel("goodput, requests/s")
    axes.legend(title="workers")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    console.print(f"plot: {path}", highlight=False, soft_wrap=True)
