"""Gather the cells of some heads out of scattered blocks into one contiguous buffer, to be sent.

pool_NPHSD    N blocks in the pool, P planes, H local KV heads, S slots a block, D head dim
block_ids_B   the B blocks to gather, in order, int64
heads         (lo, hi): the h = hi - lo local heads to gather
cells_BHPSD   the cells in canonical order: block, head, plane
"""

import torch
from torch import Tensor

from kernels.launch import launches, tl, triton


def gather_cells_reference(
    pool_NPHSD: Tensor, block_ids_B: Tensor, heads: tuple[int, int]
) -> Tensor:
    """What `gather_cells` means: `pool_NPHSD[:, :, lo:hi].transpose(1, 2)[block_ids_B]`.

    Selecting whole cells as rows is 3 to 8 times quicker than that on a CPU.
    """
    _, num_planes, num_heads, num_slots, head_dim = pool_NPHSD.shape
    plane_P = torch.arange(num_planes, device=pool_NPHSD.device)
    head_H1 = torch.arange(*heads, device=pool_NPHSD.device)[:, None]
    cells_BHP = (block_ids_B[:, None, None] * num_planes + plane_P) * num_heads + head_H1
    cells = pool_NPHSD.view(-1, num_slots * head_dim).index_select(0, cells_BHP.view(-1))
    return cells.view(*cells_BHP.shape, num_slots, head_dim)


def gather_cells(pool_NPHSD: Tensor, block_ids_B: Tensor, heads: tuple[int, int]) -> Tensor:
    """Bit-exact with the reference, in one launch. The result owns its memory."""
    if not launches(pool_NPHSD):
        return gather_cells_reference(pool_NPHSD, block_ids_B, heads)
    assert pool_NPHSD.is_contiguous()
    _, num_planes, num_heads, num_slots, head_dim = pool_NPHSD.shape
    lo, hi = heads
    shape = (len(block_ids_B), hi - lo, num_planes, num_slots, head_dim)
    cells_BHPSD = torch.empty(shape, dtype=pool_NPHSD.dtype, device=pool_NPHSD.device)
    cell_numel = num_slots * head_dim
    num_cells = len(block_ids_B) * (hi - lo) * num_planes
    if num_cells:
        grid = (num_cells, triton.cdiv(cell_numel, CHUNK))
        _gather_cells[grid](
            pool_NPHSD, block_ids_B, cells_BHPSD, lo, hi - lo, num_planes, num_heads, cell_numel,
            CHUNK,
        )  # fmt: skip
    return cells_BHPSD


CHUNK = 1024  # elements a program moves: one 16-byte load a thread at 4 warps of bf16


@triton.jit
def _gather_cells(  # type: ignore[no-untyped-def]
    pool, block_ids, cells, lo, num_taken, num_planes, num_heads, cell_numel, CHUNK: tl.constexpr
):
    cell = tl.program_id(0).to(tl.int64)
    plane = cell % num_planes
    head = lo + cell // num_planes % num_taken
    block_id = tl.load(block_ids + cell // num_planes // num_taken).to(tl.int64)
    source = (block_id * num_planes + plane) * num_heads + head
    offsets = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = offsets < cell_numel
    values = tl.load(pool + source * cell_numel + offsets, mask=inside)
    tl.store(cells + cell * cell_numel + offsets, values, mask=inside)
