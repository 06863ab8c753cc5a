"""`kvferry up`: the whole cluster in one terminal, one line per part as it becomes ready."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from engine.clock import MonotonicClock
from kvferry.cluster import Cluster, running_cluster
from kvferry.launcher import PartEvent, PartState
from kvferry.role import describe
from kvferry.settings import Settings
from kvferry.stop import Stop


class Progress:
    """Turns events into lines: a checked fact each, with the time it took."""

    def __init__(self, console: Console, status: Status | None = None) -> None:
        self._console = console
        self._status = status
        self._starting: list[str] = []

    def __call__(self, event: PartEvent) -> None:
        if event.state is PartState.STARTING:
            self._starting.append(event.name)
        else:
            self._starting = [name for name in self._starting if name != event.name]
            self._console.print(_line(event), highlight=False, soft_wrap=True)
        if self._status is not None:
            waiting_for = ", ".join(self._starting) or "the router to see its workers"
            self._status.update(f"waiting for {waiting_for}")

    def done(self) -> None:
        """Nothing is being waited for any more."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def _line(event: PartEvent) -> str:
    name = f"{event.name:<10}"
    match event.state:
        case PartState.READY:
            return (
                f" [green]✔[/] {name} {escape(describe(event.info))}  [dim]{event.seconds:.1f} s[/]"
            )
        case PartState.DIED:
            return f" [yellow]✘[/] {name} {escape(event.text)}; starting it again"
        case PartState.FAILED:
            return f" [red]✘[/] {name} {escape(event.text)}"
        case _:
            return f" [dim]■ {name} stopped[/]"


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """SIGINT, SIGTERM or SIGHUP cancel the current task; another one ends the process at once.

    Whatever we started ends with us even then: the kernel sees to it.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stop = Stop(loop, task.cancel)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    except asyncio.CancelledError:
        if not stop.told:
            raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def up(settings: Settings, console: Console) -> None:
    """Run until told to stop. Raises CommandError when the cluster does not come up."""
    console.print(
        f"[bold]kvferry[/]  model {escape(settings.model)}  launcher {settings.launcher}",
        highlight=False,
    )
    clock = MonotonicClock()
    with cancelled_by_signals(), console.status("starting") as status:
        progress = Progress(console, status)
        async with running_cluster(settings, progress, clock) as cluster:
            progress.done()
            _welcome(cluster, settings, console)
            await asyncio.Event().wait()
    console.print("stopped", highlight=False)


def _welcome(cluster: Cluster, settings: Settings, console: Console) -> None:
    record = cluster.record
    lines = (
        f"[bold green]ready[/]  {record.http_url}/v1  grpc {record.grpc_address}",
        '  try   kvferry ask "Why is the sky blue?"     kvferry chat --explain     kvferry ps',
        f"  logs  {settings.state_dir}/logs",
        "  stop  Ctrl-C",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
