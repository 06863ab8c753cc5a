"""`kvferry bench serve`: its arguments."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvferry.flags import ApiKey, GrpcAddress, StateDir, made_console, record, writable
from kvferry.replay.parser import First, Shrink, TraceFile


def add_to(bench: typer.Typer) -> None:
    bench.command("serve")(serve)


def serve(
    trace: TraceFile,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests a second, in the mean.")
    ] = None,
    speed_up: Annotated[
        float, typer.Option(min=1e-6, help="So many times as fast as recorded.")
    ] = 1.0,
    first: First = None,
    shrink: Shrink = 1,
    door: Annotated[str, typer.Option(help="grpc, or http: the OpenAI-compatible one.")] = "grpc",
    grpc: GrpcAddress = None,
    http: Annotated[
        str | None, typer.Option(metavar="URL", help="A router's HTTP door, instead of our own.")
    ] = None,
    model: Annotated[str, typer.Option(help="Its name, where the HTTP door serves.")] = "",
    api_key: ApiKey = None,
    tenant_key: Annotated[
        list[str] | None,
        typer.Option(metavar="TENANT=KEY", help="The API key of a tenant of the trace."),
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(min=2, help="Prompts are drawn from so many token ids.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Another one makes other prompts.")] = 0,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before the run.")] = 8,
    ttft: Annotated[
        float | None, typer.Option(help="Seconds to the first token that are in time.")
    ] = None,
    per_token: Annotated[
        float | None, typer.Option(help="Seconds for each further token that are in time.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds for a request.")] = 600.0,
    out: Annotated[
        Path, typer.Option(help="Where the figures go, as JSON.", callback=writable)
    ] = Path("bench/out/serve.json"),
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Where the plot goes.", show_default="beside it", callback=writable
        ),
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Send a trace to a running cluster, each request when it is due, and account for all."""
    from kvferry.replay.targets import Targets
    from kvferry.replay.trace import read_trace
    from kvferry.serve_bench.command import Plan, paced, serve_command
    from kvferry.serve_bench.doors import Keys, open_door, parse_keys
    from kvferry.serve_bench.workload import Workload

    known = record(state_dir) if grpc is None and http is None else None
    keys = parse_keys(tenant_key or [], api_key or (known.api_key if known else ""))
    grpc_address = grpc or (known.grpc_address if known else "")
    http_url = http or (known.http_url if known else "")
    read = paced(read_trace(trace).first(first).shrunk(shrink), rate, speed_up)
    targets = Targets.of(ttft, per_token)
    plan = Plan(Workload(read, vocabulary, seed), warm_up, timeout, targets)
    index = (known.redis_url, known.key_prefix) if known else None
    about = {"door": door, "vocabulary": vocabulary, "rate": rate, "speed_up": speed_up}
    opened = partial(open_door, door, grpc_address, http_url, model, Keys(keys))
    picture = picture or out.with_suffix(".png")
    if not serve_command(plan, opened, http_url, index, out, picture, about, made_console()):
        raise typer.Exit(130)
