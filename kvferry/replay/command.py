"""`kvferry replay`: a trace through the real router and index, under one policy or several."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.replay.options import Options
from kvferry.replay.outcome import Outcome
from kvferry.replay.report import failures, losses, plot, table, write
from kvferry.replay.rivals import Policy, policy_of
from kvferry.replay.simulation import replay
from kvferry.replay.trace import Trace


def replay_command(
    trace: Trace,
    policies: Sequence[str],
    options: Options,
    out: Path,
    picture: Path,
    decisions: Path | None,
    console: Console,
) -> list[Outcome]:
    """Replay under each policy, show, and leave the figures in `out`. Raises CommandError."""
    silence()
    outcomes = run_all(trace, [policy_of(name) for name in policies], options, console)
    console.print(table(outcomes))
    figures = [each.figures for each in outcomes]
    console.print(losses(figures))
    console.print(failures(figures), style="red", end="\n" if failures(figures) else "")
    if decisions is not None:
        _write_decisions(decisions, outcomes)
    write(out, outcomes, {"trace": trace.name, "requests": len(trace.arrivals), **_about(options)})
    console.print(f"figures: {out}", highlight=False, soft_wrap=True)
    plot(picture, figures, console)
    return outcomes


def silence() -> None:
    """Workers that come and go in virtual time are no news for this process's log."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def run_all(
    trace: Trace, policies: Sequence[Policy], options: Options, console: Console
) -> list[Outcome]:
    """The same arrivals and options under each policy, with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    outcomes = []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        for policy in policies:
            task = bar.add_task(policy.value, total=len(trace.arrivals))
            advance = partial(bar.advance, task)
            outcomes.append(replay(trace, replace(options, policy=policy), advance))
    return outcomes


def _about(options: Options) -> dict[str, object]:
    return {"options": {key: value for key, value in asdict(options).items() if key != "policy"}}


def _write_decisions(path: Path, outcomes: Sequence[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for outcome in outcomes:
            for each in outcome.decisions:
                file.write(f"{outcome.policy}\t{each.line()}\n")
