"""Copy whole blocks inside a pool: what copy-on-write does to a shared block.

pool_NPHSD   N blocks in the pool, written in place; of any strides that leave no gap in a plane of
             a block
src_C, dst_C the C pairs, int64; no block is written twice, nor both read and written
"""

from torch import Tensor

from kernels.launch import launches, tl, triton


def copy_blocks_reference(pool_NPHSD: Tensor, src_C: Tensor, dst_C: Tensor) -> None:
    """What `copy_blocks` means."""
    pool_NPHSD[dst_C] = pool_NPHSD[src_C]


def copy_blocks(pool_NPHSD: Tensor, src_C: Tensor, dst_C: Tensor) -> None:
    """Bit-exact with the reference, in one launch."""
    if not launches(pool_NPHSD):
        copy_blocks_reference(pool_NPHSD, src_C, dst_C)
        return
    _, num_planes, num_heads, num_slots, head_dim = pool_NPHSD.shape
    block_stride, plane_stride, *inner = pool_NPHSD.stride()
    plane_numel = num_heads * num_slots * head_dim
    assert max(inner[0] * num_heads, inner[1] * num_slots) == plane_numel and inner[2] == 1
    if len(src_C):
        grid = (len(src_C) * num_planes, triton.cdiv(plane_numel, CHUNK))
        _copy_blocks[grid](
            pool_NPHSD, src_C, dst_C, num_planes, block_stride, plane_stride, plane_numel, CHUNK
        )


CHUNK = 1024  # as in gather_blocks


@triton.jit
def _copy_blocks(  # type: ignore[no-untyped-def]
    pool, src, dst, num_planes, block_stride, plane_stride, plane_numel, CHUNK: tl.constexpr
):
    pair, plane = tl.program_id(0) // num_planes, tl.program_id(0) % num_planes
    source = tl.load(src + pair).to(tl.int64) * block_stride + plane * plane_stride
    target = tl.load(dst + pair).to(tl.int64) * block_stride + plane * plane_stride
    offsets = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = offsets < plane_numel
    values = tl.load(pool + source + offsets, mask=inside)
    tl.store(pool + target + offsets, values, mask=inside)
