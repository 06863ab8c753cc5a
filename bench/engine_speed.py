"""How fast the engine is, beside other engines with the same weights on the same cores.

`make bench-engine`; `make bench-engines-env` installs the others, each with its own packages.
Every engine is a process; one at a time runs, the others are stopped meanwhile. Repetitions are
taken in turn. Contexts grow a little while decoding, by the same steps for all.

    ARGS='--engine kvferry --engine vLLM --case decode-4 --runs 7 --threads 2' chooses
    ARGS='--weights int8' has kvferry quantise them, and llama.cpp take Q8_0
    ARGS='--weights stored' has both take the file's own Q4_1 and Q8_0; the others stay in fp32

Roofline: a decode step reads all weights and the cache once, at the rate at which memory was read
in the same run; a prompt's products run at the rate of a large product, and causal attention's too.
That product is fp32's: weights of fewer bits may beat it.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.engines.files import default_file, fp32_gguf, hugging_face_folder, q8_0_gguf
from kvferry.die_with_parent import wrap
from kvferry.transfer_bench.report import Row, plot, row, table, write

OUT = Path("bench/out/engine.json")
CHILD = Path(__file__).with_name("engines") / "child.py"
PEERS = Path(".venv-peers")
CONTEXT = 512
STEPS = 8
CASES = {
    **{f"decode-{batch}": batch for batch in (1, 4, 8, 16)},
    **{f"prefill-{tokens}": tokens for tokens in (512, 2048)},
}
ENGINES = ("kvferry", "transformers", "vLLM", "llama.cpp")

# SmolLM2-135M
LAYERS, WIDTH, KV_WIDTH, MIDDLE, VOCABULARY = 30, 576, 192, 1536, 49152
PER_LAYER = WIDTH * (2 * WIDTH + 2 * KV_WIDTH + 3 * MIDDLE)
HEAD = VOCABULARY * WIDTH
WEIGHTS = LAYERS * PER_LAYER + HEAD
WEIGHT_BYTES = {  # what a step reads of them
    "dense": 4.0 * WEIGHTS,
    "int8": 34 / 32 * WEIGHTS,
    "stored": 20 / 32 * LAYERS * PER_LAYER + 34 / 32 * HEAD,
}
KV_BYTES = 4 * LAYERS * 2 * KV_WIDTH  # of a token


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of the machine, in one repetition."""

    read: float  # bytes a second
    multiply: float  # floating-point operations a second


