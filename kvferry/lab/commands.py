"""What `kvferry lab ...` does: one function for each command."""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine.clock import MonotonicClock
from kvferry.errors import CommandError
from kvferry.lab.control import ask, controlled
from kvferry.lab.lab import Kind, Lab, is_held, only_lab, read_record, running_lab, sweep
from kvferry.lab.namespaces import why_no_namespaces, why_slow_links
from kvferry.lab.topology import Shape, Topology, parse_loss

DOWN_TIMEOUT_S = 20.0
STATE_DIR = "--state-dir"


async def up(folder: Path, topology: Topology, kind: Kind | None, console: Console) -> None:
    """Run until Ctrl-C or `lab down`. Raises CommandError."""
    from kvferry.up import cancelled_by_signals  # a second's worth, for this command only

    reason = why_no_namespaces()
    if kind is None and reason:
        _say(console, f"[yellow]links are TCP proxies on loopback[/]: {escape(reason)}")
    with cancelled_by_signals():
        async with running_lab(topology, folder, kind) as lab, controlled(lab, folder) as control:
            if lab.kind == "namespaces" and (slower := why_slow_links(topology)):
                _say(console, f"[yellow]note[/]: {slower}")
            _welcome(lab, console)
            await control.asked_to_stop.wait()
    _say(console, "stopped")


def _welcome(lab: Lab, console: Console) -> None:
    for node in lab.topology.nodes:
        _say(console, f" [green]✔[/] {node:<12} {lab.host(node)}")
    for one, other in lab.topology.pairs:
        _say(console, f"   {one} - {other}  {lab.topology.shape(one, other)}")
    one, other = lab.topology.nodes[:2]
    _say(console, f"[bold green]ready[/]  {lab.kind}")
    _say(console, f"  try   kvferry lab exec {one} -- COMMAND     kvferry lab cut {one} {other}")
    _say(console, "  stop  Ctrl-C")


async def down(folder: Path, console: Console) -> None:
    """End the running lab, or remove what a killed one left. Raises CommandError."""
    clock = MonotonicClock()
    if is_held(folder):
        await ask(folder, "stop")
        deadline = clock.now() + DOWN_TIMEOUT_S
        while is_held(folder):
            if clock.now() > deadline:
                pid = read_record(folder).pid
                raise CommandError(f"the lab does not stop: `kill -9 {pid}`, then this again")
            await clock.sleep(0.05)
        _say(console, "stopped")
        return
    if not (folder / "lab.json").exists():
        _say(console, "no lab is running, and none has left anything")
        return
    with only_lab(folder):
        removed = await sweep(folder, clock)
    _say(console, f"removed what a killed lab left: {', '.join(removed) or 'only its name'}")


async def show(folder: Path, console: Console) -> None:
    report = await ask(folder, "report")
    nodes = Table("node", "address", box=None)
    for node, host in report["hosts"].items():
        nodes.add_row(node, host)
    links = Table("from", "to", "link", "now", "packets", "bytes", "lost", "dropped", box=None)
    for link in report["links"]:
        links.add_row(link["source"], link["target"], *_describe(link))
    _say(console, f"[bold]{report['kind']}[/]")
    console.print(nodes, links)


def _describe(link: dict[str, Any]) -> Sequence[str]:
    condition, counts = link["condition"], link["counts"]
    now = "[red]cut[/]" if condition["is_cut"] else "whole"
    if counts is None:
        numbers = ["-"] * 4
    else:
        keys = ("num_carried", "num_bytes", "num_lost", "num_dropped")
        numbers = [f"{counts[key]:,}" for key in keys]
    return (str(Shape(**condition["shape"])), now, *numbers)


def change(folder: Path, what: str, **given: Any) -> None:
    """Have the running lab cut, heal or lose. Raises CommandError."""
    asyncio.run(ask(folder, what, **given))


def lose(folder: Path, source: str, target: str, loss: str, one_way: bool) -> None:
    share = parse_loss(loss)
    change(folder, "lose", source=source, target=target, loss=share, one_way=one_way)


async def address(folder: Path, source: str, target: str, port: int, console: Console) -> None:
    host, where = await ask(folder, "address", source=source, target=target, port=port)
    _say(console, f"{host}:{where}")


def own_options(words: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """What stands between NODE and `--`, the state folder, and the command. Raises CommandError for
    other options: a program's name begins with no dash.
    """
    state_dir: Path | None = None
    while words and words[0].startswith("-") and words[0] != "--":
        name, equals, value = words[0].partition("=")
        if name != STATE_DIR:
            raise CommandError(
                f"lab exec has no option {name}: what belongs to the command comes after its name,"
                " as in `kvferry lab exec NODE -- COMMAND`"
            )
        if not equals and len(words) < 2:
            raise CommandError(f"{name} needs a folder")
        state_dir, words = Path(value if equals else words[1]), words[1 if equals else 2 :]
    return state_dir, words


def become(folder: Path, node: str, command: Sequence[str]) -> None:
    """Go on as `command` inside the node. Raises CommandError."""
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        raise CommandError("say what to run: `kvferry lab exec NODE -- COMMAND`")
    record = read_record(folder)
    line = record.command(node, command)
    if record.namespaces and (reason := why_no_namespaces()):
        raise CommandError(reason)
    if shutil.which(command[0]) is None:
        raise CommandError(f"there is no program {command[0]}")
    os.execvp(line[0], line)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)
