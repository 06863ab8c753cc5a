"""Scatter received cells into the blocks they belong to: the inverse of `gather_blocks`.

cells_BHPSD   the cells in canonical order: B blocks, h heads, P planes over [S slots, D head dim]
pool_NPHSD    N blocks in the pool, H local KV heads; written in place
block_ids_B   the B different blocks to write, in order, int64
lo            the local head of the first one in `cells_BHPSD`
"""

from torch import Tensor

from kernels.launch import launches, tl, triton


def scatter_cells_reference(
    cells_BHPSD: Tensor, pool_NPHSD: Tensor, block_ids_B: Tensor, lo: int
) -> None:
    """What `scatter_cells` means."""
    hi = lo + cells_BHPSD.shape[1]
    pool_NPHSD[:, :, lo:hi].transpose(1, 2)[block_ids_B] = cells_BHPSD


def scatter_cells(cells_BHPSD: Tensor, pool_NPHSD: Tensor, block_ids_B: Tensor, lo: int) -> None:
    """Bit-exact with the reference, in one launch."""
    if not launches(pool_NPHSD):
        scatter_cells_reference(cells_BHPSD, pool_NPHSD, block_ids_B, lo)
        return
    assert pool_NPHSD.is_contiguous() and cells_BHPSD.is_contiguous()
    assert cells_BHPSD.dtype == pool_NPHSD.dtype
    _, num_planes, num_heads, num_slots, head_dim = pool_NPHSD.shape
    num_given = cells_BHPSD.shape[1]
    cell_numel = num_slots * head_dim
    num_cells = len(block_ids_B) * num_given * num_planes
    if num_cells:
        grid = (num_cells, triton.cdiv(cell_numel, CHUNK))
        _scatter_cells[grid](
            cells_BHPSD, pool_NPHSD, block_ids_B, lo, num_given, num_planes, num_heads, cell_numel,
            CHUNK,
        )  # fmt: skip


CHUNK = 1024  # as in gather_blocks


@triton.jit
def _scatter_cells(  # type: ignore[no-untyped-def]
    cells, pool, block_ids, lo, num_given, num_planes, num_heads, cell_numel, CHUNK: tl.constexpr
):
    cell = tl.program_id(0).to(tl.int64)
    plane = cell % num_planes
    head = lo + cell // num_planes % num_given
    block_id = tl.load(block_ids + cell // num_planes // num_given).to(tl.int64)
    target = (block_id * num_planes + plane) * num_heads + head
    offsets = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = offsets < cell_numel
    values = tl.load(cells + cell * cell_numel + offsets, mask=inside)
    tl.store(pool + target * cell_numel + offsets, values, mask=inside)
