"""What part of each tensor one tensor-parallel rank holds."""

from dataclasses import dataclass

from kvcache.head_map import HeadMap
from model.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Half-open ranges: heads as the head map deals them, the rest split near evenly."""

    query_rows: range  # of q's output, and of o's input
    kv_rows: range  # of k's and v's output
    middle: range  # of the MLP's intermediate size
    vocabulary: range

    @classmethod
    def of(cls, config: DecoderConfig, head_map: HeadMap, rank: int) -> "Shard":
        assert head_map.num_query_heads == config.num_query_heads
        assert head_map.num_kv_heads == config.num_kv_heads
        query, kv, width = head_map.query[rank], head_map.kv[rank], config.head_dim
        return cls(
            range(query.start * width, query.stop * width),
            range(kv.start * width, kv.stop * width),
            split(config.intermediate_size, head_map.tp)[rank],
            split(config.vocab_size, head_map.tp)[rank],
        )


def split(total: int, parts: int) -> list[range]:
    """Cut 0..`total` into `parts` runs that differ by at most one, the larger first."""
    share, larger = divmod(total, parts)
    starts = [part * share + min(part, larger) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]
