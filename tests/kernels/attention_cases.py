"""Paged attention's kernel against its reference."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.paged_attention import SPLIT, Sight, paged_attention, paged_attention_reference
from kernels.quantise_kv import write_kv_quantised_reference
from tests.kernels.cases import TOLERANCE, Case, as_bytes
from tests.kernels.samples import MEMORY_ORDERS, SHAPES, Paged, Shape, in_memory_order, paged

LONG = Shape(2, 3, 64, ((SPLIT + 1, 1), (3 * SPLIT, 1), (40, 1), (2 * SPLIT + 130, 1)))
SIGHTS = (Sight(1), Sight(20), Sight(20, 4), Sight(130), Sight(150, 140))
CORNERS = (  # head dims and groups from end to end, each with a dtype and a block size
    (Shape(1, 2, 256, ((130, 1), (20, 20))), torch.float32, 8),
    (Shape(1, 1, 256, ((129, 1), (7, 1))), torch.bfloat16, 128),
    (Shape(2, 4, 128, ((70, 1), (33, 5))), torch.float16, 32),
    (Shape(1, 17, 96, ((20, 1), (40, 3))), torch.bfloat16, 64),
    (Shape(1, 71, 64, ((33, 1), (9, 1))), torch.float32, 64),
    (Shape(1, 71, 64, ((33, 2), (9, 9))), torch.float16, 128),
)
SEEN = {"long": LONG, **{name: SHAPES[name] for name in ("smollm2 decode", "chunks", "odd")}}


def attention_cases(device: str) -> Iterator[Case]:
    for name, shape in {**SHAPES, "long": LONG}.items():
        for dtype in TOLERANCE:
            yield f"paged_attention {name} {dtype}", partial(attend, shape, dtype, device)
    for shape, dtype, block_size in CORNERS:
        name = f"{shape.group} x {shape.head_dim}, blocks of {block_size} {dtype}"
        yield f"paged_attention {name}", partial(attend, shape, dtype, device, block_size)
    for name, places in (("smollm2 decode", (1,)), ("chunks", (0, 1, None))):
        yield f"paged_attention {name} NaN", partial(attend_beside_nan, SEEN[name], places, device)
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
    float8 = partial(attend_narrow, SEEN["chunks"], torch.float8_e4m3fn, device)
    yield "paged_attention chunks float8 in bytes", partial(as_bytes, float8)


def attend(shape: Shape, dtype: torch.dtype, device: str, block_size: int = 16) -> None:
    sample = paged(shape, block_size, dtype, device)
    tolerance = TOLERANCE[dtype]
    want = paged_attention_reference(*paged(shape, block_size, dtype).arguments)
    out = paged_attention(*sample.arguments).cpu()
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)


def attend_alike(shape: Shape, device: str) -> None:
    also = (torch.bfloat16,) if shape is SHAPES["chunks"] else ()
    for dtype in (torch.float32, *also):
        attend_alike_in(dtype, shape, device)


def attend_alike_in(dtype: torch.dtype, shape: Shape, device: str) -> None:
    first = paged_attention(*paged(shape, 128, dtype, device, fragmented=False).arguments)
    for block_size in (8, 64) if shape is LONG else (8, 16, 32, 64):
        q, pool, *tables, scale = paged(shape, block_size, dtype, device).arguments
        narrow = [table.int() for table in tables]
        out = paged_attention(q, pool, narrow[0], narrow[1], narrow[2], scale)
        assert torch.equal(out, first), f"block size {block_size}"


def attend_beside_nan(shape: Shape, places: Sequence[int | None], device: str) -> None:
    """What is no number in one sequence's keys or values (a plane) or queries (None) reaches no
    other sequence.
    """
    sample = paged(shape, 16, torch.float32, device)
    clean = paged_attention(*sample.arguments)
    q, pool, starts, *tables, scale = sample.arguments
    rows = slice(int(starts[1]), int(starts[2]))
    others = [row for row in range(len(q)) if not rows.start <= row < rows.stop]
    first_block = int(sample.block_tables_SB[1, 0])
    for plane in places:
        sick_q, sick_pool = q.clone(), pool.clone()
        if plane is None:
            sick_q[rows.stop - 1, 0] = torch.nan
        else:
            sick_pool[first_block, plane, :, 3] = torch.nan
        out = paged_attention(sick_q, sick_pool, starts, tables[0], tables[1], scale)
        assert torch.equal(out[others], clean[others])
        assert out[rows.stop - 1].isnan().any()


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
    for dtype in (torch.float16, torch.bfloat16) if shape is not LONG else ():
        want = paged_attention_reference(*paged(shape, 32, dtype).arguments, SIGHTS[2])
        out = paged_attention(*paged(shape, 32, dtype, device).arguments, SIGHTS[2]).cpu()
        torch.testing.assert_close(out, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


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
