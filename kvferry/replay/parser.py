"""`kvferry replay`: its arguments."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.flags import made_console, writable

if TYPE_CHECKING:
    from kvferry.replay.speeds import Speeds


SpeedsFile = Annotated[
    Path | None,
    typer.Option("--speeds", help="What workers need, as `bench serve` leaves it (JSON)."),
]
BaseMs = Annotated[
    float | None, typer.Option(help="To compute a prompt, whatever its length.", show_default="0")
]
MsPerToken = Annotated[
    float | None, typer.Option(help="To compute a prompt token.", show_default="0.1")
]
AttentionMs = Annotated[
    float | None,
    typer.Option(help="To compute it, for each token it looks at.", show_default="0"),
]
StepMs = Annotated[float | None, typer.Option(help="Of a decode step.", show_default="12")]
StepMsPerSequence = Annotated[
    float | None, typer.Option(help="Of it, for each sequence.", show_default="0.05")
]
First = Annotated[int | None, typer.Option(min=1, help="Only so many requests.")]
Shrink = Annotated[
    int, typer.Option(min=1, help="Divide all lengths by it, equal blocks staying equal.")
]
TraceFile = Annotated[
    Path,
    typer.Argument(help="Mooncake JSONL, token JSONL, Azure CSV, or text sessions (a folder)."),
]


def speeds_of(
    file: Path | None,
    base_ms: float | None,
    ms_per_token: float | None,
    attention_ms: float | None,
    step_ms: float | None,
    step_ms_per_sequence: float | None,
) -> "Speeds":
    """Those of the file, or the defaults, with what flags say instead. Raises CommandError."""
    from kvferry.replay.speeds import Speeds, read_speeds

    return (Speeds() if file is None else read_speeds(file)).changed(
        prefill_base_ms=base_ms,
        prefill_ms_per_token=ms_per_token,
        attention_ms=attention_ms,
        step_base_ms=step_ms,
        step_ms_per_sequence=step_ms_per_sequence,
    )


def add_to(app: typer.Typer) -> None:
    app.command("replay")(replay)


def replay(
    trace: TraceFile,
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
    routers: Annotated[
        int, typer.Option(min=1, help="Requests go to each in turn; they share the index alone.")
    ] = 1,
    decode_tokens: Annotated[int, typer.Option(min=1, help="Cache of each.")] = 8_000_000,
    decode_cache: Annotated[
        bool, typer.Option(help="Whether decode keeps what it held as cache, as it does.")
    ] = True,
    line: Annotated[
        bool,
        typer.Option(
            help="Whether requests wait at the router and are refused, as they are; `ours` alone"
            " does that."
        ),
    ] = False,
    fetch: Annotated[
        bool,
        typer.Option(help="Whether blocks may be fetched from who holds them, as they are."),
    ] = True,
    speeds: SpeedsFile = None,
    base_ms: BaseMs = None,
    ms_per_token: MsPerToken = None,
    attention_ms: AttentionMs = None,
    step_ms: StepMs = None,
    step_ms_per_sequence: StepMsPerSequence = None,
    index_lag: Annotated[
        float, typer.Option(min=0, help="Seconds until the index hears of a block.")
    ] = 0.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="kill:WORKER@SECONDS or restart:WORKER@SECONDS+SECONDS; a worker is prefill-0,"
            " decode-0, or redis."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is random.")] = 0,
    first: First = None,
    shrink: Shrink = 1,
    out: Annotated[
        Path, typer.Option(help="Where the figures go, as JSON.", callback=writable)
    ] = Path("bench/out/replay.json"),
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Where the plot goes.", show_default="beside it", callback=writable
        ),
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option(help="Where every decision goes.", callback=writable)
    ] = None,
) -> None:
    """Send a trace through the real router and index, with simulated workers in virtual time."""
    from kvferry.replay.command import replay_command as run
    from kvferry.replay.options import Options, parse_fault
    from kvferry.replay.rivals import Policy
    from kvferry.replay.trace import read_trace

    options = Options(
        num_replicas=replicas,
        cache_tokens=cache_tokens,
        load=load,
        num_decodes=decodes,
        num_routers=routers,
        decode_tokens=decode_tokens,
        decode_cache=decode_cache,
        fetches=fetch,
        line=line,
        index_lag_s=index_lag,
        faults=tuple(parse_fault(each) for each in fault or []),
        seed=seed,
        speeds=speeds_of(
            speeds, base_ms, ms_per_token, attention_ms, step_ms, step_ms_per_sequence
        ),
    )
    policies = policy or [each.value for each in Policy]
    picture = picture or out.with_suffix(".png")
    run(
        read_trace(trace).first(first).shrunk(shrink),
        policies,
        options,
        out,
        picture,
        decisions,
        made_console(),
    )
