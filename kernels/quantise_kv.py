"""Keys and values kept in one byte each: quantised as they are written, widened as they are read.

k_THD, v_THD   T new tokens, H local KV heads, D head dim; rows of D contiguous
pool_NPHSD     N blocks, planes K and V, S slots a block, int8 or float8_e4m3fn; rows contiguous
scales_NPHS    fp32, contiguous: a value is what is stored times its token's and head's scale, which
               is the largest magnitude of the row over the largest one stored (127, 448)
slots_T        where each token goes: block_id * S + offset, all different, int64
block_ids_B    the B blocks to read

A row with a NaN or an infinity gets a scale that is not finite, so that reading it cannot look
sound. int8 rounds halves up; float8 rounds to nearest even. Cards before Ada have no such type:
kernels then see a float8 pool as bytes, and turn them by way of fp16, whose exponents go further.
"""

import torch
from torch import Tensor

from kernels.launch import knows_float8, launches, tl, triton

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest magnitude stored
TINY = 1e-30  # a row of zeros is divided by this


def write_kv_quantised_reference(
    pool_NPHSD: Tensor, scales_NPHS: Tensor, k_THD: Tensor, v_THD: Tensor, slots_T: Tensor
) -> None:
    """What `write_kv_quantised` means."""
    num_slots = pool_NPHSD.shape[3]
    blocks_T, offsets_T = slots_T // num_slots, slots_T % num_slots
    for plane, x_THD in enumerate((k_THD, v_THD)):
        stored_THD, scales_TH = _quantised(x_THD.float(), pool_NPHSD.dtype)
        raw_NHSD = pool_NPHSD[:, plane].view(torch.uint8)  # float8 knows no indexed writing
        raw_NHSD[blocks_T, :, offsets_T] = stored_THD.view(torch.uint8)
        scales_NPHS[blocks_T, plane, :, offsets_T] = scales_TH


