"""Checks kernels against references on a CUDA device, and steps, and says how fast each one moves.

    python tests/gpu/run_all.py

Exit code 0 when all agree, 1 when one does not, 2 when there is no device. Bandwidths stand beside
that of a plain copy, and rates beside that of a large matrix product: both are measured first, on
the same card.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from bench.gpu import FULL, Sizes, product_flop_s
from kernels.copy_blocks import copy_blocks
from kernels.gather_blocks import gather_cells
from kernels.paged_attention import paged_attention
from kernels.quantise_kv import read_kv_quantised, write_kv_quantised
from kernels.rms_norm import rms_norm
from kernels.rotate_write import rotate_write
from kernels.sample_tokens import Filters, sample_tokens, sample_tokens_reference
from kernels.scatter_blocks import scatter_cells
from kernels.silu_multiply import silu_multiply
from kernels.write_kv import write_kv
from tests.gpu.serving import num_failed

CHECKS = Path(__file__).parents[1] / "kernels" / "against_reference.py"
NUM_PROCESSES = 4  # for the checks: most of their time is compiling, of one kernel at a time
CHECKS_TIMEOUT_S = 300


@dataclass(frozen=True)
class Geometry:
    """One layer of a model, its blocks spread over a pool of `num_blocks`."""

    name: str
    num_kv_heads: int
    group: int
    head_dim: int
    num_blocks: int
    block_size: int = 16


GEOMETRIES = [
    Geometry("SmolLM2-135M", num_kv_heads=3, group=3, head_dim=64, num_blocks=80_000),
    Geometry("Llama-70B at TP 8", num_kv_heads=1, group=8, head_dim=128, num_blocks=120_000),
    Geometry("Llama-8B", num_kv_heads=8, group=4, head_dim=128, num_blocks=16_000),
]


def seconds(action: Callable[[], object], device: str, rounds: int = 20) -> float:
    """Of one call, once warm."""
    for _ in range(3):
        action()
    _wait(device)
    start = time.perf_counter()
    for _ in range(rounds):
        action()
    _wait(device)
    return (time.perf_counter() - start) / rounds


def copy_gb_s(device: str, num_bytes: int = 1 << 30) -> float:
    """Bytes read plus bytes written a second by one copy."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device) / 1e9


