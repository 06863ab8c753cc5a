"""`kvferry replay`: its arguments."""

from pathlib import Path
from typing import Annotated

import typer

from kvferry.flags import made_console


def add_to(app: typer.Typer) -> None:
    app.command("replay")(replay)


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
    run(trace, policies, options, first, out, picture, decisions, made_console())
