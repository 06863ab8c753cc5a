"""Copy whole blocks inside a pool: what copy-on-write does to a shared block.

pool_NPHSD   N blocks in the pool, written in place
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
    assert pool_NPHSD.is_contiguous()
    block_numel = pool_NPHSD[0].numel()
    if len(src_C):
        grid = (len(src_C), triton.cdiv(block_numel, CHUNK))
        _copy_blocks[grid](pool_NPHSD, src_C, dst_C, block_numel, CHUNK)


CHUNK = 1024  # as in gather_blocks


@triton.jit
def _copy_blocks(pool, src, dst, block_numel, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    pair = tl.program_id(0)
    source = tl.load(src + pair).to(tl.int64) * block_numel
    target = tl.load(dst + pair).to(tl.int64) * block_numel
    offsets = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = offsets < block_numel
    values = tl.load(pool + source + offsets, mask=inside)
    tl.store(pool + target + offsets, values, mask=inside)
