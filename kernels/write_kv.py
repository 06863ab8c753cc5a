"""Write the keys and values of new tokens into their slots.

k_THD, v_THD   T new tokens, H local KV heads, D head dim; rows of D contiguous
pool_NPHSD     N blocks, planes K and V, S slots a block; written in place; of any strides as long
               as a row of D is contiguous
slots_T        where each token goes: block_id * S + offset, all different, int64
"""

from torch import Tensor

from kernels.launch import launches, tl, triton


def write_kv_reference(pool_NPHSD: Tensor, k_THD: Tensor, v_THD: Tensor, slots_T: Tensor) -> None:
    """What `write_kv` means."""
    num_slots = pool_NPHSD.shape[3]
    blocks_T, offsets_T = slots_T // num_slots, slots_T % num_slots
    pool_NPHSD[blocks_T, 0, :, offsets_T] = k_THD
    pool_NPHSD[blocks_T, 1, :, offsets_T] = v_THD


def write_kv(pool_NPHSD: Tensor, k_THD: Tensor, v_THD: Tensor, slots_T: Tensor) -> None:
    """Bit-exact with the reference, in one launch."""
    if not launches(pool_NPHSD):
        write_kv_reference(pool_NPHSD, k_THD, v_THD, slots_T)
        return
    _, num_planes, num_heads, num_slots, head_dim = pool_NPHSD.shape
    *strides, dim_stride = pool_NPHSD.stride()
    assert dim_stride == 1 and num_planes == 2
    assert k_THD.stride(2) == v_THD.stride(2) == 1
    assert k_THD.dtype == v_THD.dtype == pool_NPHSD.dtype
    if len(slots_T):
        _write_kv[(len(slots_T), num_heads)](
            pool_NPHSD, k_THD, v_THD, slots_T,
            k_THD.stride(0), k_THD.stride(1), v_THD.stride(0), v_THD.stride(1),
            *strides, num_slots, head_dim, triton.next_power_of_2(head_dim),
            num_warps=1,  # for a row of 128 in bf16: 8 bytes a thread
        )  # fmt: skip


@triton.jit
def _write_kv(  # type: ignore[no-untyped-def]
    pool, k, v, slots, k_token, k_head, v_token, v_head,
    block_stride, plane_stride, head_stride, slot_stride,
    num_slots, head_dim, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    inside = dims < head_dim
    keys = tl.load(k + token * k_token + head * k_head + dims, mask=inside)
    values = tl.load(v + token * v_token + head * v_head + dims, mask=inside)
    block, offset = slot // num_slots, slot % num_slots
    row = block * block_stride + head * head_stride + offset * slot_stride
    tl.store(pool + row + dims, keys, mask=inside)
    tl.store(pool + row + plane_stride + dims, values, mask=inside)
