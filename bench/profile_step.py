"""Which part of a step takes how long, and how much longer than its bytes and operations must.

`make bench-profile_step`, two minutes. SmolLM2-135M in the engine that workers run, by a library
that counts (`TIMED` in kernels/team.h): steps of 1, 4, 8 and 16 sequences at 512 tokens, prompts of
512 and 2,048. A part's bound is the larger of its bytes over the rate at which memory was read, and
of its operations over that of a large product, both of the same repetition; what is lost is its
time beyond that. Waiting is what a member stood at a part's meetings, on average.

    ARGS='--case decode-4 --weights int8 --threads 1 --runs 9' chooses
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.engine_speed import (
    CASES,
    CONTEXT,
    HEAD,
    KV_BYTES,
    KV_WIDTH,
    LAYERS,
    MIDDLE,
    PEERS,
    WEIGHT_BYTES,
    WEIGHTS,
    WIDTH,
)  # fmt: skip
from bench.engines.child import MOST, Kvferry, prompt, share_of
from bench.engines.running import Contestant, Running
from kernels import host_decoder
from kvferry.bench_report import Row, publish, row
from model.host_decoder import CpuDecoder

OUT = Path("bench/out/profile_step.json")
CHUNK = 512  # tokens of a prompt that a step takes: the engine's usual budget
RUNS, STEPS = 5, 4  # steps after each measurement of the machine
BETWEEN, AROUND = "between calls", "around the model"  # in Python
LAYER_MATRICES = {  # weights of each
    "qkv": WIDTH * (WIDTH + 2 * KV_WIDTH),
    "o": WIDTH * WIDTH,
    "gate and up": WIDTH * 2 * MIDDLE,
    "down": WIDTH * MIDDLE,
}
FP32_FORMS = ("dense", "bf16")  # whose products run at the rate of the machine's in fp32


@dataclass(frozen=True, slots=True)
class Work:
    """What a part of a step, or of a prompt's steps, reads and computes."""

    num_bytes: float = 0.0
    flops: float = 0.0

    def bound_ms(self, read: float, multiply: float) -> float:
        return 1e3 * max(self.num_bytes / read, self.flops / multiply)


def decode_work(batch: int, context: float, weights: str) -> dict[str, Work]:
    """Of one step of `batch` sequences of so many tokens each."""
    per_weight, exact = WEIGHT_BYTES[weights] / WEIGHTS, weights in FP32_FORMS

    def product(num_weights: float) -> Work:
        return Work(per_weight * num_weights, 2.0 * batch * num_weights if exact else 0.0)

    work = {part: product(LAYERS * num) for part, num in LAYER_MATRICES.items()}
    seen = batch * context
    work["attention"] = Work(seen * KV_BYTES, 4.0 * LAYERS * WIDTH * seen)
    return work | {"head": product(HEAD)}


