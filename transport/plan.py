"""Which prefill rank sends which KV heads to which decode rank.

A pure function of the two head maps, computed alike on both sides. Every decode rank gets each of
its heads exactly once. Where prefill ranks hold replicas of a head, the decode ranks that need it
take them in turn. Prefill rank 0 and decode rank 0 are always a pair, if need be without heads,
because the first tokens travel between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.head_map import HeadInterval
from kvcache.spec import CacheSpec, LayerKind, ShardAxis


@dataclass(frozen=True, slots=True)
class PairPlan:
    prefill_rank: int
    decode_rank: int
    heads: tuple[int, ...]  # global, ascending


def sources_of(
    decode_rank: int, kv_heads: HeadInterval, source_kv: Sequence[HeadInterval]
) -> dict[int, tuple[int, ...]]:
    """The prefill ranks that send to one decode rank, and the heads each sends.

    Raises ValueError for a head that no prefill rank holds.
    """
    heads_of: dict[int, list[int]] = {0: []} if decode_rank == 0 else {}
    for head in range(kv_heads.start, kv_heads.stop):
        owners = [rank for rank, held in enumerate(source_kv) if head in held]
        if not owners:
            raise ValueError(f"decode rank {decode_rank} needs KV head {head}: no prefill rank has")
        heads_of.setdefault(owners[decode_rank % len(owners)], []).append(head)
    return {rank: tuple(heads) for rank, heads in sorted(heads_of.items())}


def pair_plans(
    source_kv: Sequence[HeadInterval], target_kv: Sequence[HeadInterval]
) -> tuple[PairPlan, ...]:
    """All pairs of a transfer, in the order of (prefill rank, decode rank)."""
    plans = (
        PairPlan(prefill_rank, decode_rank, heads)
        for decode_rank, kv_heads in enumerate(target_kv)
        for prefill_rank, heads in sources_of(decode_rank, kv_heads, source_kv).items()
    )
    return tuple(sorted(plans, key=lambda plan: (plan.prefill_rank, plan.decode_rank)))


@dataclass(frozen=True, slots=True)
class LayerCells:
    """How the cells of one layer are cut: for each block, each head, each plane."""

    planes: tuple[str, ...]
    cell_bytes: int

    def block_bytes(self, num_heads: int) -> int:
        return num_heads * len(self.planes) * self.cell_bytes


def layer_cells(spec: CacheSpec) -> tuple[LayerCells, ...]:
    """One entry a layer; raises ValueError for a kind of cache that cannot travel yet."""
    cells: dict[int, LayerCells] = {}
    for group in spec.groups:
        sizes = {spec.cell_bytes(plane) for plane in group.planes}
        by_head = all(plane.axis is ShardAxis.KV_HEAD for plane in group.planes)
        if group.kind is not LayerKind.FULL or not by_head or len(sizes) != 1:
            raise ValueError(f"layers {list(group.layers)} cache as {group.kind.value!r}: no wire")
        names = tuple(plane.name for plane in group.planes)
        cells |= dict.fromkeys(group.layers, LayerCells(names, sizes.pop()))
    return tuple(cells[layer] for layer in sorted(cells))
