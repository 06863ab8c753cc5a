"""Causal attention that reads keys and values straight from the blocks of a paged pool.

q_THD             queries of a step's T tokens, sequence after sequence; H query heads, D head dim
pool_NPHSD        N blocks, planes K and V, H local KV heads, S slots a block; of any strides as
                  long as a row of D is contiguous
query_starts_S1   sequence s has the queries query_starts[s] : query_starts[s + 1]
context_lens_S    its tokens so far, these queries included: the last query sees them all
block_tables_SB   its blocks in order; what lies past its context is padding and never matters
out_THD           one row per query

Query head h reads KV head h * H_kv // H_q. Sums over tokens run in an order that the block size has
no part in (the kernel's in tiles of TILE, which every block size divides), and a sequence is
reduced by itself. So neither the block size, nor the pool's strides, nor where blocks lie in it,
nor (on a CPU) the neighbours in the batch change one bit of a result. Slots past a context may
hold anything, NaN included.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.launch import launches, tl, triton


def paged_attention_reference(
    q_THD: Tensor,
    pool_NPHSD: Tensor,
    query_starts_S1: Tensor,
    context_lens_S: Tensor,
    block_tables_SB: Tensor,
    scale: float,
) -> Tensor:
    """What `paged_attention` means, in fp32; quick enough to serve from a CPU.

    One sequence at a time: quicker than padding decode rows into one batch, at 16 rows over 2,000
    tokens by half, and each copies only its own blocks, into one scratch that the next reuses.
    """
    _, num_planes, num_heads, num_slots, head_dim = pool_NPHSD.shape
    in_rows = pool_NPHSD.is_contiguous()
    cells = pool_NPHSD.view(-1, num_slots * head_dim) if in_rows else pool_NPHSD
    heads_per_block = num_planes * num_heads
    head_P1 = torch.arange(heads_per_block, device=pool_NPHSD.device)[:, None]
    first_cells_SB = block_tables_SB.long() * heads_per_block
    out_THD = torch.empty_like(q_THD)
    starts: list[int] = query_starts_S1.tolist()
    contexts: list[int] = context_lens_S.tolist()
    most_blocks = -(-max(contexts, default=0) // num_slots)
    scratch = cells.new_empty(most_blocks * heads_per_block, num_slots * head_dim)
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        num_blocks = -(-context // num_slots)
        cell_ids = first_cells_SB[s, :num_blocks] + head_P1
        kv = scratch[: cell_ids.numel()]
        if in_rows:
            torch.index_select(cells, 0, cell_ids.view(-1), out=kv)
        else:
            kv_BPHSD = pool_NPHSD[block_tables_SB[s, :num_blocks].long()]
            kv_PHBSD = kv_BPHSD.permute(1, 2, 0, 3, 4)
            kv.view(kv_PHBSD.shape).copy_(kv_PHBSD)
        kv_PHCD = kv.view(num_planes, num_heads, -1, head_dim)[:, :, :context].float()
        out_THD[rows] = _attend(q_THD[rows].float(), kv_PHCD, scale)
    return out_THD


def _attend(q_QHD: Tensor, kv_PHCD: Tensor, scale: float) -> Tensor:
    """The Q last tokens of one context of C tokens, each seeing itself and what came before."""
    num_queries, _, head_dim = q_QHD.shape
    num_heads, context = kv_PHCD.shape[1:3]
    q_HGQD = q_QHD.view(num_queries, num_heads, -1, head_dim).permute(1, 2, 0, 3)
    if num_queries == 1:  # the heads of a group are then alike: queries that see everything
        q_1HGD = q_HGQD[None, :, :, 0]
        k_1HCD, v_1HCD = kv_PHCD[:, None]
        out_1HGD = scaled_dot_product_attention(q_1HGD, k_1HCD, v_1HCD, scale=scale)
        return out_1HGD.reshape(q_QHD.shape)
    k_HGCD, v_HGCD = kv_PHCD[:, :, None].expand(-1, -1, q_HGQD.shape[1], -1, -1)
    hidden = torch.full((num_queries, context), -torch.inf, device=q_QHD.device)
    mask_QC = hidden.triu_(context - num_queries + 1)
    out_HGQD = scaled_dot_product_attention(q_HGQD, k_HGCD, v_HGCD, mask_QC, scale=scale)
    return out_HGQD.permute(2, 0, 1, 3).reshape(q_QHD.shape)


def paged_attention(
    q_THD: Tensor,
    pool_NPHSD: Tensor,
    query_starts_S1: Tensor,
    context_lens_S: Tensor,
    block_tables_SB: Tensor,
    scale: float,
) -> Tensor:
    """As the reference up to rounding, in one launch and without waiting for the device."""
    if not launches(pool_NPHSD):
        return paged_attention_reference(
            q_THD, pool_NPHSD, query_starts_S1, context_lens_S, block_tables_SB, scale
        )
    _, num_planes, num_kv_heads, num_slots, head_dim = pool_NPHSD.shape
    num_tokens, num_query_heads, _ = q_THD.shape
    num_sequences = len(context_lens_S)
    block_stride, plane_stride, head_stride, slot_stride, dim_stride = pool_NPHSD.stride()
    assert dim_stride == 1 and q_THD.is_contiguous() and num_planes == 2
    assert q_THD.dtype == pool_NPHSD.dtype, f"{q_THD.dtype} queries, {pool_NPHSD.dtype} cache"
    assert block_tables_SB.stride(1) == 1 and TILE % num_slots == 0, f"block size {num_slots}"
    out_THD = torch.empty_like(q_THD)
    if not num_tokens:
        return out_THD
    group = num_query_heads // num_kv_heads
    group_rows = triton.next_power_of_2(group)
    most_rows = DECODE_ROWS if num_tokens == num_sequences else PREFILL_ROWS
    row_queries = max(1, most_rows // group_rows)
    grid = (num_tokens // row_queries + num_sequences, num_kv_heads)
    _paged_attention[grid](
        q_THD, pool_NPHSD, query_starts_S1, context_lens_S, block_tables_SB, out_THD,
        scale * LOG2_E, num_sequences, block_tables_SB.stride(0), num_kv_heads,
        block_stride, plane_stride, head_stride,
        slot_stride, num_slots, head_dim, group, group_rows, row_queries,
        max(16, triton.next_power_of_2(head_dim)), TILE,
        tl.float32 if triton.knobs.runtime.interpret else DOT_DTYPES[pool_NPHSD.dtype],
        num_warps=4 if most_rows == DECODE_ROWS else 8,
        num_stages=1 if pool_NPHSD.dtype == torch.float32 else 2,
    )  # fmt: skip
    return out_THD


TILE = 128  # tokens reduced at a time, of whole blocks
DECODE_ROWS = 16  # (query, head) rows a program takes: the least a tensor core multiplies
PREFILL_ROWS = 64
LOG2_E = 1.4426950408889634
DOT_DTYPES = {  # the interpreter multiplies bfloat16 as if it were integers
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def _paged_attention(  # type: ignore[no-untyped-def]
    q, pool, query_starts, context_lens, block_tables, out,
    scale_log2, num_sequences, table_stride, num_kv_heads,
    block_stride, plane_stride, head_stride, slot_stride: tl.constexpr,
    num_slots: tl.constexpr, head_dim: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
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
    if skipped < num_queries:
        context = tl.load(context_lens + lo).to(tl.int32)
        rows = tl.arange(0, QUERIES * GROUP_ROWS)
        query = skipped + rows // GROUP_ROWS
        in_group = rows % GROUP_ROWS
        dims = tl.arange(0, WIDTH)
        real = (query < num_queries) & (in_group < GROUP)
        row_heads = (first_query + query).to(tl.int64) * (num_kv_heads * GROUP)
        at = (row_heads + head * GROUP + in_group)[:, None] * head_dim + dims[None, :]
        real_at = real[:, None] & (dims < head_dim)[None, :]
        queries = tl.load(q + at, mask=real_at, other=0.0).to(DOT)
        position = context - num_queries + query
        last = tl.minimum(context, context - num_queries + skipped + QUERIES)

        top = tl.full([QUERIES * GROUP_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES * GROUP_ROWS], tl.float32)
        acc = tl.zeros([QUERIES * GROUP_ROWS, WIDTH], tl.float32)
        for start in range(0, last, TILE):
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
            keys = tl.load(pool + kv_at, mask=kv_real, other=0.0).to(DOT)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
            seen = token[None, :] <= position[:, None]
            scores = tl.where(seen & stored[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            keep = tl.exp2(top - new_top)
            total = total * keep + tl.sum(weights, 1)
            values = tl.load(pool + v_at, mask=kv_real, other=0.0)
            acc = acc * keep[:, None]
            acc += tl.dot(
                weights.to(pool.dtype.element_ty).to(DOT), values.to(DOT), input_precision="ieee"
            )
            top = new_top
        result = acc / total[:, None]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=real_at)
