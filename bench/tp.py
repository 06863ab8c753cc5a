"""How fast several ranks of one host decode: activations added up in shared memory, or by gloo.

`make bench-tp`, two minutes. SmolLM2-135M, 2 and 3 ranks of one thread each, 512 tokens a sequence;
the two ways take turns, each with a group made for it. `ARGS='--size 2 --batch 1'` for less. The
limit is what gloo's ranks would do if their sums cost nothing: no exchange can be faster than that.
"""

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.engines.child import ROOM, Kvferry, prompt, share_of
from engine import follower
from engine.rank_group import GroupConfig, RankGroup, join
from kvferry.bench_report import Row, publish, row, table

OUT = Path("bench/out/tp.json")
MODEL = "smollm2"
SIZES, BATCHES = (2, 3), (1, 8)
CONTEXT = 512
ROUNDS = 3  # of each way, in turn
STEPS = 10
FOLLOW = "--follow"
PEER = "gloo over loopback"


def follow() -> None:
    """A rank above 0."""
    seat, _ = join([argument for argument in sys.argv[1:] if argument != FOLLOW])
    note = seat.wait("config", 30)
    comm = seat.connect(GroupConfig(note["size"], note["backend"]))
    _, model, store = share_of(MODEL, 1, "dense", comm, note["batch"] * ROOM // 16)
    follower.run(model, store, comm)


class Watched:
    """A rank's end of its group, and how long it was in sums."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.summing_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        summed: torch.Tensor = self._comm.all_reduce(tensor)
        self.summing_s += time.perf_counter() - began
        return summed


def lead(size: int, backend: Any, batch: int) -> tuple[float, float]:
    """Tokens a second, and how many there would be without the sums: medians of STEPS steps."""
    group = RankGroup(GroupConfig(size, backend), "bench.tp", [FOLLOW])
    group.start()
    try:
        group.publish("config", {"size": size, "backend": backend, "batch": batch})
        comm = Watched(group.connect())
        engine = Kvferry(MODEL, 1, "dense", comm, batch)
        source = random.Random(7)
        engine.prefill([prompt(source, CONTEXT) for _ in range(batch)])
        engine.step()
        taken, alone = [], []
        for _ in range(STEPS):
            comm.summing_s, began = 0.0, time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - began)
            alone.append(taken[-1] - comm.summing_s)
        return batch / statistics.median(taken), batch / statistics.median(alone)
    finally:
        group.stop(0.0)  # the others wait for a step that does not come


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, action="append", choices=SIZES)
    parser.add_argument("--batch", type=int, action="append", choices=BATCHES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    console, rows, load = Console(), list[Row](), os.getloadavg()[0]
    for size in asked.size or SIZES:
        for batch in asked.batch or BATCHES:
            taken: dict[str, list[tuple[float, float]]] = {"memory": [], "gloo": []}
            for _ in range(asked.rounds):
                for backend, found in taken.items():
                    found.append(lead(size, backend, batch))
            what, ours = f"TP {size}, decode of {batch}", [rate for rate, _ in taken["memory"]]
            theirs, limit = zip(*taken["gloo"], strict=True)
            rows.append(row(what, ours, limit, PEER, theirs, "tokens/s"))
            console.print(table(rows[-1:]))
    publish(OUT, rows, console, load)


if __name__ == "__main__":
    follow() if FOLLOW in sys.argv else main()
