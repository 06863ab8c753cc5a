"""What replays found: as JSON for machines, as a table and as a picture for people."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.replay.outcome import Outcome
from router.hit_rate import Loss

COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b7791f", "#97266d", "#4a5568", "#285e61")


def table(outcomes: Sequence[Outcome]) -> Table:
    """A line each. Hit rates are shares of all prompt tokens, times are to the first token."""
    made = Table()
    made.add_column("policy")
    for name in ("oracle", "available", "captured", "promised", "delivered"):
        made.add_column(name, justify="right")
    for name in ("imbalance", "mean", "p50", "p90", "p99", "prediction"):
        made.add_column(name, justify="right")
    for each in outcomes:
        rate = each.hit_rate
        error_ms = each.prediction_error_ms
        made.add_row(
            each.policy,
            *(f"{rate.rate(count):.1%}" for count in rate.chain()[1:]),
            f"{each.imbalance:.2f}",
            *(_seconds(each.ttft_ms(share)) for share in (None, 0.5, 0.9, 0.99)),
            f"± {_seconds(error_ms)}",
        )
    return made


def losses(outcomes: Sequence[Outcome]) -> Table:
    """Why prompt tokens were computed; with what was delivered a line adds up to 100 %."""
    made = Table()
    made.add_column("policy")
    made.add_column("delivered", justify="right")
    for loss in Loss:
        made.add_column(loss.value, justify="right")
    for each in outcomes:
        rate = each.hit_rate
        lost = (rate.rate(rate.lost.get(loss, 0)) for loss in Loss)
        made.add_row(
            each.policy, f"{rate.rate(rate.delivered):.1%}", *(f"{share:.1%}" for share in lost)
        )
    return made


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s"


def write(path: Path, outcomes: Sequence[Outcome], about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {**about, "replays": [each.summary() for each in outcomes]}
    path.write_text(json.dumps(found, indent=2) + "\n")


def plot(path: Path, outcomes: Sequence[Outcome], console: Console) -> None:
    """TTFT distribution, hit-rate split and load per replica; needs matplotlib, an optional one."""
    try:
        import matplotlib
    except ImportError:
        console.print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, split, load) = pyplot.subplots(1, 3, figsize=(17, 5))
    _plot_times(times, outcomes)
    _plot_split(split, outcomes)
    _plot_load(load, outcomes)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    console.print(f"plot: {path}", highlight=False, soft_wrap=True)


def _plot_times(axes: Any, outcomes: Sequence[Outcome]) -> None:
    for number, each in enumerate(outcomes):
        ordered = sorted(served.ttft_ms / 1000 for served in each.served)
        shares = [(at + 1) / len(ordered) for at in range(len(ordered))]
        axes.plot(ordered, shares, label=each.policy, color=COLOURS[number % len(COLOURS)])
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, s")
    axes.set_ylabel("share of requests")
    axes.legend()


def _plot_split(axes: Any, outcomes: Sequence[Outcome]) -> None:
    names = [each.policy for each in outcomes]
    rates = [each.hit_rate for each in outcomes]
    left = [100 * rate.rate(rate.delivered) for rate in rates]
    axes.barh(names, left, label="delivered", color="#2b6cb0")
    shown = [loss for loss in Loss if loss is not Loss.NEW]
    greys = ("#1a202c", "#c05621", "#b7791f", "#a0aec0", "#718096", "#e53e3e")
    for loss, colour in zip(shown, greys, strict=True):
        widths = [100 * rate.rate(rate.lost.get(loss, 0)) for rate in rates]
        axes.barh(names, widths, left=left, label=loss.value, color=colour)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("prompt tokens seen before, % of all")
    axes.legend(fontsize=8)


def _plot_load(axes: Any, outcomes: Sequence[Outcome]) -> None:
    width = 0.8 / len(outcomes)
    for number, each in enumerate(outcomes):
        busy = [100 * ms / 1000 / each.duration_s for ms in each.work_ms.values()]
        places = [at + number * width for at in range(len(busy))]
        colour = COLOURS[number % len(COLOURS)]
        axes.bar(places, busy, width, label=each.policy, color=colour)
    axes.set_xlabel("prefill replica")
    axes.set_ylabel("computing, % of the time")
