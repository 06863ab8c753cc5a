"""What was measured: as rows for machines, as a table and as a picture for people."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison, of medians. `spread` is (highest - lowest) / median of our repetitions."""

    what: str
    ours: float
    unit: str
    peer: str | None
    peer_value: float | None
    ratio: float | None  # ours / peer
    limit: float | None
    share_of_limit: float | None
    runs: int
    spread: float


def row(
    what: str,
    ours: Sequence[float],
    limit: Sequence[float] = (),
    peer: str | None = None,
    peer_values: Sequence[float] = (),
    unit: str = "GB/s",
) -> Row:
    """Of repetitions; the limit's and the peer's were taken in turn with ours."""
    value = statistics.median(ours)
    theirs = statistics.median(peer_values) if peer_values else None
    most = statistics.median(limit) if limit else None
    return Row(
        what,
        round(value, 3),
        unit,
        peer,
        round(theirs, 3) if theirs is not None else None,
        round(value / theirs, 3) if theirs else None,
        round(most, 3) if most is not None else None,
        round(value / most, 3) if most else None,
        len(ours),
        round((max(ours) - min(ours)) / abs(value), 3) if value else 0.0,
    )


def table(rows: Sequence[Row]) -> Table:
    made = Table()
    made.add_column("what")
    for name in ("ours", "limit", "share", "peer", "ours / peer", "runs", "spread"):
        made.add_column(name, justify="left" if name == "peer" else "right")
    for each in rows:
        peer = each.peer or ""
        if each.peer_value is not None:
            peer = f"{each.peer_value:.2f} {peer}"
        made.add_row(
            each.what,
            f"{each.ours:.2f} {each.unit}",
            f"{each.limit:.2f}" if each.limit is not None else "",
            f"{each.share_of_limit:.0%}" if each.share_of_limit is not None else "",
            peer,
            f"{each.ratio:.2f}x" if each.ratio is not None else "",
            str(each.runs),
            f"{each.spread:.0%}",
        )
    return made


def line(each: Row) -> str:
    """One row, for who waits for the others."""
    bar = f", at most {each.limit:g}" if each.limit is not None else ""
    peer = f"; {each.peer}: {each.peer_value:g}" if each.peer_value is not None else ""
    return f"{each.what}: {each.ours:g} {each.unit}{bar}{peer}"


def write(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {**about, "rows": [asdict(each) for each in rows]}
    path.write_text(json.dumps(found, indent=2) + "\n")


def publish(
    out: Path,
    rows: Sequence[Row],
    console: Console,
    load_before: float,
    about: Mapping[str, Any] | None = None,
    *,
    bars: bool = False,
) -> int:
    """How every benchmark ends: the table, the rows as JSON beside what the machine was, and what
    was missed. `load_before` is `os.getloadavg()[0]` of before it began. With `bars` a row's limit
    is the most that it may be, and more is a miss; else it is what nothing can exceed. Returns what
    to exit with: 1 where something was missed.
    """
    console.print(table(rows))
    load = [round(load_before, 2), round(os.getloadavg()[0], 2)]
    machine = {"cpus": os.cpu_count(), "system": platform.platform(), "load": load}
    write(out, rows, {"bench": out.stem, "machine": machine, **(about or {})})
    said = f"load of the machine before and after: {load[0]}, {load[1]}; rows: {out}"
    console.print(said, highlight=False, soft_wrap=True)
    missed = [each.what for each in rows if bars and (each.share_of_limit or 0) > 1]
    for what in missed:
        console.print(f"MISSED: {what}", highlight=False, soft_wrap=True)
    return 1 if missed else 0


def plot(path: Path, rows: Sequence[Row], console: Console, unit: str = "GB/s") -> None:
    """A bar for each row in this unit, beside its limit and its peer; matplotlib is optional."""
    try:
        import matplotlib
    except ImportError:
        console.print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [each for each in rows if each.unit == unit]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.45 * len(drawn)))
    places = range(len(drawn))
    axes.barh(places, [each.limit or 0 for each in drawn], 0.8, color="#d9d9d9", label="limit")
    axes.barh(places, [each.ours for each in drawn], 0.5, color="#2b6cb0", label="kvferry")
    peers = [(i, each.peer_value) for i, each in enumerate(drawn) if each.peer_value]
    if peers:
        axes.plot([value for _, value in peers], [i for i, _ in peers], "k|", ms=16, label="peer")
    axes.set_yticks(list(places), [each.what for each in drawn])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    console.print(f"plot: {path}", highlight=False, soft_wrap=True)
