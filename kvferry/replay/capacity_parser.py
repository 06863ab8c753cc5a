"""`kvferry capacity`: its arguments."""

from pathlib import Path
from typing import Annotated

import typer

from kvferry.flags import made_console, writable
from kvferry.replay.parser import (
    AttentionMs,
    BaseMs,
    First,
    MsPerToken,
    Shrink,
    SpeedsFile,
    StepMs,
    StepMsPerSequence,
    TraceFile,
    speeds_of,
)


def add_to(app: typer.Typer) -> None:
    app.command("capacity")(capacity)


def capacity(
    trace: TraceFile,
    ttft: Annotated[float, typer.Option(help="Seconds to the first token, at most.")],
    per_token: Annotated[float, typer.Option(help="Seconds for each further token, at most.")],
    share: Annotated[float, typer.Option(help="Of the requests that keep both.")] = 0.99,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Requests a second for which the smallest fleet is wanted."),
    ] = None,
    max_workers: Annotated[int, typer.Option(help="The largest fleet that is tried.")] = 6,
    policy: Annotated[str, typer.Option(help="How prefill is chosen; see replay.")] = "ours",
    cache_tokens: Annotated[
        int, typer.Option(min=1, help="Cache of a prefill worker.")
    ] = 1_000_000,
    decode_tokens: Annotated[
        int, typer.Option(min=1, help="Cache of a decode worker.")
    ] = 8_000_000,
    speeds: SpeedsFile = None,
    base_ms: BaseMs = None,
    ms_per_token: MsPerToken = None,
    attention_ms: AttentionMs = None,
    step_ms: StepMs = None,
    step_ms_per_sequence: StepMsPerSequence = None,
    tolerance: Annotated[
        float, typer.Option(min=0.001, max=0.5, help="Of the goodput that is found.")
    ] = 0.02,
    first: First = None,
    shrink: Shrink = 1,
    seed: Annotated[int, typer.Option(help="Of what is random.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Where the figures go, as JSON.", callback=writable)
    ] = Path("bench/out/capacity.json"),
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Where the plot goes.", show_default="beside it", callback=writable
        ),
    ] = None,
) -> None:
    """Find how many prefill and decode workers a trace needs to be served in time."""
    from kvferry.replay.capacity import Capacity
    from kvferry.replay.capacity_command import capacity_command
    from kvferry.replay.options import Options
    from kvferry.replay.rivals import policy_of
    from kvferry.replay.targets import Targets
    from kvferry.replay.trace import read_trace

    options = Options(
        policy=policy_of(policy),
        cache_tokens=cache_tokens,
        load=None,
        decode_tokens=decode_tokens,
        seed=seed,
        speeds=speeds_of(
            speeds, base_ms, ms_per_token, attention_ms, step_ms, step_ms_per_sequence
        ),
    )
    read = read_trace(trace).first(first).shrunk(shrink)
    asked = Capacity(read, options, Targets(1000 * ttft, 1000 * per_token, share), tolerance)
    picture = picture or out.with_suffix(".png")
    capacity_command(asked, rate, max_workers, out, picture, made_console())
