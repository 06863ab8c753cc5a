"""Every kernel against its reference on one device; prints one line a case and exits 1 on failure.

TRITON_INTERPRET=1 python tests/kernels/against_reference.py cpu
python tests/kernels/against_reference.py cuda
python tests/kernels/against_reference.py cuda 2 4    every fourth case, from the third on
"""

import os
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from kernels.copy_blocks import copy_blocks, copy_blocks_reference
from kernels.gather_blocks import gather_cells, gather_cells_reference
from kernels.scatter_blocks import scatter_cells, scatter_cells_reference
from kernels.write_kv import write_kv, write_kv_reference
from tests.kernels.attention_cases import attention_cases
from tests.kernels.cases import Case, random_bits, same_bits
from tests.kernels.layer_cases import layer_cases
from tests.kernels.samples import MEMORY_ORDERS, in_memory_order
from tests.kernels.sampling_cases import sampling_cases

POOLS = [  # N blocks, P planes, H heads, S slots, D head dim
    (5, 2, 3, 16, 64),
    (7, 2, 1, 8, 20),
    (4, 1, 5, 128, 5),
    (6, 3, 2, 32, 33),
]
PARTS = (1, 2, 8)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64]


def cases(device: str) -> Iterator[Case]:
    for shape in POOLS:
        for dtype in DTYPES:
            name = f"{shape} {dtype}"
            yield f"gather_blocks {name}", partial(gather, shape, dtype, device)
            yield f"scatter_blocks {name}", partial(scatter, shape, dtype, device)
            yield f"copy_blocks {name}", partial(copy, shape, dtype, device)
            if shape[1] == 2:
                yield f"write_kv {name}", partial(write, shape, dtype, device)
    yield from attention_cases(device)
    yield from layer_cases(device)
    yield from sampling_cases(device)


def ways_to_cut(num_heads: int) -> Iterator[tuple[tuple[int, int], int, str]]:
    """Runs of heads, parts of a block, orders of memory: any two of them meet."""
    runs = ((0, num_heads), (num_heads - 1, num_heads), (0, 1))
    for i, j in product(range(3), range(3)):
        yield runs[i], PARTS[(i + j) % 3], MEMORY_ORDERS[j]


def gather(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    whole = random_bits(shape, dtype, device)
    ids = torch.tensor([3, 0, 2], device=device)
    for heads, parts, order in ways_to_cut(shape[2]):
        pool = in_memory_order(whole, order)
        want = gather_cells_reference(whole, ids, heads, parts)
        same_bits(gather_cells(pool, ids, heads, parts), want)
    assert gather_cells(whole, ids[:0], (0, 1)).shape[0] == 0


def scatter(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    ids = torch.tensor([3, 0, 2], device=device)
    for (lo, hi), parts, order in ways_to_cut(shape[2]):
        pool = in_memory_order(random_bits(shape, dtype, device), order)
        want = random_bits(shape, dtype, device)
        cell = (shape[3] // parts, shape[4])
        cells = random_bits((3, hi - lo, shape[1], *cell), dtype, device, seed=1)
        scatter_cells(cells, pool, ids, lo, parts)
        scatter_cells_reference(cells, want, ids, lo, parts)
        same_bits(pool, want)
        same_bits(gather_cells(pool, ids, (lo, hi), parts), cells)


def copy(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    src, dst = torch.tensor([0, 0], device=device), torch.tensor([3, 1], device=device)
    for order in MEMORY_ORDERS:
        pool = in_memory_order(random_bits(shape, dtype, device), order)
        want = random_bits(shape, dtype, device)
        copy_blocks(pool, src, dst)
        copy_blocks_reference(want, src, dst)
        same_bits(pool, want)
        same_bits(pool[3], pool[0])


def write(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    num_blocks, _, heads, num_slots, dim = shape
    slots = torch.randperm(num_blocks * num_slots, generator=torch.Generator().manual_seed(2))
    slots = slots[:11].to(device)
    packed = random_bits((11, 4 * heads, dim), dtype, device, seed=3)  # as out of one projection
    k, v = packed[:, heads : 2 * heads], packed[:, 3 * heads :]
    for order in MEMORY_ORDERS:
        pool = in_memory_order(random_bits(shape, dtype, device), order)
        want = random_bits(shape, dtype, device)
        write_kv(pool, k, v, slots)
        write_kv_reference(want, k, v, slots)
        same_bits(pool, want)


def main(device: str, first: str = "0", step: str = "1") -> int:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    assert device == "cuda" or interpreted, "on a CPU, set TRITON_INTERPRET=1"
    num_failed = 0
    for name, check in islice(cases(device), int(first), None, int(step)):
        try:
            began = time.perf_counter()
            check()
            print(f"ok     {name} ({time.perf_counter() - began:.1f} s)")
        except Exception:
            num_failed += 1
            print(f"FAILED {name}")
            traceback.print_exc()
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
