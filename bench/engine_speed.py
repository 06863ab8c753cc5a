"""How fast the engine is, beside other engines with the same weights on the same cores.

`make bench-engine`, eight minutes; `make bench-engines-env` installs the others, each with its own
packages. Every engine is a process; one at a time runs, the others are stopped meanwhile.
Repetitions are taken in turn. Contexts grow a little while decoding, by the same steps for all.

    ARGS='--weights dense' has all engines compute in fp32, half of the time; int8 is compared with
        llama.cpp's Q8_0 and vLLM, stored with both files that llama.cpp has, int4 with its Q4_1
    ARGS='--engine kvferry --engine vLLM --case decode-4 --runs 7 --threads 2' chooses

Roofline: a decode step reads all weights and the cache once, at the rate at which memory was read
in the same run; a prompt's products run at the rate of a large product, and causal attention's too.
That product is fp32's: weights of fewer bits may beat it.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.engines.files import default_file
from bench.engines.running import Contestant, Running
from kvferry.bench_report import Row, plot, publish, row, table

OUT = Path("bench/out/engine.json")
CONTEXT = 512
STEPS = 8
CASES = {
    **{f"prefill-{tokens}": tokens for tokens in (512, 2048)},
    **{f"decode-{batch}": batch for batch in (1, 4, 8, 16)},
}
RUNS = {"prefill-2048": 3}
USUAL_RUNS = 5
ENGINES = ("kvferry", "transformers", "vLLM", "llama.cpp")
PEERS = {  # of our form of weights
    "dense": ("transformers", "vLLM", "llama.cpp F32"),
    "stored": ("llama.cpp Q4_1", "llama.cpp Q8_0"),
    "int8": ("llama.cpp Q8_0", "vLLM"),
    "int4": ("llama.cpp Q4_1",),
    "bf16": ("vLLM", "llama.cpp F32"),
}
USUAL_FORMS = ("dense", "stored", "int8", "int4")
ALL = (
    *(Contestant("kvferry", form) for form in PEERS),
    Contestant("transformers"),
    Contestant("vLLM"),
    *(Contestant("llama.cpp", form) for form in ("dense", "int8", "stored")),
)

# SmolLM2-135M
LAYERS, WIDTH, KV_WIDTH, MIDDLE, VOCABULARY = 30, 576, 192, 1536, 49152
PER_LAYER = WIDTH * (2 * WIDTH + 2 * KV_WIDTH + 3 * MIDDLE)
HEAD = VOCABULARY * WIDTH
WEIGHTS = LAYERS * PER_LAYER + HEAD
WEIGHT_BYTES = {  # what a step reads of them
    "dense": 4.0 * WEIGHTS,
    "int8": 34 / 32 * WEIGHTS,
    "stored": 20 / 32 * LAYERS * PER_LAYER + 34 / 32 * HEAD,
    "int4": 20 / 32 * WEIGHTS,
    "bf16": 2.0 * WEIGHTS,
}
KV_BYTES = 4 * LAYERS * 2 * KV_WIDTH  # of a token
WIDE = 130  # columns
MORE_BYTES = 400 << 20  # that a worker may take beside its weights and its pool


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of the machine, in one repetition."""

    read: float  # bytes a second
    multiply: float  # floating-point operations a second


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one case: tokens a second by engine, and the limits, once a repetition."""

    case: str
    taken: dict[str, list[float]]
    speeds: list[Speeds]
    context: float  # mean length of the sequences while they were decoded


class Contexts:
    """Of the sequences that every engine holds: those of smaller batches have grown meanwhile."""

    def __init__(self) -> None:
        self._lengths: list[int] = []

    def grow(self, batch: int) -> None:
        self._lengths += [CONTEXT] * (batch - len(self._lengths))
        self.step(2)

    def step(self, steps: int) -> None:
        self._lengths = [length + steps for length in self._lengths]

    def mean(self) -> float:
        return statistics.mean(self._lengths)


def measure(
    engines: Sequence[Running], limits: Running, case: str, runs: int, contexts: Contexts
) -> Measured:
    size, decodes = CASES[case], case.startswith("decode")
    taken: dict[str, list[float]] = {engine.name: [] for engine in engines}
    speeds = []
    if decodes:
        for engine in engines:
            engine.ask(do="grow", batch=size, context=CONTEXT)
        contexts.grow(size)
    before = contexts.mean() if decodes else 0.0
    for _ in range(runs):
        read, multiply = (limits.ask(do="limits", what=what) for what in ("read", "multiply"))
        speeds.append(Speeds(read, multiply))
        for engine in engines:
            if decodes:
                rate = size * STEPS / engine.ask(do="decode", steps=STEPS)
            else:
                rate = size / engine.ask(do="prefill", tokens=size)
            taken[engine.name].append(rate)
    contexts.step(runs * STEPS if decodes else 0)
    return Measured(case, taken, speeds, before + runs * STEPS / 2)


def roofline(found: Measured, weights: str) -> list[float]:
    """Tokens a second, by the speeds of each repetition."""
    size = CASES[found.case]
    if found.case.startswith("decode"):
        num_bytes = WEIGHT_BYTES[weights] + size * found.context * KV_BYTES
        flops = 2.0 * size * WEIGHTS if weights in ("dense", "bf16") else 0
        return [size / max(num_bytes / each.read, flops / each.multiply) for each in found.speeds]
    flops = 2.0 * LAYERS * PER_LAYER * size + 2 * LAYERS * 2 * WIDTH * size * size / 2
    return [size / (flops / each.multiply) for each in found.speeds]


def report(engines: Sequence[Running], found: Measured) -> list[Row]:
    rows, unit = [], "tokens/s"
    for engine in engines:
        if engine.who.engine != "kvferry":
            continue
        weights, ours = engine.who.weights, found.taken[engine.name]
        limit, what = roofline(found, weights), f"{found.case} {weights}"
        peers = [name for name in PEERS[weights] if name in found.taken]
        rows += [row(what, ours, limit, name, found.taken[name], unit) for name in peers]
        if not peers:
            rows.append(row(what, ours, limit, unit=unit))
    return rows


def costs(engines: Sequence[Running]) -> list[Row]:
    rows = []
    theirs = {each.name: each for each in engines}
    for engine in engines:
        if engine.who.engine != "kvferry":
            continue
        peers = [name for name in PEERS[engine.who.weights] if name in theirs]
        pool = engine.ask(do="pool bytes")
        may = (WEIGHT_BYTES[engine.who.weights] + pool + MORE_BYTES) / 2**20
        resident, what = engine.resident_bytes / 2**20, f"{engine.name}: "
        rows.append(row(what + "resident after the start", [resident], [may], unit="MiB"))
        for name in peers:
            start_s = [theirs[name].start_s]
            rows.append(
                row(what + "start to first token", [engine.start_s], (), name, start_s, "s")
            )
    return rows


def overview(engines: Sequence[Running], all_found: Sequence[Measured]) -> Table:
    """Medians: an engine a row, a case a column, then what it costs."""
    made = Table(title="tokens/s")
    for name in ("engine", *(each.case for each in all_found), "start, s", "peak, MiB"):
        made.add_column(name, justify="left" if name == "engine" else "right")
    for engine in engines:
        rates = [f"{statistics.median(each.taken[engine.name]):.1f}" for each in all_found]
        peak = engine.peak_bytes() / 2**20
        made.add_row(engine.name, *rates, f"{engine.start_s:.1f}", f"{peak:.0f}")
    return made


def started(
    wanted: Sequence[Contestant], threads: int, console: Console
) -> tuple[list[Running], dict[str, str]]:
    """Those that start, and why others do not."""
    engines: list[Running] = []
    missing: dict[str, str] = {}
    for who in wanted:
        try:
            engines.append(Running(who, threads))
            console.print(f"{who}: first token after {engines[-1].start_s:.1f} s")
        except OSError as error:
            missing[str(who)] = str(error)
            console.print(f"{who} is left out: {error}")
    return engines, missing


def chosen(engines: Sequence[str], forms: Sequence[str]) -> list[Contestant]:
    names = {name for form in forms for name in (f"kvferry {form}", *PEERS[form])}
    return [who for who in ALL if who.engine in engines and str(who) in names]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--weights", action="append", choices=PEERS)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    console, began = Console(width=WIDE), time.perf_counter()
    load = os.getloadavg()[0]
    wanted = chosen(asked.engine or ENGINES, asked.weights or USUAL_FORMS)
    limits = Running(Contestant("limits"), asked.threads)
    engines, missing = started(wanted, asked.threads, console)
    rows: list[Row] = []
    all_found: list[Measured] = []
    contexts = Contexts()
    try:
        for case in (case for case in CASES if case in (asked.case or CASES)):
            runs = asked.runs or RUNS.get(case, USUAL_RUNS)
            all_found.append(measure(engines, limits, case, runs, contexts))
            rows += (new := report(engines, all_found[-1]))
            console.print(table(new))
        rows += costs(engines)
        console.print(overview(engines, all_found))
    finally:
        for engine in (*engines, limits):
            engine.close()
    speeds = [each for found in all_found for each in found.speeds]
    about = {
        "threads": asked.threads,
        "model": str(default_file().name),
        "left out": missing,
        "read GB/s": round(statistics.median(each.read for each in speeds) / 1e9, 1),
        "product GFLOP/s": round(statistics.median(each.multiply for each in speeds) / 1e9),
        "seconds": round(time.perf_counter() - began),
    }
    publish(OUT, rows, console, load, about)
    plot(OUT.with_suffix(".png"), rows, console, unit="tokens/s")
    console.print(about)


if __name__ == "__main__":
    main()
