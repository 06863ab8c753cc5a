"""`kvferry bench transfer`: its arguments."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from kvferry.flags import made_console, writable


def add_to(bench: typer.Typer) -> None:
    bench.command("transfer")(transfer)


def transfer(
    wire: Annotated[
        list[str] | None, typer.Option(help="Wires to measure.", show_default="shm tcp grpc gloo")
    ] = None,
    blocks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Blocks of a prompt, 0.5 MiB each.", show_default="128 512 16"),
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
        typer.Option(
            help="A Python that has mooncake and nixl.",
            show_default="that of make bench-peers-env",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where the rows go, as JSON.", callback=writable)
    ] = Path("bench/out/transfer.json"),
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Where the plot goes.", show_default="beside it", callback=writable
        ),
    ] = None,
) -> None:
    """Carry KV blocks between two processes over every wire, beside what the wire could carry."""
    from kvferry.bench_command import bench_transfer as run
    from kvferry.transfer_bench.plan import wanted_of

    wanted = wanted_of(wire, blocks, concurrency, pair, digests, chunk_kib)
    asyncio.run(
        run(wanted, runs, peer_python, out, picture or out.with_suffix(".png"), made_console())
    )
