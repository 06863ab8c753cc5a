"""The commands: what each takes, and which module does it.

Modules are imported by the command that needs them, so that every command says something at once.
"""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvferry.errors import CommandError

if TYPE_CHECKING:
    from kvferry.state import ClusterRecord
    from kvferry.talk import Door

app = typer.Typer(
    name="kvferry",
    help="A serving cluster whose prefill and decode run apart, with the KV cache shipped between.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

PIPED_WIDTH = 120

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
GrpcAddress = Annotated[
    str | None, typer.Option("--grpc", metavar="HOST:PORT", help="A router, instead of our own.")
]
ApiKey = Annotated[str | None, typer.Option(help="Where the router asks for one.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to answer with.")]
Temperature = Annotated[float, typer.Option(help="0: the likeliest token each time.")]
Seed = Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")]
Explain = Annotated[bool, typer.Option("--explain", help="Show where it went and what it cost.")]
System = Annotated[str | None, typer.Option(help="System prompt.")]


def _console() -> Console:
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
    asyncio.run(run(load(config, flags), _console()))


@app.command()
def demo(
    launcher: Annotated[str | None, typer.Option(help="ray or local.", show_default="ray")] = None,
) -> None:
    """Start a cluster, ask it three questions, show where each one went, stop."""
    from kvferry.demo import demo as run

    if not asyncio.run(run(launcher, _console())):
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
    asyncio.run(ask_once(_door(grpc, api_key, state_dir), question, system, manner, _console()))


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
    converse(_door(grpc, api_key, state_dir), system, manner, _console())


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
        whole = run(paths, _console(), at_rest=at_rest)
    else:
        if redis_url is None:
            record = _record(state_dir)
            redis_url, key_prefix = record.redis_url, key_prefix or record.key_prefix
        prefix, console = key_prefix or "kvferry", _console()
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
        record = _record(state_dir)
        redis_url, key_prefix = record.redis_url, key_prefix or record.key_prefix
    asyncio.run(run(redis_url, key_prefix or "kvferry", _console()))


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

    run(http or _record(state_dir).http_url, _console())


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
    run(workload, _console())


@app.command()
def replay(
    trace: Annotated[
        Path,
        typer.Argument(help="Mooncake JSONL, token JSONL, Azure CSV, or text sessions (a folder)."),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="ours, round-robin, least-loaded, random, first-block, most-cached, shared-cache,"
            " infinite-cache.",
            show_default="all of them",
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Prefill replicas.")] = 8,
    cache_tokens: Annotated[int, typer.Option(min=1, help="Cache of each.")] = 1_000_000,
    load: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Offered, as a share of what the replicas could do without any reuse.",
            show_default="as recorded",
        ),
    ] = None,
    decodes: Annotated[int, typer.Option(min=1, help="Decode replicas.")] = 2,
    decode_tokens: Annotated[int, typer.Option(min=1, help="Cache of each.")] = 8_000_000,
    ms_per_token: Annotated[float, typer.Option(min=0, help="To compute a prompt token.")] = 0.1,
    attention_ms: Annotated[
        float, typer.Option(min=0, help="To compute a prompt token, for each token it looks at.")
    ] = 0.0,
    index_lag: Annotated[
        float, typer.Option(min=0, max=2, help="Seconds until the index hears of a block.")
    ] = 0.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="kill:REPLICA@SECONDS or restart:REPLICA@SECONDS+SECONDS."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is random.")] = 0,
    first: Annotated[int | None, typer.Option(min=1, help="Only so many requests.")] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")] = Path(
        "bench/out/replay.json"
    ),
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Where the plot goes.", show_default="beside it")
    ] = None,
    decisions: Annotated[Path | None, typer.Option(help="Where every decision goes.")] = None,
) -> None:
    """Send a trace through the real router and index, with simulated workers in virtual time."""
    from kvferry.replay.command import replay_command as run
    from kvferry.replay.options import Options, parse_fault
    from kvferry.replay.rivals import Policy
    from kvferry.replay.speeds import Speeds

    options = Options(
        num_replicas=replicas,
        cache_tokens=cache_tokens,
        load=load,
        num_decodes=decodes,
        decode_tokens=decode_tokens,
        index_lag_s=index_lag,
        faults=tuple(parse_fault(each) for each in fault or []),
        seed=seed,
        speeds=Speeds(prefill_ms_per_token=ms_per_token, attention_ms=attention_ms),
    )
    policies = policy or [each.value for each in Policy]
    picture = picture or out.with_suffix(".png")
    run(trace, policies, options, first, out, picture, decisions, _console())


