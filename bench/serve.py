"""Does a live cluster reuse as much as a replay predicts? Exits 1 where the two differ by over 5 %.

`make bench-serve`: four prefill workers of 500 blocks and a decode worker of 1,000, all of the
checksum model, on this machine. They serve requests of the Mooncake conversation trace at 1/32 of
their lengths, so that a block of 512 tokens is one of 16, a hundred times as fast as recorded, over
three seeds; replays with the same policy, sizes and arrivals follow, at the speed that the workers
measured of themselves. ARGS='PATH [SEEDS [REQUESTS]]' names another trace.
"""

import asyncio
import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from engine.clock import MonotonicClock
from kvferry.cluster import running_cluster
from kvferry.launcher import PartEvent
from kvferry.replay.command import silence
from kvferry.replay.report import losses, plot
from kvferry.replay.trace import Trace, read_trace
from kvferry.serve_bench.side_by_side import Pair, compared, difference, figures, table
from kvferry.settings import Settings, load

TRACES = Path(__file__).parents[2] / "shared/traces"
TRACE = TRACES / "derived/conversation_s32_400.jsonl"
SHRINK = 32
RATE = 10.0  # requests a second
MOST_APART = 0.05
OUT = Path("bench/out/serve-and-replay.json")


def cluster_settings(folder: Path) -> Settings:
    http_port, grpc_port = _free_port(), _free_port()
    return load(
        flags={
            "model": "checksum",
            "launcher": "local",
            "num_prefill": 4,
            "num_decode": 1,
            "state_dir": folder,
            "router": {
                "http_port": http_port,
                "grpc_port": grpc_port,
                "fetch_blocks": False,  # what a fetch takes nobody has measured before
            },
            "prefill": {"num_blocks": 500},
            "decode": {"num_blocks": 1000, "tp": 1},
        }
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


async def compare(trace: Trace, num_seeds: int, console: Console) -> list[Pair]:
    clock = MonotonicClock()

    def report(event: PartEvent) -> None:
        if event.text:
            console.print(f"{event.name}: {event.text}", markup=False)

    with tempfile.TemporaryDirectory() as folder:
        settings = cluster_settings(Path(folder))
        async with running_cluster(settings, report, clock) as cluster:
            return [
                await compared(cluster, settings, trace, seed, clock, console)
                for seed in range(num_seeds)
            ]


def main() -> int:
    console = Console(width=150)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE
    num_seeds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 400
    if not path.exists():
        console.print(f"{path} is not here: name a trace, as ARGS=PATH")
        return 2
    silence()
    trace = read_trace(path).first(first)
    if trace.block_tokens != 16:
        trace = trace.shrunk(SHRINK)
    pairs = asyncio.run(compare(trace.at_rate(RATE), num_seeds, console))
    apart = difference(pairs)
    console.print(table(pairs))
    console.print(losses(figures(pairs)))
    plot(OUT.with_suffix(".png"), figures(pairs), console)
    found = [
        {"seed": pair.seed, "live": pair.live.summary(), "replay": pair.replayed.summary()}
        for pair in pairs
    ]
    about = {"bench": "serve", "trace": trace.name, "apart": apart, "load": os.getloadavg()[0]}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({**about, "pairs": found}, indent=2) + "\n")
    kept = abs(apart) <= MOST_APART
    console.print(
        f"{'kept' if kept else 'MISSED'}: live reuses {apart:+.1%} against the replay,"
        f" at most ±{MOST_APART:.0%}",
        highlight=False,
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
