"""What replays found: as JSON for machines, as a table and as a picture for people."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

from kvferry.replay.figures import Figures, quantile
from kvferry.replay.outcome import Outcome
from router.hit_rate import Loss

COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b7791f", "#97266d", "#4a5568", "#285e61")
GREYS = ("#1a202c", "#c05621", "#b7791f", "#a0aec0", "#718096", "#e53e3e")


def table(outcomes: Sequence[Outcome]) -> Group:
    """A line each, of shares of all prompt tokens and then of times to the first token."""
    rates = _table("policy", "oracle", "available", "captured", "promised", "delivered", "fetched")
    rates.add_column("imbalance", justify="right")
    times = _table("policy", "mean", "p50", "p90", "p99", "prediction", "regret", "per token")
    for each in outcomes:
        rate = each.hit_rate
        shares = (f"{rate.rate(count):.1%}" for count in (*rate.chain()[1:], rate.fetched))
        rates.add_row(each.policy, *shares, f"{each.imbalance:.2f}")
        times.add_row(
            each.policy,
            *(_seconds(each.ttft_ms(share)) for share in (None, 0.5, 0.9, 0.99)),
            f"± {_seconds(each.prediction_error_ms)}",
            _seconds(each.regret_ms),
            f"{quantile(each.figures.tpot_ms, 0.5):.1f} ms",
        )
    return Group(rates, times)


def _table(first: str, *others: str) -> Table:
    """Of names and numbers, narrow enough for a terminal of 100 columns."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column(first, no_wrap=True)
    for name in others:
        made.add_column(name, justify="right")
    return made


def losses(found: Sequence[Figures]) -> Table:
    """Why prompt tokens were computed; a line adds up to 100 %."""
    shown = _shown(found)
    made = _table("", "delivered", "fetched", *(loss.value for loss in shown))
    for each in found:
        rate = each.hit_rate
        counts = [rate.delivered, rate.fetched, *(rate.lost.get(loss, 0) for loss in shown)]
        made.add_row(each.name, *(f"{rate.rate(count):.1%}" for count in counts))
    return made


def _shown(found: Sequence[Figures]) -> list[Loss]:
    """A trace of one tenant loses nothing to walls."""
    walled = any(each.hit_rate.lost.get(Loss.TENANT) for each in found)
    return [loss for loss in Loss if walled or loss is not Loss.TENANT]


def failures(found: Sequence[Figures]) -> str:
    """Empty where nothing failed."""
    lines = [
        f"{each.name}: {count} failed: {why}"
        for each in found
        for why, count in sorted(each.failed.items())
    ]
    return "\n".join(lines)


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s"


def write(path: Path, outcomes: Sequence[Outcome], about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {**about, "replays": [each.summary() for each in outcomes]}
    path.write_text(json.dumps(found, indent=2) + "\n")


def plot(path: Path, found: Sequence[Figures], console: Console) -> None:
    """Both distributions, the hit-rate split and each replica's load; matplotlib is optional."""
    try:
        import matplotlib
    except ImportError:
        console.print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((times, paces), (split, load)) = pyplot.subplots(2, 2, figsize=(14, 9))
    _plot_times(times, {each.name: each.ttft_ms for each in found}, "time to first token, ms")
    _plot_times(paces, {each.name: each.tpot_ms for each in found}, "time per further token, ms")
    _plot_split(split, found)
    _plot_load(load, found)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    console.print(f"plot: {path}", highlight=False, soft_wrap=True)


def _plot_times(axes: Any, times_ms: Mapping[str, Sequence[float]], what: str) -> None:
    for number, (name, values) in enumerate(times_ms.items()):
        shares = [(at + 1) / len(values) for at in range(len(values))]
        axes.plot(sorted(values), shares, label=name, color=COLOURS[number % len(COLOURS)])
    if any(value > 0 for values in times_ms.values() for value in values):
        axes.set_xscale("log")
    axes.set_xlabel(what)
    axes.set_ylabel("share of requests")
    axes.legend()


def _plot_split(axes: Any, found: Sequence[Figures]) -> None:
    names = [each.name for each in found]
    rates = [each.hit_rate for each in found]
    left = [100 * rate.rate(rate.delivered) for rate in rates]
    axes.barh(names, left, label="delivered", color="#2b6cb0")
    fetched = [100 * rate.rate(rate.fetched) for rate in rates]
    if any(fetched):
        axes.barh(names, fetched, left=left, label="fetched", color="#2f855a")
        left = [start + width for start, width in zip(left, fetched, strict=True)]
    shown = [loss for loss in _shown(found) if loss is not Loss.NEW]
    for number, loss in enumerate(shown):
        colour = GREYS[number % len(GREYS)]
        widths = [100 * rate.rate(rate.lost.get(loss, 0)) for rate in rates]
        axes.barh(names, widths, left=left, label=loss.value, color=colour)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("prompt tokens seen before, % of all")
    axes.legend(fontsize=8)


def _plot_load(axes: Any, found: Sequence[Figures]) -> None:
    width = 0.8 / len(found)
    names = sorted({name for each in found for name in each.work})
    for number, each in enumerate(found):
        heights = [each.work.get(name, 0.0) for name in names]
        places = [at + number * width for at in range(len(names))]
        colour = COLOURS[number % len(COLOURS)]
        axes.bar(places, heights, width, label=each.name, color=colour)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(names))], names, rotation=30)
    axes.set_ylabel(" or ".join(dict.fromkeys(each.work_unit for each in found)))
