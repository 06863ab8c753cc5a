"""`kvferry bench serve`: a trace against a running cluster.

warm up   links open, workers learn their speed; what was asked is never asked again
run       open loop, until the last answer or Ctrl-C
account   the router's own count of the same prompts, then tables, plot and JSON
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.clock import Clock, MonotonicClock
from kvferry.errors import CommandError
from kvferry.ps import registered
from kvferry.replay.report import plot
from kvferry.replay.targets import Targets
from kvferry.replay.trace import Trace
from kvferry.serve_bench.counted import Counted
from kvferry.serve_bench.doors import Door
from kvferry.serve_bench.load import OK, STOPPED, Load, Reply
from kvferry.serve_bench.measured import measured_speeds
from kvferry.serve_bench.report import show, write
from kvferry.serve_bench.results import Results
from kvferry.serve_bench.workload import Workload
from kvferry.up import cancelled_by_signals


@dataclass(frozen=True, slots=True)
class Plan:
    workload: Workload
    warm_up: int
    timeout_s: float
    targets: Targets | None = None


def paced(trace: Trace, rate: float | None, speed_up: float) -> Trace:
    """At a mean rate of requests a second, or so many times as fast as recorded."""
    if rate is not None and speed_up != 1.0:
        raise CommandError(f"--rate {rate:g} and --speed-up {speed_up:g} contradict each other")
    return trace.stretched(1 / speed_up) if rate is None else trace.at_rate(rate)


async def serve(
    plan: Plan, open_door: Callable[[], Door], http_url: str, clock: Clock, console: Console
) -> Results:
    """Run all of the plan. Ctrl-C ends it early, with what there is by then."""
    counted, door = Counted(http_url, clock), open_door()
    load = Load(door, clock, plan.timeout_s)
    try:
        with cancelled_by_signals():
            await _warm_up(plan, door, clock)
            await counted.begin()
            with _progress(len(plan.workload), console) as load.on_end:
                await load.run(plan.workload.ask(at) for at in range(len(plan.workload)))
        duration_s = clock.now() - load.started_at if load.replies else 0.0
        served = sum(reply.prompt_tokens for reply in load.replies if reply.code == OK)
        split = await counted.since(served)
    finally:
        await door.close()
    return Results(load.replies, len(plan.workload), duration_s, split, plan.targets)


async def _warm_up(plan: Plan, door: Door, clock: Clock) -> None:
    """Raises CommandError when none of it is served."""
    load = Load(door, clock, plan.timeout_s)
    await load.run(plan.workload.warm_up(plan.warm_up))
    if load.replies and all(reply.code != OK for reply in load.replies):
        first = load.replies[0]
        raise CommandError(f"no request of the warm-up was served: {first.code}: {first.message}")


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Callable[[Reply], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task, failed = bar.add_task("served", total=total), 0

        def ended(reply: Reply) -> None:
            nonlocal failed
            failed += reply.code != OK
            bar.update(task, advance=1, description=f"{failed} failed" if failed else "served")

        yield ended


def serve_command(
    plan: Plan,
    open_door: Callable[[], Door],
    http_url: str,
    index: tuple[str, str] | None,
    out: Path,
    picture: Path,
    about: dict[str, Any],
    console: Console,
) -> bool:
    """Run, show, leave the figures in `out`; whether all was sent. Raises CommandError.

    `index` is a Redis and the prefix of its keys, where workers say how fast they are.
    """
    clock = MonotonicClock()

    async def run() -> tuple[Results, dict[str, Any]]:
        results = await serve(plan, open_door, http_url, clock, console)
        if index is None:
            return results, {}
        records = await registered(*index)
        return results, {"speeds": asdict(measured_speeds(records, results))}

    results, speeds = asyncio.run(run())
    show(results, console)
    trace = plan.workload.trace
    known = {"trace": trace.name, "block_tokens": trace.block_tokens, "seed": plan.workload.seed}
    write(out, results, {**known, **about, **speeds})
    console.print(f"figures: {out}", highlight=False, soft_wrap=True)
    if results.served:
        plot(picture, [results.figures("live")], console)
    whole = len(results.replies) == results.num_planned and not results.failed[STOPPED]
    if not whole:
        console.print(f"stopped after {len(results.replies)} of {results.num_planned} requests")
    return whole