def prefill_work(tokens: int, weights: str) -> dict[str, Work]:
    """Of all steps of one prompt; its last layer attends and feeds forward for a single row."""
    per_weight, exact = WEIGHT_BYTES[weights] / WEIGHTS, weights in FP32_FORMS
    steps = -(-tokens // CHUNK)

    def product(num_weights: float, times: int, rows: float) -> Work:
        flops = 2.0 * rows * num_weights if exact else 0.0
        return Work(times * per_weight * num_weights, flops)

    rows = {part: (LAYERS - 1) * tokens + 1 for part in LAYER_MATRICES}
    rows["qkv"] = LAYERS * tokens
    work = {part: product(num, LAYERS * steps, rows[part]) for part, num in LAYER_MATRICES.items()}
    work["attention"] = Work(0.0, 4.0 * (LAYERS - 1) * WIDTH * tokens * (tokens + 1) / 2)
    return work | {"head": product(HEAD, 1, 1.0)}


class Profiled:
    """The engine over a model whose team counts; rank 0 of one."""

    def __init__(
        self, threads: int, weights: str, model: str = "smollm2", most: int = MOST
    ) -> None:
        kernel = host_decoder.load(timed=True)
        assert kernel is not None, "there is nothing to profile without a compiler"
        self.team = kernel.team(threads)
        self.forward_s = 0.0
        self.engine = Kvferry(model, threads, weights, most=most, share=self._share)

    def _share(self, *asked: Any) -> Any:
        source, model, store = share_of(*asked)
        assert isinstance(model, CpuDecoder), "torch computes this model"
        model.compute_with(self.team)
        return source, _Watched(model, self), store

    def parts(self, what: Any) -> dict[str, tuple[float, float]]:
        """The milliseconds that each part took, and that a member waited in it."""
        self.team.times()
        self.forward_s, began = 0.0, time.perf_counter()
        what()
        whole_ms = 1e3 * (time.perf_counter() - began)
        times_MPW: Tensor = self.team.times() / 1e6
        taken_P, waited_P = times_MPW[0].sum(1).tolist(), times_MPW[:, :, 1].mean(0).tolist()
        found = dict(zip(host_decoder.PARTS, zip(taken_P, waited_P, strict=True), strict=True))
        del found["outside"]
        in_c = sum(taken for taken, _ in found.values())
        forward_ms = 1e3 * self.forward_s
        return found | {BETWEEN: (forward_ms - in_c, 0.0), AROUND: (whole_ms - forward_ms, 0.0)}


class _Watched:
    """A model, and how long its steps take."""

    def __init__(self, model: CpuDecoder, of: Profiled) -> None:
        self._model, self._of = model, of
        self.spec = model.spec

    def forward(self, *asked: Any) -> Any:
        began = time.perf_counter()
        logits = self._model.forward(*asked)
        self._of.forward_s += time.perf_counter() - began
        return logits


@dataclass(frozen=True, slots=True)
class Part:
    """Medians over all repetitions, in milliseconds."""

    name: str
    work: Work
    taken: float
    waited: float
    bound: float

    @property
    def lost(self) -> float:
        return self.taken - self.bound


def profile(profiled: Profiled, limits: Running, case: str, runs: int, weights: str) -> list[Part]:
    size, decodes, source = CASES[case], case.startswith("decode"), random.Random(5)
    engine, context = profiled.engine, 0.0
    if decodes:
        engine.prefill([prompt(source, CONTEXT) for _ in range(size - engine.size)])
        engine.step()
        context = CONTEXT + 2 + runs * STEPS / 2  # those of smaller batches have some more
    work = decode_work(size, context, weights) if decodes else prefill_work(size, weights)
    found: list[dict[str, tuple[float, float]]] = []
    bounds: list[dict[str, float]] = []
    for _ in range(runs):
        read, multiply = (limits.ask(do="limits", what=what) for what in ("read", "multiply"))
        bounds.append({part: each.bound_ms(read, multiply) for part, each in work.items()})
        for _ in range(STEPS if decodes else 1):
            if decodes:
                found.append(profiled.parts(engine.step))
            else:
                found.append(profiled.parts(lambda: engine.prefill([prompt(source, size)])))
                engine.clear()
    return [
        Part(
            name,
            work.get(name, Work()),
            statistics.median(each[name][0] for each in found),
            statistics.median(each[name][1] for each in found),
            statistics.median(each.get(name, 0.0) for each in bounds),
        )
        for name in found[0]
    ]


def shown(case: str, weights: str, parts: Sequence[Part]) -> Table:
    whole = sum(part.taken for part in parts)
    made = Table(
        title=f"{case} {weights}: {whole:.1f} ms, {CASES[case] / whole * 1e3:.0f} tokens/s"
    )
    made.add_column("part")
    for name in ("MB", "GFLOP", "ms", "bound", "of it", "lost", "of all lost", "waited"):
        made.add_column(name, justify="right")
    total = Part(
        "all",
        Work(sum(each.work.num_bytes for each in parts), sum(each.work.flops for each in parts)),
        whole, sum(each.waited for each in parts), sum(each.bound for each in parts),
    )  # fmt: skip
    for part in (*parts, total):
        made.add_row(
            part.name,
            f"{part.work.num_bytes / 1e6:.1f}",
            f"{part.work.flops / 1e9:.2f}",
            f"{part.taken:.2f}",
            f"{part.bound:.2f}",
            f"{part.bound / part.taken:.0%}" if part.bound else "",
            f"{part.lost:.2f}",
            f"{part.lost / total.lost:.0%}",
            f"{part.waited:.2f}",
        )
    return made


def rows_of(case: str, weights: str, parts: Sequence[Part]) -> list[Row]:
    return [row(f"{case} {weights}, {p.name}", [p.taken], [p.bound], unit="ms") for p in parts]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--weights", choices=PEERS, default="dense")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    console, rows, load = Console(width=110), list[Row](), os.getloadavg()[0]
    limits = Running(Contestant("limits"), asked.threads)
    try:
        profiled = Profiled(asked.threads, asked.weights)
        for case in (case for case in CASES if case in (asked.case or CASES)):
            parts = profile(profiled, limits, case, asked.runs, asked.weights)
            console.print(shown(case, asked.weights, parts))
            rows += rows_of(case, asked.weights, parts)
    finally:
        limits.close()
    publish(OUT, rows, console, load, {"threads": asked.threads})


if __name__ == "__main__":
    main()
