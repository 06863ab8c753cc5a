"""Paged attention's kernel against its reference."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.paged_attention import SPLIT, Sight, paged_attention, paged_attention_reference
from kernels.quantise_kv import write_kv_quantised_reference
from tests.kernels.cases import TOLERANCE, Case
from tests.kernels.samples import MEMORY_ORDERS, SHAPES, Paged, Shape, in_memory_order, paged

LONG = Shape(2, 3, 64, ((SPLIT + 1, 1), (3 * SPLIT, 1), (40, 1), (2 * SPLIT + 130, 1)))
SIGHTS = (Sight(1), Sight(20), Sight(20, 4), Sight(130), Sight(150, 140))
SEEN = {"long": LONG, **{name: SHAPES[name] for name in ("smollm2 decode", "chunks", "odd")}}


def attention_cases(device: str) -> Iterator[Case]:
    for name, shape in {**SHAPES, "long": LONG}.items():
        for dtype in TOLERANCE:
            yield f"paged_attention {name} {dtype}", partial(attend, shape, dtype, device)
    for name in ("smollm2 decode", "chunks", "long"):
        shape = SEEN[name]
        yield f"paged_attention {name} block sizes", partial(attend_alike, shape, device)
        if shape is not LONG:
            order = partial(attend_in_any_order, shape, device)
            yield f"paged_attention {name} memory orders", order
    for name, shape in SEEN.items():
        if name in ("chunks", "long"):
            windows = partial(attend_through_windows, shape, device)
            yield f"paged_attention {name} windows", windows
        for stored in (torch.int8, torch.float8_e4m3fn):
            yield f"paged_attention {name} {stored}", partial(attend_narrow, shape, stored, device)


def attend(shape: Shape, dtype: torch.dtype, device: str) -> None:
    sample = paged(shape, 16, dtype, device)
    tolerance = TOLERANCE[dtype]
    want = paged_attention_reference(*paged(shape, 16, dtype).arguments)
    out = paged_attention(*sample.arguments).cpu()
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)


def attend_alike(shape: Shape, device: str) -> None:
    dtype = torch.float32
    first = paged_attention(*paged(shape, 128, dtype, device, fragmented=False).arguments)
    for block_size in (8, 64) if shape is LONG else (8, 16, 32, 64):
        q, pool, *tables, scale = paged(shape, block_size, dtype, device).arguments
        narrow = [table.int() for table in tables]
        out = paged_attention(q, pool, narrow[0], narrow[1], narrow[2], scale)
        assert torch.equal(out, first), f"block size {block_size}"


def attend_in_any_order(shape: Shape, device: str) -> None:
    q, pool, *tables, scale = paged(shape, 16, torch.float32, device).arguments
    first = paged_attention(q, pool, tables[0], tables[1], tables[2], scale)
    for order in MEMORY_ORDERS:
        same = in_memory_order(pool, order)
        out = paged_attention(q, same, tables[0], tables[1], tables[2], scale)
        assert torch.equal(out, first), order


def attend_through_windows(shape: Shape, device: str) -> None:
    dtype = torch.float32
    for sight in SIGHTS[2:] if shape is LONG else SIGHTS:
        want = paged_attention_reference(*paged(shape, 16, dtype).arguments, sight)
        out = paged_attention(*paged(shape, 16, dtype, device).arguments, sight).cpu()
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def attend_narrow(shape: Shape, stored: torch.dtype, device: str) -> None:
    sample = paged(shape, 16, torch.float32, filler=0.0)
    pool, scales = _narrowed(sample, stored)
    q, _, *tables, scale = sample.arguments
    want = paged_attention_reference(
        q, pool, tables[0], tables[1], tables[2], scale, scales_NPHS=scales
    )
    q, pool, scales = (x.to(device) for x in (q, pool, scales))
    there = [table.to(device) for table in tables]
    out = paged_attention(q, pool, there[0], there[1], there[2], scale, scales_NPHS=scales)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-5)


def _narrowed(sample: Paged, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sample's pool written once more, token by token, in one byte a value."""
    num_blocks, _, heads, num_slots, dim = sample.pool_NPHSD.shape
    tokens_PTHD = sample.pool_NPHSD.permute(1, 0, 3, 2, 4).reshape(2, -1, heads, dim)
    pool = torch.zeros(sample.pool_NPHSD.shape, dtype=stored)
    scales = torch.zeros(sample.pool_NPHSD.shape[:4])
    slots = torch.arange(num_blocks * num_slots)
    write_kv_quantised_reference(pool, scales, tokens_PTHD[0], tokens_PTHD[1], slots)
    return pool, scales
