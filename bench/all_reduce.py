"""How long ranks of one host take to add up an activation: shared memory beside gloo's sockets.

`make bench-all_reduce`. Two or more processes, one thread each, in step; the two ways take turns.
"""

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from engine.rank_group import GroupConfig, RankGroup, join
from kvferry.bench_report import Row, publish, row
from model.comm import Comm

OUT = Path("bench/out/all_reduce.json")
WIDTH = 576  # SmolLM2-135M's
ROWS = (1, 8, 16, 512)
SIZES = (2, 3)
ROUNDS = 5  # of each way, in turn
CALLS = 200
FOLLOW = "--follow"
PEER = "gloo over loopback"


def measure(comm: Comm, rows: int) -> float:
    """Microseconds of one sum: the median of CALLS, one right after the other."""
    x_TE = torch.ones(rows, WIDTH)
    took = []
    for _ in range(CALLS):
        began = time.perf_counter()
        comm.all_reduce(x_TE)
        took.append(time.perf_counter() - began)
        x_TE.fill_(1.0)
    return statistics.median(took) * 1e6


def follow() -> None:
    """A rank above 0: the same calls as rank 0 makes."""
    torch.set_num_threads(1)
    seat, _ = join([argument for argument in sys.argv[1:] if argument != FOLLOW])
    note = seat.wait("config", 30)
    comm = seat.connect(GroupConfig(note["size"], note["backend"]))
    for rows in ROWS:
        measure(comm, rows)


def lead(size: int, backend: Any) -> list[float]:
    """One number for each of ROWS, from a group made for it."""
    group = RankGroup(GroupConfig(size, backend), "bench.all_reduce", [FOLLOW])
    group.start()
    try:
        group.publish("config", {"size": size, "backend": backend})
        comm = group.connect()
        return [measure(comm, rows) for rows in ROWS]
    finally:
        group.stop()


def main() -> None:
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows: list[Row] = []
    for size in SIZES:
        taken: dict[str, list[list[float]]] = {"memory": [], "gloo": []}
        for _ in range(ROUNDS):
            for backend, found in taken.items():
                found.append(lead(size, backend))
        for number, count in enumerate(ROWS):
            ours = [each[number] for each in taken["memory"]]
            theirs = [each[number] for each in taken["gloo"]]
            what = f"{size} ranks, {count} x {WIDTH} fp32"
            rows.append(row(what, ours, peer=PEER, peer_values=theirs, unit="us"))
    publish(OUT, rows, Console(), load)


if __name__ == "__main__":
    follow() if FOLLOW in sys.argv else main()
