"""Copy whole blocks inside a pool: what copy-on-write does to a shared block.

pool_NPHSD   N blocks in the pool, written in place; of any strides that leave no gap in a block, or
             none in each of its planes
src_C, dst_C the C pairs, int64; no block is written twice, nor both read and written
"""

from collections.abc import Sequence

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
    num_runs, run_stride, run_numel = _runs(pool_NPHSD)
    if len(src_C):
        grid = (len(src_C) * num_runs, triton.cdiv(run_numel, CHUNK))
        _copy_blocks[grid](
            pool_NPHSD, src_C, dst_C, num_runs, pool_NPHSD.stride(0), run_stride, run_numel, CHUNK
        )


def _runs(pool_NPHSD: Tensor) -> tuple[int, int, int]:
    """How many runs of memory a block is, how far apart they lie, and how long each is."""
    block_numel, num_planes = pool_NPHSD[0].numel(), pool_NPHSD.shape[1]
    _, plane_stride, *inner = pool_NPHSD.stride()
    if _spans(pool_NPHSD.shape[1:], (plane_stride, *inner)) == block_numel:
        return 1, 0, block_numel
    plane_numel = block_numel // num_planes
    assert _spans(pool_NPHSD.shape[2:], inner) == plane_numel, "a plane of a block has gaps"
    return num_planes, plane_stride, plane_numel


def _spans(shape: Sequence[int], strides: Sequence[int]) -> int:
    """From the first number up to the last one, in numbers."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


CHUNK = 1024  # as in gather_blocks


@triton.jit
def _copy_blocks(  # type: ignore[no-untyped-def]
    pool, src, dst, num_runs, block_stride, run_stride, run_numel, CHUNK: tl.constexpr
):
    pair, run = tl.program_id(0) // num_runs, tl.program_id(0) % num_runs
    source = tl.load(src + pair).to(tl.int64) * block_stride + run * run_stride
    target = tl.load(dst + pair).to(tl.int64) * block_stride + run * run_stride
    offsets = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = offsets < run_numel
    values = tl.load(pool + source + offsets, mask=inside)
    tl.store(pool + target + offsets, values, mask=inside)
