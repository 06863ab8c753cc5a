"""What the copying kernels mean on a CPU, said once more with plain loops."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.copy_blocks import copy_blocks
from kernels.gather_blocks import gather_cells
from kernels.scatter_blocks import scatter_cells
from kernels.write_kv import write_kv
from tests.kernels.samples import MEMORY_ORDERS, in_memory_order

SHAPES = [(5, 2, 3, 16, 64), (7, 2, 1, 8, 20), (4, 1, 5, 128, 5), (6, 3, 2, 32, 33)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64]
everywhere = pytest.mark.parametrize("dtype", DTYPES)
every_shape = pytest.mark.parametrize("shape", SHAPES)


def numbered(shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> Tensor:
    """A tensor whose every bit pattern tells where it is from."""
    words = torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.int64)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return words.to(bits).view(dtype).view(shape).clone()


def bits(tensor: Tensor) -> list[int]:
    flat = tensor.contiguous().view(-1)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.dtype.itemsize]
    return flat.view(kind).tolist()


@everywhere
@every_shape
def test_cells_come_out_by_block_then_head_then_plane(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    pool = numbered(shape, dtype)
    lo, hi = shape[2] - 1, shape[2]
    for heads in ((0, shape[2]), (lo, hi)):
        cells = gather_cells(pool, torch.tensor([3, 0]), heads)
        wanted = [
            value
            for block in (3, 0)
            for head in range(*heads)
            for plane in range(shape[1])
            for value in bits(pool[block, plane, head])
        ]
        assert cells.is_contiguous()
        assert bits(cells) == wanted


@everywhere
@every_shape
def test_scattered_cells_are_gathered_again_and_nothing_else_moves(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    pool, before = numbered(shape, dtype), numbered(shape, dtype)
    lo, hi = (1, shape[2]) if shape[2] > 1 else (0, 1)
    cells = numbered((2, hi - lo, shape[1], *shape[3:]), dtype, first=20_000)
    ids = torch.tensor([2, 0])
    scatter_cells(cells, pool, ids, lo)
    assert bits(gather_cells(pool, ids, (lo, hi))) == bits(cells)
    before[ids, :, lo:hi] = pool[ids, :, lo:hi]
    assert bits(pool) == bits(before)


@everywhere
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_part_of_a_block_is_some_of_its_slots(dtype: torch.dtype, parts: int) -> None:
    pool = numbered(SHAPES[0], dtype)
    slots = 16 // parts
    ids = [3 * parts, 5 * parts - 1, parts // 2]
    cells = gather_cells(pool, torch.tensor(ids), (1, 3), parts)
    wanted = [
        value
        for block_id in ids
        for head in (1, 2)
        for plane in (0, 1)
        for slot in range(block_id % parts * slots, (block_id % parts + 1) * slots)
        for value in bits(pool[block_id // parts, plane, head, slot])
    ]
    assert cells.shape == (3, 2, 2, slots, 64)
    assert bits(cells) == wanted


@everywhere
@every_shape
@pytest.mark.parametrize("order", MEMORY_ORDERS)
def test_the_order_of_a_pools_memory_is_nobodys_business(
    shape: tuple[int, ...], dtype: torch.dtype, order: str
) -> None:
    usual, other = numbered(shape, dtype), in_memory_order(numbered(shape, dtype), order)
    heads, ids = (shape[2] - 1, shape[2]), torch.tensor([7, 2, 5])
    for parts in (1, 2, 4):
        if shape[3] % parts:
            continue
        part_ids = ids if parts > 1 else torch.tensor([3, 0, 2])
        cells = gather_cells(usual, part_ids, heads, parts)
        assert bits(gather_cells(other, part_ids, heads, parts)) == bits(cells)
        for pool in (usual, other):
            scatter_cells(cells.flip(0).contiguous(), pool, part_ids, heads[0], parts)
    for pool in (usual, other):
        copy_blocks(pool, torch.tensor([2]), torch.tensor([1]))
    assert bits(other) == bits(usual)


@everywhere
@every_shape
def test_blocks_are_copied_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool, before = numbered(shape, dtype), numbered(shape, dtype)
    copy_blocks(pool, torch.tensor([0, 0]), torch.tensor([3, 1]))
    for block in range(shape[0]):
        assert bits(pool[block]) == bits(before[0 if block in (1, 3) else block])


@everywhere
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_tokens_are_written_into_their_slots(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _, _, heads, num_slots, dim = shape
    pool, expected = numbered(shape, dtype), numbered(shape, dtype)
    packed = numbered((3, 2 * heads, dim), dtype, first=20_000)
    k, v = packed[:, :heads], packed[:, heads:]
    slots = [0, 3 * num_slots + 5, 2 * num_slots - 1]
    write_kv(pool, k, v, torch.tensor(slots))
    for token, slot in enumerate(slots):
        expected[slot // num_slots, 0, :, slot % num_slots] = k[token]
        expected[slot // num_slots, 1, :, slot % num_slots] = v[token]
    assert bits(pool) == bits(expected)


@everywhere
def test_nothing_to_copy_is_no_work(dtype: torch.dtype) -> None:
    pool = numbered(SHAPES[0], dtype)
    none = torch.tensor([], dtype=torch.int64)
    assert gather_cells(pool, none, (0, 2)).shape == (0, 2, 2, 16, 64)
    scatter_cells(pool.new_empty(0, 2, 2, 16, 64), pool, none, 0)
    copy_blocks(pool, none, none)
    write_kv(pool, pool.new_empty(0, 3, 64), pool.new_empty(0, 3, 64), none)
    assert bits(pool) == bits(numbered(SHAPES[0], dtype))


def test_without_triton_everything_still_runs_on_a_cpu() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from kernels.copy_blocks import copy_blocks\n"
        "from kernels.gather_blocks import gather_cells\n"
        "from kernels.paged_attention import paged_attention\n"
        "from kernels.scatter_blocks import scatter_cells\n"
        "from kernels.write_kv import write_kv\n"
        "pool = torch.zeros(4, 2, 1, 8, 16)\n"
        "one, two = torch.tensor([1]), torch.tensor([2])\n"
        "write_kv(pool, torch.ones(1, 1, 16), torch.ones(1, 1, 16) * 3, torch.tensor([8]))\n"
        "copy_blocks(pool, one, two)\n"
        "scatter_cells(gather_cells(pool, two, (0, 1)), pool, torch.tensor([3]), 0)\n"
        "starts, lens, table = torch.tensor([0, 1]), one, torch.tensor([[3]])\n"
        "out = paged_attention(torch.ones(1, 2, 16), pool, starts, lens, table, 0.25)\n"
        "print(out.unique().tolist())\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[3.0]\n"