class Running:
    """One engine's process; stopped but for the time in which it is asked something."""

    def __init__(self, name: str, threads: int, weights: str = "dense") -> None:
        self.name = name
        began = time.perf_counter()
        python, model, environment = _environment(name, threads, weights)
        more = [weights] if name == "kvferry" else []
        self._process = subprocess.Popen(
            wrap((python, str(CHILD), name, model, str(threads), *more), os.getpid()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | environment,
        )
        self._read()
        self.start_s = time.perf_counter() - began
        self._stop()

    def ask(self, **asked: Any) -> float:
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found = float(self._read())
        self._stop()
        return found

    def peak_bytes(self) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def _read(self) -> Any:
        """The next answer, past whatever else a library prints."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise OSError(f"{self.name} ended with exit code {self._process.wait()}")


def _environment(name: str, threads: int, weights: str) -> tuple[str, str, dict[str, str]]:
    """Python, model and variables of an engine. Raises OSError where it is not installed."""
    root = str(CHILD.parents[2])
    if name in ("kvferry", "limits"):
        return sys.executable, "smollm2", {"PYTHONPATH": root}
    if name == "transformers":
        return sys.executable, str(hugging_face_folder()), {"HF_HUB_OFFLINE": "1"}
    python = PEERS / name.lower() / "bin" / "python"
    if not python.exists():
        raise OSError("not installed: make bench-engines-env")
    if name == "llama.cpp":
        file = {"dense": fp32_gguf, "int8": q8_0_gguf, "stored": default_file}[weights]
        return str(python), str(file()), {}
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return str(python), str(hugging_face_folder()), variables


def measure(
    engines: Sequence[Running], limits: Running, case: str, runs: int
) -> tuple[dict[str, list[float]], list[Speeds]]:
    """Tokens a second of each engine, and the machine's speeds, once a repetition."""
    size, decodes = CASES[case], case.startswith("decode")
    taken: dict[str, list[float]] = {engine.name: [] for engine in engines}
    speeds = []
    for engine in engines:
        if decodes:
            engine.ask(do="begin", batch=size, context=CONTEXT)
        else:
            engine.ask(do="prefill", tokens=size)
    for _ in range(runs):
        read, multiply = (limits.ask(do="limits", what=what) for what in ("read", "multiply"))
        speeds.append(Speeds(read, multiply))
        for engine in engines:
            if decodes:
                rate = size * STEPS / engine.ask(do="decode", steps=STEPS)
            else:
                rate = size / engine.ask(do="prefill", tokens=size)
            taken[engine.name].append(rate)
    for engine in engines:
        if decodes:
            engine.ask(do="end")
    return taken, speeds


def roofline(case: str, weights: str, speeds: Sequence[Speeds], runs: int) -> list[float]:
    """Tokens a second, by the speeds of each repetition."""
    size = CASES[case]
    if case.startswith("decode"):
        context = CONTEXT + 1 + runs * STEPS / 2
        num_bytes = WEIGHT_BYTES[weights] + size * context * KV_BYTES
        flops = 2.0 * size * WEIGHTS if weights == "dense" else 0
        return [size / max(num_bytes / each.read, flops / each.multiply) for each in speeds]
    flops = 2.0 * LAYERS * PER_LAYER * size + 2 * LAYERS * 2 * WIDTH * size * size / 2
    return [size / (flops / each.multiply) for each in speeds]


def report(
    case: str, weights: str, taken: dict[str, list[float]], speeds: Sequence[Speeds], runs: int
) -> list[Row]:
    limit, unit = roofline(case, weights, speeds, runs), "tokens/s"
    first, *others = taken
    what = f"{case} {'fp32' if weights == 'dense' else weights}"
    rows = [row(what, taken[first], limit, each, taken[each], unit=unit) for each in others]
    return rows or [row(what, taken[first], limit, unit=unit)]


def costs(engines: Sequence[Running]) -> list[Row]:
    rows = []
    for engine in engines:
        rows.append(row(f"{engine.name}: start to first token", [engine.start_s], unit="s"))
        memory = engine.peak_bytes() / 2**20
        rows.append(row(f"{engine.name}: peak memory", [memory], unit="MiB"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--weights", choices=WEIGHT_BYTES, default="dense")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    console = Console()
    limits = Running("limits", asked.threads)
    engines: list[Running] = []
    missing: dict[str, str] = {}
    try:
        for name in asked.engine or ENGINES:
            try:
                engines.append(Running(name, asked.threads, asked.weights))
            except OSError as error:
                missing[name] = str(error)
                console.print(f"{name} is left out: {error}")
        rows: list[Row] = []
        for case in asked.case or CASES:
            taken, speeds = measure(engines, limits, case, asked.runs)
            rows += report(case, asked.weights, taken, speeds, asked.runs)
            console.print(table(rows[-max(1, len(engines) - 1) :]))
        rows += costs(engines)
    finally:
        for engine in (*engines, limits):
            engine.close()
    console.print(table(rows))
    about = {
        "threads": asked.threads,
        "model": str(default_file().name),
        "left out": missing,
        "load": os.getloadavg()[0],
        "read GB/s": round(statistics.median(each.read for each in speeds) / 1e9, 1),
        "product GFLOP/s": round(statistics.median(each.multiply for each in speeds) / 1e9),
    }
    out = OUT if asked.weights == "dense" else OUT.with_stem(f"engine-{asked.weights}")
    write(out, rows, about)
    plot(out.with_suffix(".png"), rows, console, unit="tokens/s")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    main()