@bench_app.command("transfer")
def bench_transfer(
    wire: Annotated[
        list[str] | None, typer.Option(help="Wires to measure.", show_default="shm tcp grpc gloo")
    ] = None,
    blocks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Blocks of a prompt, 0.5 MiB each.", show_default="128 16"),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts at once.", show_default="1 4")
    ] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(help="TP degrees, prefill x decode.", show_default="1x1 1x2 4x2"),
    ] = None,
    digests: Annotated[
        str, typer.Option(help="on, off or both. Off is for measuring only.")
    ] = "both",
    chunk_kib: Annotated[
        int | None, typer.Option(min=64, max=8192, help="Payload of a message, in KiB.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Repetitions of each case.")] = 7,
    peer_python: Annotated[
        str | None,
        typer.Option(help="A Python that has mooncake and nixl.", show_default="this one"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the rows go, as JSON.")] = Path(
        "bench/out/transfer.json"
    ),
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Where the plot goes.", show_default="beside it")
    ] = None,
) -> None:
    """Carry KV blocks between two processes over every wire, beside what the wire could carry."""
    from kvferry.bench_command import bench_transfer as run
    from kvferry.transfer_bench.plan import wanted_of

    wanted = wanted_of(wire, blocks, concurrency, pair, digests, chunk_kib)
    asyncio.run(run(wanted, runs, peer_python, out, picture or out.with_suffix(".png"), _console()))


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


lab = typer.Typer(
    help="Several hosts out of this machine, with links as slow and as broken as asked for.",
    no_args_is_help=True,
)
app.add_typer(lab, name="lab")

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
    asyncio.run(run(_lab_folder(state_dir), topology, parse_kind(kind), _console()))


@lab.command("down")
def lab_down(state_dir: StateDir = None) -> None:
    """End the lab, or remove what one that was killed has left."""
    from kvferry.lab.commands import down as run

    asyncio.run(run(_lab_folder(state_dir), _console()))


@lab.command("show")
def lab_show(state_dir: StateDir = None) -> None:
    """Show nodes, addresses, links, what is wrong with them and what they have carried."""
    from kvferry.lab.commands import show as run

    asyncio.run(run(_lab_folder(state_dir), _console()))


@lab.command("exec", context_settings={"allow_interspersed_args": False})
def lab_exec(node: str, command: list[str], state_dir: StateDir = None) -> None:
    """Run a command inside a node: lab exec a -- ip address."""
    from kvferry.lab.commands import become

    become(_lab_folder(state_dir), node, command)


@lab.command("address")
def lab_address(source: str, target: str, port: int, state_dir: StateDir = None) -> None:
    """Print where SOURCE connects to reach what listens on PORT of TARGET."""
    from kvferry.lab.commands import address as run

    asyncio.run(run(_lab_folder(state_dir), source, target, port, _console()))


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


def _record(state_dir: Path | None) -> "ClusterRecord":
    from kvferry.settings import load
    from kvferry.state import read_record

    return read_record(load(flags=flags_of(None, state_dir=state_dir)).state_dir)


def _door(grpc: str | None, api_key: str | None, state_dir: Path | None) -> "Door":
    from kvferry.talk import Door

    if grpc is not None:
        return Door(grpc, api_key or "")
    record = _record(state_dir)
    return Door(record.grpc_address, api_key or record.api_key)
