"""How much of a slow, far link transfers fill: 200 Mbit/s and 5 ms between two hosts of a lab.

`make bench-lab`, as root. The limit is what plain sockets carry over that link, in turn with ours.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from kvferry.bench_report import Row, publish, row
from kvferry.lab.lab import Lab, running_lab
from kvferry.lab.namespaces import why_no_namespaces
from kvferry.lab.topology import parse_topology
from kvferry.transfer_bench.case import Case
from kvferry.transfer_bench.pair import Pair, processes

OUT = Path("bench/out/lab.json")
LINK = "200mbit,5ms"
WIRES = ("tcp", "grpc")
NUM_BLOCKS = 8  # 4 MiB a transfer
CONCURRENCY = (1, 8)
RUNS = 5


async def measure(pair: Pair, lab: Lab, wire: str, concurrency: int) -> Row:
    case = Case(wire, NUM_BLOCKS, concurrency, host=lab.host("decode"))
    plain = Case("tcp", NUM_BLOCKS, concurrency, host=lab.host("decode"))
    ours, limit = list[float](), list[float]()
    async with pair.running(case):
        await pair.seconds(case)  # dials
        for _ in range(RUNS):
            ours.append(case.total_bytes / await pair.seconds(case) * 8 / 1e6)
            limit.append(plain.total_bytes / await pair.limit_seconds(plain) * 8 / 1e6)
    return row(f"{LINK}, {case}", ours, limit, unit="Mbit/s")


async def main() -> None:
    console = Console()
    if reason := why_no_namespaces():
        console.print(f"not measured: {reason}")
        return
    load = os.getloadavg()[0]
    rows: list[Row] = []
    topology = parse_topology("prefill,decode", [LINK])
    with tempfile.TemporaryDirectory() as folder:
        async with (
            running_lab(topology, Path(folder) / "lab", "namespaces") as lab,
            processes(lab.command) as pair,
        ):
            for wire in WIRES:
                for concurrency in CONCURRENCY:
                    rows.append(await measure(pair, lab, wire, concurrency))
    about = {"link": LINK, "limit": "one plain TCP connection over the same link"}
    publish(OUT, rows, console, load, about)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
