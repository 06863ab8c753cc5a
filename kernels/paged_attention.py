"""Causal attention that reads keys and values straight from the blocks of a paged pool.

q_THD             queries of a step's T tokens, sequence after sequence; H query heads, D head dim
pool_NPHSD        N blocks, planes K and V, H local KV heads, S slots a block; of any strides as
                  long as a row of D is contiguous
query_starts_S1   sequence s has the queries query_starts[s] : query_starts[s + 1]
context_lens_S    its tokens so far, these queries included: the last query sees them all
block_tables_SB   its blocks in order; what lies past its context is padding and never matters
scale             what scores are multiplied by
sight             a query sees the `window` newest tokens, itself included, and the first `sinks`
                  (StreamingLLM, Xiao et al., arXiv 2309.17453)
scales_NPHS       of a pool of one-byte values, fp32: see kernels/quantise_kv.py
out_THD           one row per query

Decode rows are reduced in splits of SPLIT tokens, side by side, which are then joined in order
(Flash-Decoding; sums are joined as in online softmax, Milakov and Gimelshein, arXiv 1805.02867).

Query head h reads KV head h * H_kv // H_q. Sums over tokens run in an order that the block size has
no part in (the kernel's in tiles of TILE, which every block size divides), and a sequence is
reduced by itself. So neither the block size, nor the pool's strides, nor where blocks lie in it,
nor (on a CPU) the neighbours in the batch change one bit of a result. Slots past a context may
hold anything, NaN included.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.launch import launches, tl, triton
from kernels.quantise_kv import read_kv_quantised_reference, seen_by_kernels, widened


class Sight(NamedTuple):
    """Which earlier tokens a query sees: the `window` newest (0: all) and the first `sinks`."""

    window: int = 0
    sinks: int = 0


EVERYTHING = Sight()


def paged_attention_reference(
    q_THD: Tensor,
    pool_NPHSD: Tensor,
    query_starts_S1: Tensor,
    context_lens_S: Tensor,
    block_tables_SB: Tensor,
    scale: float,
    sight: Sight = EVERYTHING,
    scales_NPHS: Tensor | None = None,
) -> Tensor:
    """What `paged_attention` means, in fp32; quick enough to serve from a CPU.

    One sequence at a time: quicker than padding decode rows into one batch, at 16 rows over 2,000
    tokens by half, and each copies only its own blocks, into one scratch that the next reuses.
    """
    _, num_planes, num_heads, num_slots, head_dim = pool_NPHSD.shape
    in_rows = pool_NPHSD.is_contiguous() and scales_NPHS is None
    cells = pool_NPHSD.view(-1, num_slots * head_dim) if in_rows else pool_NPHSD
    heads_per_block = num_planes * num_heads
    head_P1 = torch.arange(heads_per_block, device=pool_NPHSD.device)[:, None]
    first_cells_SB = block_tables_SB.long() * heads_per_block
    out_THD = torch.empty_like(q_THD)
    starts: list[int] = query_starts_S1.tolist()
    contexts: list[int] = context_lens_S.tolist()
    most_blocks = -(-max(contexts, default=0) // num_slots)
    dtype = cells.dtype if scales_NPHS is None else torch.float32
    shape = (most_blocks * heads_per_block, num_slots * head_dim)
    scratch = torch.empty(shape, dtype=dtype, device=cells.device)
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        num_blocks = -(-context // num_slots)
        cell_ids = first_cells_SB[s, :num_blocks] + head_P1
        kv = scratch[: cell_ids.numel()]
        if in_rows:
            torch.index_select(cells, 0, cell_ids.view(-1), out=kv)
        else:
            blocks_B = block_tables_SB[s, :num_blocks].long()
            if scales_NPHS is None:
                kv_BPHSD = pool_NPHSD[blocks_B]
            else:
                kv_BPHSD = read_kv_quantised_reference(pool_NPHSD, scales_NPHS, blocks_B, dtype)
            kv_PHBSD = kv_BPHSD.permute(1, 2, 0, 3, 4)
            kv.view(kv_PHBSD.shape).copy_(kv_PHBSD)
        kv_PHCD = kv.view(num_planes, num_heads, -1, head_dim)[:, :, :context].float()
        out_THD[rows] = _attend(q_THD[rows].float(), kv_PHCD, scale, sight)
    return out_THD


def _attend(q_QHD: Tensor, kv_PHCD: Tensor, scale: float, sight: Sight) -> Tensor:
    """The Q last tokens of one context of C tokens, each seeing itself and what came before."""
    num_queries, _, head_dim = q_QHD.shape
    num_heads, context = kv_PHCD.shape[1:3]
    q_HGQD = q_QHD.view(num_queries, num_heads, -1, head_dim).permute(1, 2, 0, 3)
    mask_QC = None if num_queries == 1 else _mask(num_queries, context, q_QHD.device)
    if sight.window and context > sight.window:
        token_C = torch.arange(context, device=q_QHD.device)
        oldest_Q1 = token_C[context - num_queries :, None] - sight.window
        far_QC = (token_C <= oldest_Q1) & (token_C >= sight.sinks)
        mask_QC = torch.zeros_like(far_QC, dtype=torch.float32) if mask_QC is None else mask_QC
        mask_QC = mask_QC.masked_fill(far_QC, -torch.inf)
    if num_queries == 1:  # the heads of a group are then alike: queries that see the same
        q_1HGD = q_HGQD[None, :, :, 0]
        k_1HCD, v_1HCD = kv_PHCD[:, None]
        out_1HGD = scaled_dot_product_attention(q_1HGD, k_1HCD, v_1HCD, mask_QC, scale=scale)
        return out_1HGD.reshape(q_QHD.shape)
    k_HGCD, v_HGCD = kv_PHCD[:, :, None].expand(-1, -1, q_HGQD.shape[1], -1, -1)
    out_HGQD = scaled_dot_product_attention(q_HGQD, k_HGCD, v_HGCD, mask_QC, scale=scale)
    return out_HGQD.permute(2, 0, 1, 3).reshape(q_QHD.shape)


def _mask(num_queries: int, context: int, device: torch.device) -> Tensor:
    hidden = torch.full((num_queries, context), -torch.inf, device=device)
    return hidden.triu_(context - num_queries + 1)


def paged_attention(
    q_THD: Tensor,
    pool_NPHSD: Tensor,
    query_starts_S1: Tensor,
    context_lens_S: Tensor,
    block_tables_SB: Tensor,
    scale: float,
    sight: Sight = EVERYTHING,
    scales_NPHS: Tensor | None = None,
) -> Tensor:
    """As the reference up to rounding, without waiting for the device: one launch, and for decode
    rows over tables of more than SPLIT tokens a second one that joins the splits."""
    if not launches(pool_NPHSD):
        return paged_attention_reference(
            q_THD, pool_NPHSD, query_starts_S1, context_lens_S, block_tables_SB, scale,
            sight, scales_NPHS,
        )  # fmt: skip
    _, num_planes, num_kv_heads, num_slots, head_dim = pool_NPHSD.shape
    num_tokens, num_query_heads, _ = q_THD.shape
    num_sequences = len(context_lens_S)
    block_stride, plane_stride, head_stride, slot_stride, dim_stride = pool_NPHSD.stride()
    assert dim_stride == 1 and q_THD.is_contiguous() and num_planes == 2
    assert block_tables_SB.stride(1) == 1 and TILE % num_slots == 0, f"block size {num_slots}"
    if scales_NPHS is None:
        assert q_THD.dtype == pool_NPHSD.dtype, f"{q_THD.dtype} queries, {pool_NPHSD.dtype} cache"
    else:
        assert scales_NPHS.shape == pool_NPHSD.shape[:4] and scales_NPHS.is_contiguous()
    out_THD = torch.empty_like(q_THD)
    if not num_tokens:
        return out_THD
    group = num_query_heads // num_kv_heads
    group_rows = triton.next_power_of_2(group)
    decodes = num_tokens == num_sequences
    width = max(16, triton.next_power_of_2(head_dim))
    most_rows = DECODE_ROWS if decodes else prefill_rows(width * q_THD.itemsize)
    row_queries = max(1, most_rows // group_rows)
    num_splits = triton.cdiv(block_tables_SB.shape[1] * num_slots, SPLIT) if decodes else 1
    split = SPLIT if num_splits > 1 else 0
    parts, tops, totals = out_THD, out_THD, out_THD  # not written unless split
    if split:
        rows = (num_tokens, num_query_heads, num_splits)
        parts = q_THD.new_empty(*rows, head_dim, dtype=torch.float32)
        tops, totals = q_THD.new_empty(2, *rows, dtype=torch.float32)
    grid = (num_tokens // row_queries + num_sequences, num_kv_heads, num_splits)
    _paged_attention[grid](
        q_THD, seen_by_kernels(pool_NPHSD), query_starts_S1, context_lens_S, block_tables_SB,
        out_THD, parts, tops, totals, out_THD if scales_NPHS is None else scales_NPHS,
        scale * LOG2_E, num_sequences, block_tables_SB.stride(0), num_kv_heads,
        block_stride, plane_stride, head_stride, sight.window, sight.sinks,
        slot_stride, num_slots, head_dim, group, group_rows, row_queries,
        width, TILE, split,
        sight.window > 0, scales_NPHS is not None,
        tl.float32 if triton.knobs.runtime.interpret else DOT_DTYPES[q_THD.dtype],
        num_warps=4 if most_rows == DECODE_ROWS else 8,
        num_stages=1 if q_THD.dtype == torch.float32 else 2,
    )  # fmt: skip
    if split:
        _join_splits[(num_tokens, num_query_heads)](
            parts, tops, totals, query_starts_S1, context_lens_S, out_THD, num_query_heads,
            num_splits, head_dim, triton.next_power_of_2(head_dim), split,
        )  # fmt: skip
    return out_THD


TILE = 128  # tokens reduced at a time, of whole blocks
SPLIT = 512  # tokens of one decode row a program reduces: whole tiles
DECODE_ROWS = 16  # (query, head) rows a program takes: the least a tensor core multiplies
PREFILL_ROWS = 64
FULL_WIDTH_BYTES = 256  # of a head, for PREFILL_ROWS; 512 would take 180,224 of Ampere's 166,912
LOG2_E = 1.4426950408889634
DOT_DTYPES = {  # the interpreter multiplies bfloat16 as if it were integers
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def prefill_rows(width_bytes: int) -> int:
    """Of heads so wide a program takes as many as fit its memory beside two tiles of K and V."""
    return max(DECODE_ROWS, PREFILL_ROWS * FULL_WIDTH_BYTES // max(FULL_WIDTH_BYTES, width_bytes))


@triton.jit
def _paged_attention(  # type: ignore[no-untyped-def]
    q, pool, query_starts, context_lens, block_tables, out, parts, tops, totals, scales,
    scale_log2, num_sequences, table_stride, num_kv_heads,
    block_stride, plane_stride, head_stride, window, sinks, slot_stride: tl.constexpr,
    num_slots: tl.constexpr, head_dim: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr, QUANTISED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    # Sequence s owns the programs from query_starts[s] // QUERIES + s on: more than it fills.
    program = tl.program_id(0)
    head = tl.program_id(1)
    lo, hi = program * 0, program * 0 + num_sequences
    while hi - lo > 1:
        middle = (lo + hi) // 2
        if tl.load(query_starts + middle).to(tl.int32) // QUERIES + middle <= program:
            lo = middle
        else:
            hi = middle
    first_query = tl.load(query_starts + lo).to(tl.int32)
    num_queries = tl.load(query_starts + lo + 1).to(tl.int32) - first_query
    skipped = (program - (first_query // QUERIES + lo)) * QUERIES
    context = tl.load(context_lens + lo).to(tl.int32)
    split = tl.program_id(2)
    if (skipped < num_queries) & (split * SPLIT < context):
        rows = tl.arange(0, QUERIES * GROUP_ROWS)
        query = skipped + rows // GROUP_ROWS
        in_group = rows % GROUP_ROWS
        dims = tl.arange(0, WIDTH)
        real = (query < num_queries) & (in_group < GROUP)
        row_heads = (first_query + query).to(tl.int64) * (num_kv_heads * GROUP)
        out_rows = row_heads + head * GROUP + in_group
        at = out_rows[:, None] * head_dim + dims[None, :]
        real_at = real[:, None] & (dims < head_dim)[None, :]
        queries = tl.load(q + at, mask=real_at, other=0.0).to(DOT)
        position = context - num_queries + query
        begin = split * SPLIT
        end = tl.minimum(context, context - num_queries + skipped + QUERIES)
        if SPLIT:
            end = tl.minimum(end, begin + SPLIT)
        blind, seeing = begin * 0, begin
        if WINDOWED:  # the tiles after the sinks' that no row sees are `blind` tokens, not read
            in_sinks = tl.minimum(tl.maximum(sinks - begin, 0), end - begin)
            seeing = begin + tl.cdiv(in_sinks, TILE) * TILE
            oldest = tl.maximum(context - num_queries + skipped - window + 1, 0) // TILE * TILE
            last = begin + tl.cdiv(end - begin, TILE) * TILE
            blind = tl.maximum(tl.minimum(oldest, last) - seeing, 0)

        top = tl.full([QUERIES * GROUP_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES * GROUP_ROWS], tl.float32)
        acc = tl.zeros([QUERIES * GROUP_ROWS, WIDTH], tl.float32)
        for near in range(begin, end - blind, TILE):
            start = tl.where(near < seeing, near, near + blind)
            token = start + tl.arange(0, TILE)
            stored = token < context
            block = tl.load(
                block_tables + lo.to(tl.int64) * table_stride + token // num_slots,
                mask=stored, other=0,
            ).to(tl.int64)  # fmt: skip
            row = block * block_stride + head * head_stride + token % num_slots * slot_stride
            kv_at = row[:, None] + dims[None, :]
            kv_real = stored[:, None] & (dims < head_dim)[None, :]
            v_at = kv_at + plane_stride
            keys = tl.load(pool + kv_at, mask=kv_real, other=0.0)
            if QUANTISED:
                scale_at = (block * 2 * num_kv_heads + head) * num_slots + token % num_slots
                key_scale = tl.load(scales + scale_at, mask=stored, other=0.0)
                keys = widened(keys) * key_scale[:, None]
            keys = keys.to(DOT)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
            seen = token[None, :] <= position[:, None]
            if WINDOWED:
                seen &= (token[None, :] > position[:, None] - window) | (token < sinks)[None, :]
            scores = tl.where(seen & stored[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            level = tl.where(
                new_top == float("-inf"), 0.0, new_top
            )  # of a row that saw nothing yet
            weights = tl.exp2(scores - level[:, None])
            keep = tl.exp2(top - level)
            total = total * keep + tl.sum(weights, 1)
            values = tl.load(pool + v_at, mask=kv_real, other=0.0)
            if QUANTISED:
                v_scale_at = scale_at + num_kv_heads * num_slots
                value_scale = tl.load(scales + v_scale_at, mask=stored, other=0.0)
                values = (widened(values) * value_scale[:, None]).to(q.dtype.element_ty)
            acc = acc * keep[:, None]
            acc += tl.dot(
                weights.to(q.dtype.element_ty).to(DOT), values.to(DOT), input_precision="ieee"
            )
            top = new_top
        if SPLIT:
            part = out_rows * tl.num_programs(2) + split
            tl.store(parts + part[:, None] * head_dim + dims[None, :], acc, mask=real_at)
            tl.store(tops + part, top, mask=real)
            tl.store(totals + part, total, mask=real)
        else:
            result = acc / total[:, None]
            tl.store(out + at, result.to(out.dtype.element_ty), mask=real_at)


@triton.jit
def _join_splits(  # type: ignore[no-untyped-def]
    parts, tops, totals, query_starts, context_lens, out, num_heads, num_splits, head_dim,
    WIDTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # Of decode rows: row and sequence are one. Splits are joined in their order.
    row = tl.program_id(0).to(tl.int64)
    place = row * num_heads + tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    inside = dims < head_dim
    context = tl.load(context_lens + row).to(tl.int32)
    top = tl.load(tops + place * num_splits)
    total = tl.load(totals + place * num_splits)
    acc = tl.load(parts + place * num_splits * head_dim + dims, mask=inside, other=0.0)
    for split in range(1, tl.cdiv(context, SPLIT)):
        part = place * num_splits + split
        part_top = tl.load(tops + part)
        new_top = tl.maximum(top, part_top)
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep, take = tl.exp2(top - level), tl.exp2(part_top - level)
        total = total * keep + tl.load(totals + part) * take
        part_acc = tl.load(parts + part * head_dim + dims, mask=inside, other=0.0)
        acc = acc * keep + part_acc * take
        top = new_top
    tl.store(out + place * head_dim + dims, (acc / total).to(out.dtype.element_ty), mask=inside)
