"""The commands: what each takes, and which module does it.

Modules are imported by the command that needs them, so that every command says something at once.
"""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.flags import (
    ApiKey,
    Assignments,
    ConfigFile,
    Explain,
    GrpcAddress,
    MaxTokens,
    Model,
    RedisUrl,
    Seed,
    StateDir,
    System,
    Temperature,
    door,
    flags_of,
    made_console,
    record,
)
from kvferry.lab import parser as lab_parser
from kvferry.replay import capacity_parser
from kvferry.replay import parser as replay_parser
from kvferry.serve_bench import parser as serve_parser
from kvferry.transfer_bench import parser as transfer_parser

app = typer.Typer(
    name="kvferry",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kvferry {version('kvferry')}")
        raise typer.Exit


@app.callback()
def kvferry(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """A serving cluster whose prefill and decode run apart, with the KV cache shipped between."""


@app.command()
def up(
    config: ConfigFile = None,
    model: Model = None,
    launcher: Annotated[
        str | None, typer.Option(help="ray, or local: no Ray.", show_default="ray")
    ] = None,
    redis_url: RedisUrl = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.", show_default="2")] = None,
    prefill_tp: Annotated[
        int | None, typer.Option(help="Ranks of each prefill worker.", show_default="1")
    ] = None,
    decode: Annotated[int | None, typer.Option(help="Decode groups.", show_default="1")] = None,
    decode_tp: Annotated[
        int | None, typer.Option(help="Ranks of each decode group.", show_default="2")
    ] = None,
    prefill_block_size: Annotated[
        int | None, typer.Option(help="Tokens of a prefill worker's block.", show_default="16")
    ] = None,
    decode_block_size: Annotated[
        int | None, typer.Option(help="Tokens of a decode group's block.", show_default="16")
    ] = None,
    wire: Annotated[
        list[str] | None, typer.Option(help="Wires KV blocks may take: shm, tcp, grpc, gloo, nccl.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="The OpenAI-compatible door.", show_default="8000")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="The gRPC door.", show_default="50051")
    ] = None,
    state_dir: StateDir = None,
    assign: Assignments = None,
) -> None:
    """Start a whole cluster here and keep it running until Ctrl-C."""
    from kvferry.settings import load
    from kvferry.up import up as run

    flags = flags_of(
        assign,
        model=model,
        launcher=launcher,
        redis_url=redis_url,
        num_prefill=prefill,
        num_decode=decode,
        wires=wire or None,
        state_dir=state_dir,
        prefill__tp=prefill_tp,
        decode__tp=decode_tp,
        prefill__block_size=prefill_block_size,
        decode__block_size=decode_block_size,
        router__http_port=http_port,
        router__grpc_port=grpc_port,
    )
    asyncio.run(run(load(config, flags), made_console()))


@app.command()
def demo(
    launcher: Annotated[str | None, typer.Option(help="ray or local.", show_default="ray")] = None,
) -> None:
    """Start a cluster, ask it three questions, show where each one went, stop."""
    from kvferry.demo import demo as run

    if not asyncio.run(run(launcher, made_console())):
        raise typer.Exit(1)


@app.command()
def ask(
    text: Annotated[
        list[str], typer.Argument(help="The question; - reads it from standard input.")
    ],
    system: System = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    explain: Explain = False,
    grpc: GrpcAddress = None,
    api_key: ApiKey = None,
    state_dir: StateDir = None,
) -> None:
    """Ask the running cluster one question and stream the answer."""
    from kvferry.talk import Manner, ask_once

    question = sys.stdin.read() if text == ["-"] else " ".join(text)
    manner = Manner(max_tokens, temperature, seed, explain)
    asyncio.run(ask_once(door(grpc, api_key, state_dir), question, system, manner, made_console()))


@app.command()
def chat(
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    seed: Seed = None,
    explain: Explain = False,
    grpc: GrpcAddress = None,
    api_key: ApiKey = None,
    state_dir: StateDir = None,
) -> None:
    """Talk with the running cluster; each turn finds the blocks of the turns before it."""
    from kvferry.talk import Manner, converse

    manner = Manner(max_tokens, temperature, seed, explain)
    converse(door(grpc, api_key, state_dir), system, manner, made_console())


@app.command()
def audit(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Page files, or folders of them.", show_default="the running workers"),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask the running workers, too, when files are given.")
    ] = False,
    at_rest: Annotated[
        bool, typer.Option("--at-rest", help="Nothing may be under way: what is open is a mistake.")
    ] = False,
    redis_url: RedisUrl = None,
    key_prefix: Annotated[str | None, typer.Option(help="Of the keys in Redis.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Prove from the ledgers of all workers that no block and no cell was lost or used twice."""
    from kvferry.audit.command import run, run_live

    if paths and not live:
        whole = run(paths, made_console(), at_rest=at_rest)
    else:
        if redis_url is None:
            known = record(state_dir, "--redis-url URL")
            redis_url, key_prefix = known.redis_url, key_prefix or known.key_prefix
        prefix, console = key_prefix or "kvferry", made_console()
        whole = asyncio.run(run_live(redis_url, prefix, paths or [], console, at_rest=at_rest))
    if not whole:
        raise typer.Exit(1)


@app.command()
def ps(
    redis_url: RedisUrl = None,
    key_prefix: Annotated[str | None, typer.Option(help="Of the keys in Redis.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Show the workers: role, epoch, load, pool, and which pairs cannot work together."""
    from kvferry.ps import ps as run

    if redis_url is None:
        known = record(state_dir, "--redis-url URL")
        redis_url, key_prefix = known.redis_url, key_prefix or known.key_prefix
    asyncio.run(run(redis_url, key_prefix or "kvferry", made_console()))


@app.command()
def stats(
    http: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A router's HTTP door, instead of our own."),
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Show how much of the prompts was reused, could have been, and what was in the way."""
    from kvferry.stats import stats as run

    run(http or record(state_dir, "--http URL").http_url, made_console())


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Preset, GGUF file or Hugging Face folder.")],
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each sequence.", show_default="the model's context"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the cached values.")] = "float16",
    bytes_per_value: Annotated[
        float | None, typer.Option(help="Instead of --dtype: 2 fp16, 1 fp8, 0.5 int4.")
    ] = None,
    share_layers: Annotated[
        int, typer.Option(min=1, help="Neighbouring layers that share one cache.")
    ] = 1,
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens a layer sees.", show_default="all")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Ranks of a worker.")] = 1,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
) -> None:
    """Say how much KV cache a workload needs, before anything is bought or started."""
    from kvferry.plan import Workload
    from kvferry.plan import plan as run

    workload = Workload(
        model, tokens, batch, dtype, bytes_per_value, share_layers, window, tp, block_size
    )
    run(workload, made_console())


@app.command()
def settings(
    config: ConfigFile = None,
    model: Model = None,
    redis_url: RedisUrl = None,
    assign: Assignments = None,
) -> None:
    """Show every setting there is and its value here: of the file, the environment, the flags."""
    from kvferry.settings import as_yaml, load

    composed = load(config, flags_of(assign, model=model, redis_url=redis_url))
    print(as_yaml(composed), end="")


replay_parser.add_to(app)
capacity_parser.add_to(app)

bench = typer.Typer(help="Measure this machine, or a running cluster.", no_args_is_help=True)
app.add_typer(bench, name="bench")
transfer_parser.add_to(bench)
serve_parser.add_to(bench)


@app.command()
def router(
    config: ConfigFile = None,
    model: Model = None,
    redis_url: RedisUrl = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    http_port: Annotated[int | None, typer.Option()] = None,
    grpc_port: Annotated[int | None, typer.Option()] = None,
    assign: Assignments = None,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a router in the foreground."""
    own = {"host": host, "http_port": http_port, "grpc_port": grpc_port}
    _run_role("router", config, ready_fd, assign, own, model=model, redis_url=redis_url)


@app.command()
def prefill(
    config: ConfigFile = None,
    name: Annotated[str | None, typer.Option(help="Unique in the cluster.")] = None,
    model: Model = None,
    redis_url: RedisUrl = None,
    tp: Annotated[int | None, typer.Option(help="Ranks.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option()] = None,
    system_port: Annotated[int | None, typer.Option()] = None,
    assign: Assignments = None,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a prefill worker in the foreground."""
    own = {"name": name, "tp": tp, "host": host, "port": port, "system_port": system_port}
    _run_role("prefill", config, ready_fd, assign, own, model=model, redis_url=redis_url)


@app.command()
def decode(
    config: ConfigFile = None,
    name: Annotated[str | None, typer.Option(help="Unique in the cluster.")] = None,
    model: Model = None,
    redis_url: RedisUrl = None,
    tp: Annotated[int | None, typer.Option(help="Ranks.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option()] = None,
    system_port: Annotated[int | None, typer.Option()] = None,
    assign: Assignments = None,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a decode group in the foreground."""
    own = {"name": name, "tp": tp, "host": host, "port": port, "system_port": system_port}
    _run_role("decode", config, ready_fd, assign, own, model=model, redis_url=redis_url)


lab_parser.add_to(app)


def _run_role(
    name: str,
    config: Path | None,
    ready_fd: int | None,
    assign: list[str] | None,
    own: dict[str, Any],
    **shared: Any,
) -> None:
    from kvferry.launcher import Role
    from kvferry.role import run_role
    from kvferry.settings import load

    flags = flags_of(assign, **shared, **{f"{name}__{key}": own[key] for key in own})
    raise typer.Exit(run_role(Role(name), load(config, flags), ready_fd))
