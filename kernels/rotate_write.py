"""Turn new queries and keys to their positions, and write keys and values into their slots.

q_THD, k_THD, v_THD   T new tokens, D head dim; queries have more heads; rows of D contiguous, so
                      that all three may be views of one projection
cos_TD, sin_TD        of each position, the sines of the first half negated (`model.rope.rotation`)
pool_NPHSD            N blocks, planes K and V, S slots a block; written in place; of any strides as
                      long as a row of D is contiguous
slots_T               where each token goes: block_id * S + offset, all different, int64; those of
                      padding are negative, and nothing is written of it
out_THD               the turned queries

Each half of a head is turned against the other (Su et al., arXiv 2104.09864).
"""

import torch
from torch import Tensor

from kernels.launch import launches, tl, triton
from kernels.write_kv import write_kv_reference


def rotate_write_reference(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    pool_NPHSD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """What `rotate_write` means."""
    turned_q, turned_k = (rotate(x_THD, cos_TD, sin_TD) for x_THD in (q_THD, k_THD))
    dtype = pool_NPHSD.dtype
    turned_k, v_THD = turned_k.to(dtype), v_THD.to(dtype)
    real_T = slots_T >= 0
    if not bool(real_T.all()):
        turned_k, v_THD, slots_T = turned_k[real_T], v_THD[real_T], slots_T[real_T]
    write_kv_reference(pool_NPHSD, turned_k, v_THD, slots_T)
    return turned_q


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """The heads turned to their tokens' positions."""
    swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, -1)
    return torch.addcmul(x_THD * cos_TD[:, None], swapped_THD, sin_TD[:, None])


def rotate_write(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    pool_NPHSD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """As the reference up to rounding, values bit-exact, in one launch."""
    if not launches(pool_NPHSD):
        return rotate_write_reference(q_THD, k_THD, v_THD, cos_TD, sin_TD, pool_NPHSD, slots_T)
    num_tokens, num_queries, head_dim = q_THD.shape
    _, num_planes, num_heads, num_slots, _ = pool_NPHSD.shape
    *strides, dim_stride = pool_NPHSD.stride()
    assert dim_stride == 1 and num_planes == 2 and head_dim % 2 == 0
    assert q_THD.stride(2) == k_THD.stride(2) == v_THD.stride(2) == 1
    assert q_THD.dtype == k_THD.dtype == v_THD.dtype and len(slots_T) == num_tokens
    assert cos_TD.is_contiguous() and sin_TD.is_contiguous()
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if num_tokens:
        _rotate_write[(num_tokens, num_queries + num_heads)](
            q_THD, k_THD, v_THD, cos_TD, sin_TD, pool_NPHSD, slots_T, out_THD,
            *q_THD.stride()[:2], *k_THD.stride()[:2], *v_THD.stride()[:2], *strides,
            num_queries, num_slots, head_dim, triton.next_power_of_2(head_dim),
            num_warps=1,  # for a row of 128 in bf16: 8 bytes a thread
        )  # fmt: skip
    return out_THD


@triton.jit
def _turned(x, cos, sin, half, dims, inside):  # type: ignore[no-untyped-def]
    values = tl.load(x + dims, mask=inside)
    other = tl.load(x + tl.where(dims < half, dims + half, dims - half), mask=inside)
    cosines, sines = tl.load(cos + dims, mask=inside), tl.load(sin + dims, mask=inside)
    kept = (values.to(tl.float32) * cosines.to(tl.float32)).to(values.dtype)
    crossed = other.to(tl.float32) * sines.to(tl.float32)
    return (kept.to(tl.float32) + crossed).to(values.dtype)


@triton.jit
def _rotate_write(  # type: ignore[no-untyped-def]
    q, k, v, cos, sin, pool, slots, out,
    q_token, q_head, k_token, k_head, v_token, v_head,
    block_stride, plane_stride, head_stride, slot_stride,
    num_queries, num_slots, head_dim, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    inside = dims < head_dim
    half = head_dim // 2
    cosines, sines = cos + token * head_dim, sin + token * head_dim
    if head < num_queries:
        turned = _turned(q + token * q_token + head * q_head, cosines, sines, half, dims, inside)
        tl.store(out + (token * num_queries + head) * head_dim + dims, turned, mask=inside)
    else:
        head -= num_queries
        slot = tl.load(slots + token).to(tl.int64)
        inside &= slot >= 0
        row = slot // num_slots * block_stride + head * head_stride
        row += slot % num_slots * slot_stride
        turned = _turned(k + token * k_token + head * k_head, cosines, sines, half, dims, inside)
        values = tl.load(v + token * v_token + head * v_head + dims, mask=inside)
        kept = pool.dtype.element_ty
        tl.store(pool + row + dims, turned.to(kept), mask=inside)
        tl.store(pool + row + plane_stride + dims, values.to(kept), mask=inside)