def _quantised(x_THD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales_TH = x_THD.abs().amax(-1) / MOST[dtype]
    scaled_THD = x_THD / scales_TH.clamp_min(TINY)[..., None]
    scaled_THD = torch.nan_to_num(scaled_THD, 0.0, 0.0, 0.0)
    if dtype == torch.int8:
        scaled_THD = (scaled_THD + 0.5).floor()
    return scaled_THD.clamp(-MOST[dtype], MOST[dtype]).to(dtype), scales_TH


def read_kv_quantised_reference(
    pool_NPHSD: Tensor, scales_NPHS: Tensor, block_ids_B: Tensor, dtype: torch.dtype
) -> Tensor:
    """What `read_kv_quantised` means."""
    raw_BPHSD = pool_NPHSD.view(torch.uint8)[block_ids_B].view(pool_NPHSD.dtype)
    return (raw_BPHSD.float() * scales_NPHS[block_ids_B][..., None]).to(dtype)


def write_kv_quantised(
    pool_NPHSD: Tensor, scales_NPHS: Tensor, k_THD: Tensor, v_THD: Tensor, slots_T: Tensor
) -> None:
    """As the reference, ties apart, in one launch."""
    if not launches(pool_NPHSD):
        write_kv_quantised_reference(pool_NPHSD, scales_NPHS, k_THD, v_THD, slots_T)
        return
    _, num_planes, num_heads, num_slots, head_dim = pool_NPHSD.shape
    *strides, dim_stride = pool_NPHSD.stride()
    assert dim_stride == 1 and num_planes == 2 and scales_NPHS.is_contiguous()
    assert scales_NPHS.shape == pool_NPHSD.shape[:4] and scales_NPHS.dtype == torch.float32
    assert k_THD.stride(2) == v_THD.stride(2) == 1
    if len(slots_T):
        _write_kv_quantised[(len(slots_T), num_heads, 2)](
            seen_by_kernels(pool_NPHSD), scales_NPHS, k_THD, v_THD, slots_T,
            *k_THD.stride()[:2], *v_THD.stride()[:2], *strides, num_slots, head_dim,
            MOST[pool_NPHSD.dtype], TINY, pool_NPHSD.dtype == torch.int8,
            triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip


def read_kv_quantised(
    pool_NPHSD: Tensor, scales_NPHS: Tensor, block_ids_B: Tensor, dtype: torch.dtype
) -> Tensor:
    """The blocks as kv_BPHSD of `dtype`, as the reference up to rounding, in one launch."""
    if not launches(pool_NPHSD):
        return read_kv_quantised_reference(pool_NPHSD, scales_NPHS, block_ids_B, dtype)
    _, num_planes, num_heads, num_slots, head_dim = pool_NPHSD.shape
    *strides, dim_stride = pool_NPHSD.stride()
    assert dim_stride == 1 and scales_NPHS.is_contiguous()
    shape = (len(block_ids_B), *pool_NPHSD.shape[1:])
    kv_BPHSD = torch.empty(shape, dtype=dtype, device=pool_NPHSD.device)
    if len(block_ids_B):
        cells = len(block_ids_B) * num_planes * num_heads
        _read_kv_quantised[(cells, triton.cdiv(num_slots * head_dim, CHUNK))](
            seen_by_kernels(pool_NPHSD), scales_NPHS, block_ids_B, kv_BPHSD, *strides,
            num_planes, num_heads, num_slots, head_dim, CHUNK,
        )  # fmt: skip
    return kv_BPHSD


def seen_by_kernels(pool_NPHSD: Tensor) -> Tensor:
    """The pool, as bytes where its type is none to the card."""
    if pool_NPHSD.dtype == torch.float8_e4m3fn and not knows_float8():
        return pool_NPHSD.view(torch.uint8)
    return pool_NPHSD


CHUNK = 1024  # values a program widens
LEAST_NORMAL = tl.constexpr(2.0**-6)  # of float8_e4m3fn; below it values are 2**-9 apart


@triton.jit
def _rounded_to_float8(x):  # type: ignore[no-untyped-def]
    """To 3 bits of mantissa, nearest even, so that the cast is exact: Triton 3.7's interpreter
    forgets the carry when it rounds up to a power of two."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(
        tl.abs(x) < LEAST_NORMAL, tl.floor(x * 512 + 0.5) / 512, bits.to(tl.float32, bitcast=True)
    )


@triton.jit
def widened(stored):  # type: ignore[no-untyped-def]
    """What is stored, in fp32; bytes are those of float8."""
    if stored.dtype == tl.uint8:
        wide = stored.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)  # exponents are 8 too small
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256
    else:
        return stored.to(tl.float32)


@triton.jit
def _narrowed(x, kept: tl.constexpr):  # type: ignore[no-untyped-def]
    """The other way, of numbers that are stored exactly."""
    if kept == tl.uint8:
        half = (x / 256).to(tl.float16).to(tl.uint16, bitcast=True)
        return (((half >> 8) & 0x80) | ((half >> 7) & 0x7F)).to(tl.uint8)
    else:
        return x.to(kept)


@triton.jit
def _write_kv_quantised(  # type: ignore[no-untyped-def]
    pool, scales, k, v, slots, k_token, k_head, v_token, v_head,
    block_stride, plane_stride, head_stride, slot_stride,
    num_slots, head_dim, most, tiny, WHOLE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, plane = tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    slot = tl.load(slots + token).to(tl.int64)
    block, offset = slot // num_slots, slot % num_slots
    dims = tl.arange(0, WIDTH)
    inside = dims < head_dim
    if plane == 0:
        values = tl.load(k + token * k_token + head * k_head + dims, mask=inside, other=0.0)
    else:
        values = tl.load(v + token * v_token + head * v_head + dims, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    broken = tl.sum((wide != wide).to(tl.int32), 0) > 0
    scale = tl.max(tl.abs(wide), 0) / most
    scaled = wide / tl.maximum(scale, tiny)
    scale = tl.where(broken, float("nan"), scale)
    scaled = tl.where(tl.abs(scaled) < float("inf"), scaled, 0.0)  # nor is a NaN less than it
    scaled = tl.floor(scaled + 0.5) if WHOLE else _rounded_to_float8(scaled)
    scaled = tl.minimum(tl.maximum(scaled, -most), most)
    row = block * block_stride + plane * plane_stride + head * head_stride + offset * slot_stride
    tl.store(pool + row + dims, _narrowed(scaled, pool.dtype.element_ty), mask=inside)
    tl.store(scales + ((block * 2 + plane) * num_heads + head) * num_slots + offset, scale)


@triton.jit
def _read_kv_quantised(  # type: ignore[no-untyped-def]
    pool, scales, block_ids, kv, block_stride, plane_stride, head_stride, slot_stride,
    num_planes, num_heads, num_slots, head_dim, CHUNK: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0).to(tl.int64)
    head, plane = cell % num_heads, cell // num_heads % num_planes
    block = tl.load(block_ids + cell // num_heads // num_planes).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < num_slots * head_dim
    slot = at // head_dim
    row = block * block_stride + plane * plane_stride + head * head_stride
    stored = tl.load(pool + row + slot * slot_stride + at % head_dim, mask=inside, other=0.0)
    scale_at = ((block * num_planes + plane) * num_heads + head) * num_slots + slot
    scale = tl.load(scales + scale_at, mask=inside, other=0.0)
    values = widened(stored) * scale
    tl.store(kv + cell * num_slots * head_dim + at, values.to(kv.dtype.element_ty), mask=inside)
