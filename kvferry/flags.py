"""Flags that several commands take, and what they mean as settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvferry.errors import CommandError

if TYPE_CHECKING:
    from kvferry.state import ClusterRecord
    from kvferry.talk import Door

PIPED_WIDTH = 120
MAX_PORT = 65_535

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Settings file (YAML).", show_default=False)
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as decode.num_blocks=512."),
]
Model = Annotated[
    str | None,
    typer.Option(help="Preset, GGUF file or Hugging Face folder.", show_default="smollm2"),
]
RedisUrl = Annotated[
    str | None, typer.Option(help="A Redis to use.", show_default="found or started here")
]
StateDir = Annotated[
    Path | None, typer.Option(help="Where the running cluster leaves word of itself.")
]


def _address(param: typer.CallbackParam, given: str | None) -> str | None:
    """Of an option: what gRPC would look up as a name, and say so in its own words, is refused."""
    host, _, port = (given or "").rpartition(":")
    named = host and port.isascii() and port.isdigit() and 1 <= int(port) <= MAX_PORT
    if given is not None and not named:
        raise CommandError(
            f"{param.opts[0]} must be HOST:PORT, such as 127.0.0.1:50051, got {given!r}"
        )
    return given


GrpcAddress = Annotated[
    str | None,
    typer.Option(
        "--grpc", metavar="HOST:PORT", help="A router, instead of our own.", callback=_address
    ),
]
ApiKey = Annotated[str | None, typer.Option(help="Where the router asks for one.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to answer with.")]
Temperature = Annotated[float, typer.Option(help="0: the likeliest token each time.")]
Seed = Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")]
Explain = Annotated[bool, typer.Option("--explain", help="Show where it went and what it cost.")]
System = Annotated[str | None, typer.Option(help="System prompt.")]


def writable(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Of an option: refused before anything runs whose outcome could not be kept."""
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        option = param.opts[0]
        raise CommandError(f"{option} {path} cannot be written: {error.strerror}") from error
    return path


def made_console() -> Console:
    """As wide as the terminal; lines that go into a file or a pipe are wide enough for tables."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, PIPED_WIDTH))


def flags_of(assignments: list[str] | None, **given: Any) -> dict[str, Any]:
    """Flags as nested settings: `router__http_port` goes into section `router`; None is absent."""
    from kvferry.settings import parse_assignments

    flags = parse_assignments(assignments or [])
    for key, value in given.items():
        if value is None:
            continue
        section, dunder, field = key.rpartition("__")
        target = flags.setdefault(section, {}) if dunder else flags
        if not isinstance(target, dict):
            raise CommandError(f"--set {section}=... hides the flags of its fields")
        target[field] = value
    return flags


def record(state_dir: Path | None, flag: str = "--grpc HOST:PORT") -> "ClusterRecord":
    """The running cluster; `flag` is what tells this command of another one. Raises NoCluster."""
    from kvferry.settings import load
    from kvferry.state import read_record

    return read_record(load(flags=flags_of(None, state_dir=state_dir)).state_dir, flag)


def door(grpc: str | None, api_key: str | None, state_dir: Path | None) -> "Door":
    from kvferry.talk import Door

    if grpc is not None:
        return Door(grpc, api_key or "")
    known = record(state_dir)
    return Door(known.grpc_address, api_key or known.api_key)
