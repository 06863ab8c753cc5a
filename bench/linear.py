"""What a step's matrix products take in each form of weights, and how near memory's limit that is.

`make bench-linear`. The matrices of SmolLM2-135M (30 layers of qkv, o, gate and up, and down; the
head), nothing between them, on all cores. The forms take turns. The limit of few rows is the time
to read the form's bytes once, as fast as the machine read memory in the same run. The peer is
fbgemm's dynamic int8 in torch: one scale for a row of activations and for an output of weights,
where ours has one for 32 inputs.

    ARGS='--instructions avx2 --threads 1' measures what an older processor would do, one core of it
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from kernels.packed_linear import load
from kvferry.bench_report import Row, publish, row
from model.linear import DenseLinear, Linear, PackedLinear
from model.packing import pack_values
from model.weight_form import WeightForm

OUT = Path("bench/out/linear.json")
LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
ROWS = (1, 4, 8, 16, 512)
ROUNDS = 5
FORMS: dict[str, WeightForm] = {"int8": "int8", "4 bits": "int4"}
INSTRUCTIONS = ("none", "avx2", "avx512vnni")
Step = Callable[[dict[int, Tensor]], float]


def matrices() -> list[Tensor]:
    made = [torch.randn(*shape) * 0.05 for _ in range(LAYERS) for shape in SHAPES]
    return [*made, torch.randn(*HEAD) * 0.05]


def rows_of(count: int) -> dict[int, Tensor]:
    return {width: torch.randn(count, width) for width in (576, 1536)}


def seconds(call: Callable[[], object], least_s: float = 0.25) -> float:
    """The fastest of at least three, and of as many as fit."""
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < 3 or time.perf_counter() - began < least_s:
        at = time.perf_counter()
        call()
        taken.append(time.perf_counter() - at)
    return min(taken)


def fbgemm(weight_OI: Tensor) -> Callable[[Tensor], Tensor]:
    scale = weight_OI.abs().amax(dim=1).double() / 127
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    quantised = torch.quantize_per_channel(weight_OI, scale, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantised, None)
    return lambda x_TI: torch.ops.quantized.linear_dynamic(x_TI, packed)


def step(linears: list[tuple[int, Callable[[Tensor], Tensor]]]) -> Step:
    def once(x: dict[int, Tensor]) -> float:
        return seconds(lambda: [linear(x[width]) for width, linear in linears])

    return once


def read_speed(num_bytes: int) -> float:
    """Bytes per second, of memory read by all cores through fp32 sums."""
    memory = torch.ones(num_bytes // 4)
    return memory.nbytes / seconds(lambda: memory.sum())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--instructions", choices=INSTRUCTIONS)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    load_before = os.getloadavg()[0]
    kernel = load()
    if kernel is not None and asked.instructions is not None:
        wanted = INSTRUCTIONS.index(asked.instructions)
        assert wanted <= kernel.instructions, f"this machine has no {asked.instructions}"
        kernel = kernel._replace(instructions=wanted)
    values = matrices()
    linears: dict[str, list[Linear]] = {"fp32": [DenseLinear(each) for each in values]}
    for name, form in FORMS.items():
        linears[name] = [PackedLinear(pack_values(each, form), None, kernel) for each in values]
    steps = {name: step([(each.in_width, each) for each in all_]) for name, all_ in linears.items()}
    steps["fbgemm"] = step([(each.shape[1], fbgemm(each)) for each in values])
    num_bytes = {name: sum(each.num_bytes for each in all_) for name, all_ in linears.items()}

    with torch.inference_mode():
        taken: dict[tuple[str, int], list[float]] = {}
        speeds: list[float] = []
        for _ in range(ROUNDS):
            speeds.append(read_speed(num_bytes["fp32"]))
            for count in ROWS:
                x = rows_of(count)
                for name, once in steps.items():
                    taken.setdefault((name, count), []).append(once(x))
    rows: list[Row] = []
    for count in ROWS:
        for name in linears:
            ours = [count / each for each in taken[name, count]]
            limit = [count * each / num_bytes[name] for each in speeds] if count <= 16 else []
            peer = "fbgemm" if name != "fp32" else None
            theirs = [count / each for each in taken["fbgemm", count]] if peer else []
            rows.append(row(f"{name}, {count} rows", ours, limit, peer, theirs, unit="rows/s"))
    used = "torch" if kernel is None else INSTRUCTIONS[kernel.instructions]
    print(f"read speed {max(speeds) / 1e9:.1f} GB/s; instructions: {used}")
    about = {"threads": asked.threads, "instructions": used, "read_bytes_per_s": speeds}
    publish(OUT, rows, Console(), load_before, about)


if __name__ == "__main__":
    main()
