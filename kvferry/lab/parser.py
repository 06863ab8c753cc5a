"""`kvferry lab`: its commands and their arguments."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from kvferry.flags import StateDir, flags_of, made_console

lab = typer.Typer(
    help="Several hosts out of this machine, with links as slow and as broken as asked for.",
    no_args_is_help=True,
)
OneWay = Annotated[bool, typer.Option("--one-way", help="Only from the first to the second.")]


@lab.command("up")
def lab_up(
    nodes: Annotated[str, typer.Option(help="How many, or their names: prefill,decode.")] = "2",
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[A-B=]RATE,DELAY[,LOSS]",
            help="Every link, or one: 1gbit,5ms or a-b=200mbit,20ms,0.1%.",
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="namespaces or proxy.", show_default="what works here")
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Make the nodes and links, and keep them until Ctrl-C or `lab down`."""
    from kvferry.lab.commands import up as run
    from kvferry.lab.lab import parse_kind
    from kvferry.lab.topology import parse_topology

    topology = parse_topology(nodes, link or [])
    asyncio.run(run(_lab_folder(state_dir), topology, parse_kind(kind), made_console()))


@lab.command("down")
def lab_down(state_dir: StateDir = None) -> None:
    """End the lab, or remove what one that was killed has left."""
    from kvferry.lab.commands import down as run

    asyncio.run(run(_lab_folder(state_dir), made_console()))


@lab.command("show")
def lab_show(state_dir: StateDir = None) -> None:
    """Show nodes, addresses, links, what is wrong with them and what they have carried."""
    from kvferry.lab.commands import show as run

    asyncio.run(run(_lab_folder(state_dir), made_console()))


@lab.command("exec", context_settings={"allow_interspersed_args": False})
def lab_exec(node: str, command: list[str], state_dir: StateDir = None) -> None:
    """Run a command inside a node: lab exec a -- ip address. Our options come before the --."""
    from kvferry.lab.commands import become, own_options

    late, words = own_options(command)
    become(_lab_folder(late or state_dir), node, words)


@lab.command("address")
def lab_address(
    source: str,
    target: str,
    port: Annotated[int, typer.Argument(min=1, max=65_535)],
    state_dir: StateDir = None,
) -> None:
    """Print where SOURCE connects to reach what listens on PORT of TARGET."""
    from kvferry.lab.commands import address as run

    asyncio.run(run(_lab_folder(state_dir), source, target, port, made_console()))


@lab.command("cut")
def lab_cut(source: str, target: str, one_way: OneWay = False, state_dir: StateDir = None) -> None:
    """Let nothing through between two nodes; nobody is told."""
    from kvferry.lab.commands import change

    change(_lab_folder(state_dir), "cut", source=source, target=target, one_way=one_way)


@lab.command("loss")
def lab_loss(
    source: str, target: str, loss: str, one_way: OneWay = False, state_dir: StateDir = None
) -> None:
    """Lose a share of the packets between two nodes, such as 0.5%."""
    from kvferry.lab.commands import lose

    lose(_lab_folder(state_dir), source, target, loss, one_way)


@lab.command("heal")
def lab_heal(
    source: Annotated[str | None, typer.Argument(show_default="all links")] = None,
    target: Annotated[str | None, typer.Argument(show_default="all of SOURCE's links")] = None,
    state_dir: StateDir = None,
) -> None:
    """Make links as they were at first."""
    from kvferry.lab.commands import change

    change(_lab_folder(state_dir), "heal", source=source, target=target)


def _lab_folder(state_dir: Path | None) -> Path:
    from kvferry.settings import load

    return load(flags=flags_of(None, state_dir=state_dir)).state_dir / "lab"


def add_to(app: typer.Typer) -> None:
    app.add_typer(lab, name="lab")
