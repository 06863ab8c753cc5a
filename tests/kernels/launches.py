"""Calls of every kernel, as steps make them, over the types and the ways in which they differ."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.copy_blocks import copy_blocks
from kernels.gather_blocks import gather_cells
from kernels.paged_attention import EVERYTHING, SPLIT, Sight, paged_attention
from kernels.quantise_kv import MOST, read_kv_quantised, write_kv_quantised
from kernels.rms_norm import rms_norm
from kernels.rotate_write import rotate_write
from kernels.sample_tokens import Filters, sample_tokens
from kernels.scatter_blocks import scatter_cells
from kernels.silu_multiply import silu_multiply
from kernels.write_kv import write_kv

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DECODE, PROMPT = (1, 1, 1), (40, 1, 300)  # new tokens of each sequence


class Launch(NamedTuple):
    name: str
    call: Callable[[], object]
    in_ci: bool = True  # what stays out of it takes seconds to compile, or is much like another


class Heads(NamedTuple):
    num_kv: int = 8
    group: int = 4
    dim: int = 128
    block_size: int = 16


def launches() -> Iterator[Launch]:
    yield from copying()
    yield from layers()
    yield from quantising()
    yield from attending()
    for sorts in (False, True):
        yield Launch(f"sample_tokens, sorts {sorts}", partial(draw, sorts))


def copying() -> Iterator[Launch]:
    for dtype in (*FLOATS, torch.int8):
        for heads in (Heads(), Heads(1, 9, 80, 8)):
            in_ci = heads == Heads() or dtype == BF16
            yield Launch(f"copies {heads} {dtype}", partial(copy, heads, dtype), in_ci)


def layers() -> Iterator[Launch]:
    for dtype in FLOATS:
        for width in (576, 4096, 5120):
            in_ci = width == 4096 or dtype == BF16
            yield Launch(f"norm and gate {width} {dtype}", partial(norm, width, dtype), in_ci)
        for heads in (Heads(), Heads(3, 3, 64), Heads(1, 9, 80, 8), Heads(1, 8, 256, 128)):
            in_ci = heads == Heads() or dtype == BF16
            yield Launch(f"rotate_write {heads} {dtype}", partial(turn, heads, dtype), in_ci)


def quantising() -> Iterator[Launch]:
    for stored in MOST:
        for dtype in FLOATS:
            name = f"quantise_kv {dtype} {stored}"
            yield Launch(name, partial(quantise, Heads(), dtype, stored))


def attending() -> Iterator[Launch]:
    def attention(
        heads: Heads, dtype: torch.dtype, news: tuple[int, ...], *, in_ci: bool = False,
        sight: Sight = EVERYTHING, stored: torch.dtype | None = None, long: bool = True,
    ) -> Launch:  # fmt: skip
        words = ["paged_attention", heads, dtype, "decode" if news == DECODE else "prompt"]
        words += ["short"] * (not long) + [sight] * (sight != EVERYTHING) + [stored] * bool(stored)
        call = partial(attend, heads, dtype, news, sight, stored, long)
        return Launch(" ".join(map(str, words)), call, in_ci)

    for news in (DECODE, PROMPT):
        yield attention(Heads(), BF16, news, in_ci=True)
        yield attention(Heads(), FP16, news, in_ci=news == DECODE)
        yield attention(Heads(dim=64), FP32, news, in_ci=news == DECODE)
        yield attention(Heads(), FP32, news)
        yield attention(Heads(1, 2, 256, 8), FP32, news)
        yield attention(Heads(1, 2, 256, 128), BF16, news, in_ci=True)
        for block_size in (8, 32, 64, 128):
            yield attention(Heads(3, 3, 64, block_size), BF16, news)
        for group, dim in ((1, 64), (9, 80), (17, 96), (71, 64)):
            yield attention(Heads(1, group, dim), BF16, news, in_ci=group == 9)
        for sight in (Sight(1), Sight(4096), Sight(4096, 4)):
            yield attention(Heads(), BF16, news, sight=sight, in_ci=sight.sinks > 0)
        for stored in MOST:
            for dtype in FLOATS:
                in_ci = dtype == BF16
                yield attention(Heads(), dtype, news, stored=stored, in_ci=in_ci)
    yield attention(Heads(), BF16, DECODE, long=False)


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def pool(heads: Heads, dtype: torch.dtype) -> Tensor:
    return empty(5000, 2, heads.num_kv, heads.block_size, heads.dim, dtype=dtype)


def copy(heads: Heads, dtype: torch.dtype) -> None:
    blocks, ids = pool(heads, dtype), empty(20)
    cells = gather_cells(blocks, ids, (0, heads.num_kv))
    scatter_cells(cells, blocks, ids, 0)
    copy_blocks(blocks, ids, ids)
    tokens = empty(7, heads.num_kv, heads.dim, dtype=dtype)
    write_kv(blocks, tokens, tokens, empty(7))


def norm(width: int, dtype: torch.dtype) -> None:
    rows, weights = empty(33, width, dtype=dtype), empty(1, width, dtype=dtype)
    rms_norm(rows, weights, 1e-5)
    rms_norm(rows, weights, 1e-5, empty(33, width, dtype=dtype))
    silu_multiply(empty(33, 2 * width, dtype=dtype))


def turn(heads: Heads, dtype: torch.dtype) -> None:
    num_kv, num_query = heads.num_kv, heads.num_kv * heads.group
    qkv = empty(7, num_query + 2 * num_kv, heads.dim, dtype=dtype)
    q, k, v = torch.split(qkv, [num_query, num_kv, num_kv], 1)
    angles = empty(7, heads.dim, dtype=dtype)
    rotate_write(q, k, v, angles, angles, pool(heads, dtype), empty(7))


def quantise(heads: Heads, dtype: torch.dtype, stored: torch.dtype) -> None:
    blocks = pool(heads, stored)
    scales = empty(*blocks.shape[:4], dtype=FP32)
    tokens = empty(7, 2 * heads.num_kv, heads.dim, dtype=dtype)
    k, v = torch.split(tokens, heads.num_kv, 1)
    write_kv_quantised(blocks, scales, k, v, empty(7))
    read_kv_quantised(blocks, scales, empty(20), dtype)


def attend(
    heads: Heads, dtype: torch.dtype, news: tuple[int, ...], sight: Sight,
    stored: torch.dtype | None, long: bool,
) -> None:  # fmt: skip
    num_query, num_sequences = heads.num_kv * heads.group, len(news)
    width = (2 if long else 1) * SPLIT // heads.block_size
    blocks = pool(heads, stored or dtype)
    scales = empty(*blocks.shape[:4], dtype=FP32) if stored else None
    q = empty(sum(news), num_query, heads.dim, dtype=dtype)
    tables = empty(num_sequences, width)
    starts, contexts = empty(num_sequences + 1), empty(num_sequences)
    paged_attention(q, blocks, starts, contexts, tables, heads.dim**-0.5, sight, scales)


def draw(sorts: bool) -> None:
    shares = [empty(5, dtype=torch.float64) for _ in range(4)]
    filters = Filters(shares[0], shares[1], empty(5), shares[2], shares[3])
    sample_tokens(empty(5, 128_256, dtype=FP32), filters, sorts)
