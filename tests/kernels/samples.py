"""Paged caches with known contents, made as untidily as a long-lived pool is."""

from dataclasses import dataclass

import torch
from torch import Tensor

MEMORY_ORDERS = ("NPHSD", "NPSHD", "PNSHD")  # in which a pool's memory may run


def in_memory_order(pool_NPHSD: Tensor, order: str) -> Tensor:
    """The same values, seen as NPHSD still."""
    memory = pool_NPHSD.permute(["NPHSD".index(dim) for dim in order]).contiguous()
    return memory.permute([order.index(dim) for dim in "NPHSD"])


@dataclass(frozen=True)
class Paged:
    """The arguments of one `paged_attention` call, and the same keys and values unpaged."""

    q_THD: Tensor
    pool_NPHSD: Tensor
    query_starts_S1: Tensor
    context_lens_S: Tensor
    block_tables_SB: Tensor
    scale: float
    kv_SPHCD: list[Tensor]  # of each sequence: planes, KV heads, context, head dim

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return (
            self.q_THD, self.pool_NPHSD, self.query_starts_S1, self.context_lens_S,
            self.block_tables_SB, self.scale,
        )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    group: int
    head_dim: int
    sequences: tuple[tuple[int, int], ...]  # (context, queries), the queries being its last tokens


def paged(
    shape: Shape,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    fragmented: bool = True,
    filler: float = float("nan"),
) -> Paged:
    """The same tokens whatever the block size and the order of blocks; all other slots `filler`."""
    rng = torch.Generator().manual_seed(7)
    heads, dim = shape.num_kv_heads, shape.head_dim
    kv = [torch.randn(2, heads, c, dim, generator=rng).to(dtype) for c, _ in shape.sequences]
    num_tokens = sum(queries for _, queries in shape.sequences)
    q = torch.randn(num_tokens, heads * shape.group, dim, generator=rng).to(dtype)

    lengths = [-(-context // block_size) for context, _ in shape.sequences]
    num_blocks = 1 + sum(lengths) + 3
    order = torch.randperm(num_blocks - 1, generator=rng) + 1  # block 0 pads tables: all filler
    block_ids = order if fragmented else torch.arange(1, num_blocks)
    pool = torch.full((num_blocks, 2, heads, block_size, dim), filler, dtype=dtype)
    tables = torch.zeros(len(lengths), max(lengths) + 2, dtype=torch.int64)
    taken = 0
    for s, (length, values) in enumerate(zip(lengths, kv, strict=True)):
        tables[s, :length] = block_ids[taken : taken + length]
        for i in range(length):
            part = values[:, :, i * block_size : (i + 1) * block_size]
            pool[int(tables[s, i]), :, :, : part.shape[2]] = part
        taken += length
    starts = torch.tensor([0, *(queries for _, queries in shape.sequences)]).cumsum(0)
    contexts = torch.tensor([context for context, _ in shape.sequences])
    q, pool, starts, contexts, tables = (
        tensor.to(device) for tensor in (q, pool, starts, contexts, tables)
    )
    return Paged(q, pool, starts, contexts, tables, dim**-0.5, kv)


SHAPES = {
    "one token": Shape(1, 1, 16, ((1, 1),)),
    "smollm2 decode": Shape(3, 3, 64, ((40, 1), (128, 1), (129, 1), (260, 1))),
    "smollm2 prefill": Shape(1, 3, 64, ((140, 30), (17, 17))),
    "chunks": Shape(2, 4, 32, ((140, 13), (129, 1), (40, 40))),
    "mqa": Shape(1, 9, 20, ((33, 1), (77, 20))),
    "odd": Shape(3, 5, 24, ((131, 7), (1, 1), (20, 20))),
}
