"""Scatter received cells into the blocks they belong to: the inverse of `gather_blocks`.

cells_BHPSD   the cells in canonical order: B blocks, h heads, P planes over [S slots, D head dim]
pool_NPHSD    N blocks in the pool, H local KV heads; written in place; strides as in gather_blocks
parts         as in gather_blocks: S is then a part's number of slots
block_ids_B   the B different blocks to write, in order, int64
lo            the local head of the first one in `cells_BHPSD`
"""

from torch import Tensor

from kernels.launch import launches, tl, triton


def scatter_cells_reference(
    cells_BHPSD: Tensor, pool_NPHSD: Tensor, block_ids_B: Tensor, lo: int, parts: int = 1
) -> None:
    """What `scatter_cells` means."""
    hi = lo + cells_BHPSD.shape[1]
    pool_NPHpSD = pool_NPHSD.view(*pool_NPHSD.shape[:3], parts, -1, pool_NPHSD.shape[4])
    cells_BPHSD = cells_BHPSD.transpose(1, 2)
    pool_NPHpSD[block_ids_B // parts, :, lo:hi, block_ids_B % parts] = cells_BPHSD


def scatter_cells(
    cells_BHPSD: Tensor, pool_NPHSD: Tensor, block_ids_B: Tensor, lo: int, parts: int = 1
) -> None:
    """Bit-exact with the reference, in one launch."""
    if not launches(pool_NPHSD):
        scatter_cells_reference(cells_BHPSD, pool_NPHSD, block_ids_B, lo, parts)
        return
    assert cells_BHPSD.is_contiguous() and cells_BHPSD.dtype == pool_NPHSD.dtype
    _, num_planes, _, num_slots, head_dim = pool_NPHSD.shape
    num_given = cells_BHPSD.shape[1]
    cell_numel = num_slots // parts * head_dim
    num_cells = len(block_ids_B) * num_given * num_planes
    if num_cells:
        grid = (num_cells, triton.cdiv(cell_numel, CHUNK))
        block_stride, plane_stride, head_stride, slot_stride, dim_stride = pool_NPHSD.stride()
        assert dim_stride == 1, f"a row of head dim {head_dim} is not contiguous"
        _scatter_cells[grid](
            cells_BHPSD, pool_NPHSD, block_ids_B, lo, num_given, num_planes, parts, cell_numel,
            block_stride, plane_stride, head_stride, slot_stride, head_dim, CHUNK,
        )  # fmt: skip


CHUNK = 1024  # as in gather_blocks


@triton.jit
def _scatter_cells(  # type: ignore[no-untyped-def]
    cells, pool, block_ids, lo, num_given, num_planes, parts, cell_numel,
    block_stride, plane_stride, head_stride,
    slot_stride: tl.constexpr, head_dim: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0).to(tl.int64)
    plane = cell % num_planes
    head = lo + cell // num_planes % num_given
    block_id = tl.load(block_ids + cell // num_planes // num_given).to(tl.int64)
    target = block_id // parts * block_stride + plane * plane_stride + head * head_stride
    offsets = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = offsets < cell_numel
    first = block_id % parts * (cell_numel // head_dim) * slot_stride
    apart = offsets // head_dim * (slot_stride - head_dim)
    values = tl.load(cells + cell * cell_numel + offsets, mask=inside)
    tl.store(pool + target + first + apart + offsets, values, mask=inside)