def moved_gb_s(geometry: Geometry, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Bytes read plus written a second by each copying kernel over half of the pool."""
    pool_NPHSD = _pool(geometry, device, dtype)
    order = torch.randperm(geometry.num_blocks, device=device)
    half, rest = order.chunk(2)
    rest = rest[: len(half)]
    half = half[: len(rest)]
    heads = (0, geometry.num_kv_heads)
    cells = gather_cells(pool_NPHSD, half, heads)
    num_tokens = 8_192
    slots = torch.randperm(geometry.num_blocks * geometry.block_size, device=device)[:num_tokens]
    k, v = torch.randn(
        2, num_tokens, geometry.num_kv_heads, geometry.head_dim, device=device
    ).to(dtype)  # fmt: skip
    actions: dict[str, tuple[Callable[[], object], int]] = {
        "gather_blocks": (lambda: gather_cells(pool_NPHSD, half, heads), cells.nbytes),
        "scatter_blocks": (lambda: scatter_cells(cells, pool_NPHSD, half, 0), cells.nbytes),
        "copy_blocks": (lambda: copy_blocks(pool_NPHSD, half, rest), cells.nbytes),
        "write_kv": (lambda: write_kv(pool_NPHSD, k, v, slots), k.nbytes + v.nbytes),
    }
    return {
        name: 2 * num_bytes / seconds(action, device) / 1e9
        for name, (action, num_bytes) in actions.items()
    }


def layer_gb_s(geometry: Geometry, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Bytes read plus written a second by each kernel of a layer, and by sampling, per pass."""
    num_tokens, dim, kv_heads = 4_096, geometry.head_dim, geometry.num_kv_heads
    query_heads = kv_heads * geometry.group
    x = torch.randn(num_tokens, query_heads * dim, device=device, dtype=dtype)
    residual, weights = x.clone(), torch.ones(1, x.shape[1], device=device, dtype=dtype)
    gate_up = torch.randn(num_tokens, 8 * x.shape[1], device=device, dtype=dtype)
    qkv = torch.randn(num_tokens, query_heads + 2 * kv_heads, dim, device=device, dtype=dtype)
    q, k, v = torch.split(qkv, [query_heads, kv_heads, kv_heads], 1)
    angles = torch.ones(num_tokens, dim, device=device, dtype=dtype)
    pool = _pool(geometry, device, dtype)
    narrow = torch.zeros(pool.shape, device=device, dtype=torch.int8)
    scales = torch.zeros(pool.shape[:4], device=device)
    slots = torch.randperm(geometry.num_blocks * geometry.block_size, device=device)[:num_tokens]
    blocks = torch.randperm(geometry.num_blocks, device=device)[: geometry.num_blocks // 2]
    cells = len(blocks) * pool[0].numel()
    kv_bytes = k.nbytes + v.nbytes
    actions: dict[str, tuple[Callable[[], object], int]] = {
        "rms_norm": (lambda: rms_norm(x, weights, 1e-5, residual), 4 * x.nbytes),
        "silu_multiply": (lambda: silu_multiply(gate_up), gate_up.nbytes * 3 // 2),
        "rotate_write": (
            lambda: rotate_write(q, k, v, angles, angles, pool, slots),
            2 * (q.nbytes + kv_bytes) + 2 * angles.nbytes,
        ),
        "quantise_kv, write": (
            lambda: write_kv_quantised(narrow, scales, k, v, slots),
            kv_bytes + kv_bytes // dtype.itemsize,
        ),
        "quantise_kv, read": (
            lambda: read_kv_quantised(narrow, scales, blocks, dtype),
            cells * (1 + dtype.itemsize),
        ),
    }
    return {
        name: num_bytes / seconds(action, device) / 1e9
        for name, (action, num_bytes) in actions.items()
    }


def sampling_ms(device: str, num_draws: int, vocabulary: int) -> tuple[float, float]:
    """Of a batch's top-p draws: by the kernel, and by sorting as the reference does."""
    logits = torch.randn(num_draws, vocabulary, device=device) * 4
    ones = torch.ones(num_draws, device=device, dtype=torch.float64)
    filters = Filters(ones, ones * 0, torch.zeros_like(ones).long(), ones * 0.9, ones * 0.5)
    ours = seconds(lambda: sample_tokens(logits, filters, True), device)
    return ours * 1e3, seconds(lambda: sample_tokens_reference(logits, filters, True), device) * 1e3


def decode_gb_s(
    geometry: Geometry, device: str, dtype: torch.dtype, batch: int, context: int
) -> float:
    """Bytes of cache that decode attention reads a second."""
    arguments = _batch(geometry, device, dtype, [(context, 1)] * batch)
    values = batch * context * geometry.num_kv_heads * geometry.head_dim * 2
    return values * dtype.itemsize / seconds(lambda: paged_attention(*arguments), device) / 1e9


def prefill_tflop_s(geometry: Geometry, device: str, dtype: torch.dtype, tokens: int) -> float:
    """Multiplications and additions a second of attention over one whole prompt."""
    arguments = _batch(geometry, device, dtype, [(tokens, tokens)])
    heads = geometry.num_kv_heads * geometry.group
    operations = 2 * 2 * heads * geometry.head_dim * tokens * (tokens + 1) // 2
    return operations / seconds(lambda: paged_attention(*arguments), device, rounds=5) / 1e12


def _pool(geometry: Geometry, device: str, dtype: torch.dtype) -> Tensor:
    shape = (geometry.num_blocks, 2, geometry.num_kv_heads, geometry.block_size, geometry.head_dim)
    return torch.randn(shape, device=device, dtype=dtype)


def _batch(
    geometry: Geometry, device: str, dtype: torch.dtype, sequences: list[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Sequences of (context, queries) over blocks in random order, shared only if the pool ends."""
    lengths = [-(-context // geometry.block_size) for context, _ in sequences]
    order = torch.randperm(geometry.num_blocks, device=device)
    width = max(lengths)
    columns = torch.arange(len(sequences) * width, device=device) % geometry.num_blocks
    tables = order[columns].view(len(sequences), width)
    queries = [number for _, number in sequences]
    starts = torch.tensor([0, *queries], device=device).cumsum(0)
    contexts = torch.tensor([context for context, _ in sequences], device=device)
    heads = geometry.num_kv_heads * geometry.group
    q = torch.randn(sum(queries), heads, geometry.head_dim, device=device).to(dtype)
    scale = geometry.head_dim**-0.5
    return q, _pool(geometry, device, dtype), starts, contexts, tables, scale


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    geometries: Sequence[Geometry]
    decodes: Sequence[tuple[int, int]]  # (batch, context)
    prompt_tokens: int
    vocabulary: int
    limits: Sizes
    dtype: torch.dtype = torch.bfloat16


WHOLE = Extent(GEOMETRIES, ((1, 8_192), (32, 2_048), (128, 2_048)), 4_096, 128_256, FULL)


def report(device: str, extent: Extent = WHOLE) -> None:
    dtype = extent.dtype
    peak = copy_gb_s(device, extent.limits.copied_bytes)
    product = product_flop_s(extent.limits, device, dtype) / 1e12
    print(f"plain copy     {peak:10.0f} GB/s read and written")
    print(f"matrix product {product:10.1f} TFLOP/s", flush=True)
    for geometry in extent.geometries:
        print(f"\n{geometry.name}, one layer, blocks of {geometry.block_size}, {dtype}")
        for name, speed in moved_gb_s(geometry, device, dtype).items():
            print(f"  {name:<34}{speed:8.0f} GB/s {speed / peak:6.1%} of the copy")
        for name, speed in layer_gb_s(geometry, device, dtype).items():
            print(f"  {name:<34}{speed:8.0f} GB/s {speed / peak:6.1%} of the copy")
        for batch, context in extent.decodes:
            speed = decode_gb_s(geometry, device, dtype, batch, context)
            name = f"decode, {batch} x {context:,} tokens"
            print(f"  {name:<34}{speed:8.0f} GB/s {speed / peak:6.1%} of the copy")
        speed = prefill_tflop_s(geometry, device, dtype, extent.prompt_tokens)
        name = f"prefill, {extent.prompt_tokens:,} tokens"
        share = f"{speed / product:6.1%} of the product"
        print(f"  {name:<34}{speed:8.1f} TFLOP/s {share}", flush=True)
    ours, sorting = sampling_ms(device, 32, extent.vocabulary)
    print(
        f"\nsample_tokens, 32 draws of {extent.vocabulary:,}: {ours:.2f} ms,"
        f" by sorting {sorting:.2f} ms"
    )


def num_wrong(commands: Sequence[Sequence[str]], timeout_s: float) -> int:
    """Runs all at the same time, prints what they say, and counts those that fail or do not end."""
    give_up = time.monotonic() + timeout_s
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    wrong = 0
    for process in running:
        try:
            said, _ = process.communicate(timeout=max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0] + f"NOT DONE after {timeout_s:g} s\n"
        wrong += process.returncode != 0
        print(said, end="", flush=True)
    return wrong


def main() -> int:
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was checked", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(), flush=True)
    shares = [str(share) for share in range(NUM_PROCESSES)]
    wrong = num_wrong(
        [[sys.executable, str(CHECKS), "cuda", share, str(NUM_PROCESSES)] for share in shares],
        CHECKS_TIMEOUT_S,
    )
    print(flush=True)
    failed = num_failed("cuda")
    report("cuda")
    print("\nevery kernel equals its reference" if not wrong else "\nA KERNEL IS WRONG")
    print("the steps are sound" if not failed else f"{failed} CHECKS OF STEPS FAILED")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
