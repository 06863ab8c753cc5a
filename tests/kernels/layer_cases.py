"""The kernels of a layer's arithmetic against their references."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.quantise_kv import (
    MOST,
    read_kv_quantised,
    read_kv_quantised_reference,
    write_kv_quantised,
    write_kv_quantised_reference,
)
from kernels.rms_norm import rms_norm, rms_norm_reference
from kernels.rotate_write import rotate_write, rotate_write_reference
from kernels.silu_multiply import silu_multiply, silu_multiply_reference
from tests.kernels.cases import TOLERANCE, Case, as_bytes, random_values, same_bits
from tests.kernels.samples import MEMORY_ORDERS, in_memory_order

ROWS = [(1, 576), (7, 33), (5, 4096), (3, 1), (0, 64)]
HEADS = [  # KV heads, queries a KV head, head dim, slots of a block
    (3, 3, 64, 16),
    (1, 8, 128, 128),
    (2, 1, 20, 8),
    (2, 3, 256, 32),
]


def layer_cases(device: str) -> Iterator[Case]:
    for dtype in TOLERANCE:
        for rows in ROWS:
            yield f"rms_norm {rows} {dtype}", partial(norm, rows, dtype, device)
            yield f"silu_multiply {rows} {dtype}", partial(gate, rows, dtype, device)
        yield f"rms_norm of heads {dtype}", partial(norm_heads, dtype, device)
        for heads in HEADS:
            yield f"rotate_write {heads} {dtype}", partial(turn, heads, dtype, device)
            for stored in MOST:
                name = f"quantise_kv {heads} {dtype} {stored}"
                yield name, partial(quantise, heads, dtype, stored, device)
        float8 = partial(quantise, HEADS[2], dtype, torch.float8_e4m3fn, device)
        yield f"quantise_kv {HEADS[2]} {dtype} float8 in bytes", partial(as_bytes, float8)
    yield "rms_norm beside a row that is not finite", partial(norm_beside_nan, device)
    yield "silu_multiply beside a row that is not finite", partial(gate_beside_nan, device)
    yield "rotate_write beside a row that is not finite", partial(turn_beside_nan, device)
    yield "quantise_kv of rows that are not finite", partial(quantise_broken, device)
    every = partial(quantise_every_float8, device)
    yield "quantise_kv of every float8", every
    yield "quantise_kv of every float8 in bytes", partial(as_bytes, every)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def norm(rows: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    wide = random_values((rows[0], 2 * rows[1]), dtype)
    x, weights = wide[:, : rows[1]], random_values((1, rows[1]), dtype, seed=1)
    x_there = wide.to(device)[:, : rows[1]]
    got = rms_norm(x_there, weights.to(device), 1e-5)
    close(got, rms_norm_reference(x, weights, 1e-5), dtype)
    residual = random_values(rows, dtype, seed=2)
    residual_there = residual.clone().to(device)
    got = rms_norm(x_there, weights.to(device), 1e-5, residual_there)
    close(got, rms_norm_reference(x, weights, 1e-5, residual), dtype)
    close(residual_there, residual, dtype)


def norm_heads(dtype: torch.dtype, device: str) -> None:
    x, weights = random_values((21, 64), dtype), random_values((3, 64), dtype, seed=1)
    got = rms_norm(x.to(device), weights.to(device), 1e-6)
    close(got, rms_norm_reference(x, weights, 1e-6), dtype)
    alone = rms_norm_reference(x[1::3], weights[1:2], 1e-6)
    close(got[1::3], alone, dtype)


def gate(rows: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    gate_up = random_values((rows[0], 2 * rows[1]), dtype) * 8
    close(silu_multiply(gate_up.to(device)), silu_multiply_reference(gate_up), dtype)


def turn(heads: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    num_kv, group, dim, size = heads
    num_queries = num_kv * group
    packed = random_values((5, num_queries + 2 * num_kv, dim), dtype)
    angles = random_values((5, dim // 2), torch.float32, seed=1)
    cos = torch.cat([angles.cos()] * 2, 1).to(dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], 1).to(dtype)
    slots = torch.randperm(4 * size, generator=torch.Generator().manual_seed(2))[:5]
    slots[4] = -1
    cut = [num_queries, num_kv, num_kv]
    for order, kept in zip(MEMORY_ORDERS, (dtype, torch.float16, dtype), strict=True):
        want_pool = random_values((4, 2, num_kv, size, dim), kept, seed=3)
        pool = in_memory_order(want_pool.clone().to(device), order)
        q, k, v = torch.split(packed, cut, 1)
        want = rotate_write_reference(q, k, v, cos, sin, want_pool, slots)
        q, k, v, cosines, sines = (x.to(device) for x in (q, k, v, cos, sin))
        got = rotate_write(q, k, v, cosines, sines, pool, slots.to(device))
        close(got, want, dtype)
        torch.testing.assert_close(pool.cpu(), want_pool, rtol=2e-2, atol=2e-2)
        same_bits(pool.cpu()[:, 1], want_pool[:, 1])
        if kept == dtype:
            close(pool, want_pool, dtype)


def norm_beside_nan(device: str) -> None:
    x, weights = random_values((3, 64), torch.float32).to(device), torch.ones(1, 64, device=device)
    sick = x.clone()
    sick[1, 5] = torch.nan
    got, clean = (rms_norm(each, weights, 1e-5) for each in (sick, x))
    same_bits(got[[0, 2]], clean[[0, 2]])
    assert got[1].isnan().all()


def gate_beside_nan(device: str) -> None:
    x = random_values((3, 2 * 700), torch.float32).to(device)
    sick = x.clone()
    sick[1, 5] = torch.nan
    got, clean = silu_multiply(sick), silu_multiply(x)
    same_bits(got[[0, 2]], clean[[0, 2]])
    assert got[1].isnan().nonzero().tolist() == [[5]]


def turn_beside_nan(device: str) -> None:
    packed = random_values((3, 4, 16), torch.float32).to(device)
    sick = packed.clone()
    sick[1] = torch.nan
    ones = torch.ones(3, 16, device=device)
    found = []
    for each in (sick, packed):
        pool = torch.zeros(2, 2, 1, 8, 16, device=device)
        q, k, v = torch.split(each, [2, 1, 1], 1)
        turned = rotate_write(q, k, v, ones, ones, pool, torch.tensor([0, 3, 9], device=device))
        found.append((turned, pool))
    (turned, pool), (clean, clean_pool) = found
    same_bits(turned[[0, 2]], clean[[0, 2]])
    pool[0, :, :, 3] = clean_pool[0, :, :, 3]
    same_bits(pool, clean_pool)


def quantise(
    heads: tuple[int, int, int, int], dtype: torch.dtype, stored: torch.dtype, device: str
) -> None:
    num_kv, _, dim, size = heads
    packed = random_values((5, 2 * num_kv, dim), dtype)
    packed[3] = 0.0
    k, v = packed[:, :num_kv], packed[:, num_kv:]
    slots = torch.randperm(4 * size, generator=torch.Generator().manual_seed(2))[:5]
    want_pool = torch.zeros(4, 2, num_kv, size, dim).to(stored)
    want_scales = torch.zeros(4, 2, num_kv, size)
    pool, scales = want_pool.clone().to(device), want_scales.clone().to(device)
    write_kv_quantised_reference(want_pool, want_scales, k, v, slots)
    there = packed.to(device)
    write_kv_quantised(pool, scales, there[:, :num_kv], there[:, num_kv:], slots.to(device))
    torch.testing.assert_close(scales.cpu(), want_scales)
    stored_alike = pool.cpu().float() == want_pool.float()
    assert stored_alike.float().mean() > 0.999, stored_alike.logical_not().nonzero()
    ids = torch.tensor([2, 0])
    want = read_kv_quantised_reference(pool.cpu(), scales.cpu(), ids, dtype)
    close(read_kv_quantised(pool, scales, ids.to(device), dtype), want, dtype)
    largest = packed[:, :num_kv].float().abs().amax(-1, keepdim=True)
    blocks, offsets = slots // size, slots % size
    back = read_kv_quantised_reference(want_pool, want_scales, torch.arange(4), torch.float32)
    error = back[blocks, 0, :, offsets] - k.float()
    step = 1 / 254 if stored == torch.int8 else 1 / 28  # half of the widest gap, of the largest
    assert (error.abs() <= step * largest * 1.01).all()


def quantise_broken(device: str) -> None:
    x = random_values((3, 1, 8), torch.float32)
    x[0, 0, 3], x[1, 0, 5] = torch.nan, torch.inf
    for stored in MOST:
        pool = torch.zeros(1, 2, 1, 8, 8).to(stored).to(device)
        scales = torch.zeros(1, 2, 1, 8, device=device)
        there = x.to(device)
        write_kv_quantised(pool, scales, there, there, torch.arange(3, device=device))
        got = read_kv_quantised(pool, scales, torch.tensor([0], device=device), torch.float32)
        sound = got.cpu()[0, :, 0].isfinite().all(-1)
        assert sound[:, :3].tolist() == [[False, False, True]] * 2, stored


def quantise_every_float8(device: str) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()]  # 448 among them, so that the scale is 1
    row = values.view(1, 1, -1).to(device)
    pool = torch.zeros(1, 2, 1, 8, len(values)).to(torch.float8_e4m3fn).to(device)
    scales, slots = torch.zeros(1, 2, 1, 8, device=device), torch.tensor([3], device=device)
    write_kv_quantised(pool, scales, row, row, slots)
    assert torch.equal(pool[0, 1, 0, 3].cpu().float(), values)
    got = read_kv_quantised(pool, scales, torch.tensor([0], device=device), torch.float32)
    assert torch.equal(got[0, 0, 0, 3].cpu(), values)
