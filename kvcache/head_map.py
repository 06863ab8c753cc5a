"""Which attention heads each tensor-parallel rank holds.

Up to one rank per KV head, a rank holds a run of KV heads with their whole query groups. Beyond
that KV heads are replicated: a rank holds exactly one, and a run of that head's query group.
Both splits are as even as whole heads allow, larger shares first, so every pair of tensor-parallel
sizes can exchange cells head by head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class HeadInterval:
    """The heads `start`, ..., `stop - 1`, numbered over the whole model."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, head: object) -> bool:
        return isinstance(head, int) and self.start <= head < self.stop


@dataclass(frozen=True, slots=True)
class HeadMap:
    num_query_heads: int
    num_kv_heads: int
    query: tuple[HeadInterval, ...]  # of each rank
    kv: tuple[HeadInterval, ...]  # of each rank

    @classmethod
    def even(cls, num_query_heads: int, num_kv_heads: int, tp: int) -> "HeadMap":
        """Deal the heads to `tp` ranks as evenly as whole heads allow.

        Raises ValueError for a geometry no model has, or for more ranks than query heads.
        """
        if num_kv_heads < 1 or num_query_heads < 1 or num_query_heads % num_kv_heads:
            raise ValueError(
                f"{num_query_heads} query heads are not a multiple of {num_kv_heads} KV heads"
            )
        if not 1 <= tp <= num_query_heads:
            raise ValueError(
                f"tensor parallel size {tp} is outside 1..{num_query_heads}, "
                f"the number of query heads"
            )
        group = num_query_heads // num_kv_heads
        if tp <= num_kv_heads:
            kv = _split(0, num_kv_heads, tp)
            query = tuple(HeadInterval(i.start * group, i.stop * group) for i in kv)
        else:
            owners = _split(0, tp, num_kv_heads)  # the ranks that share each KV head
            kv = tuple(HeadInterval(h, h + 1) for h, ranks in enumerate(owners) for _ in ranks)
            query = tuple(
                interval
                for head, ranks in enumerate(owners)
                for interval in _split(head * group, (head + 1) * group, len(ranks))
            )
        return cls(num_query_heads, num_kv_heads, query, kv)

    @property
    def tp(self) -> int:
        return len(self.kv)

    def owner(self, kv_head: int) -> int:
        """The lowest rank that holds `kv_head`."""
        for rank, interval in enumerate(self.kv):
            if kv_head in interval:
                return rank
        raise ValueError(f"KV head {kv_head} is outside 0..{self.num_kv_heads - 1}")

    def check(self) -> None:
        """Raise if a head is missing, a query head is held twice, or a rank lacks a KV head."""
        assert len(self.query) == len(self.kv), f"{len(self.query)} and {len(self.kv)} ranks"
        assert all(self.query) and all(self.kv), "a rank holds no heads"
        assert [h for i in self.query for h in i] == list(range(self.num_query_heads))
        assert {h for i in self.kv for h in i} == set(range(self.num_kv_heads))
        assert all(a.start <= b.start for a, b in pairwise(self.kv)), "ranks out of order"
        group = self.num_query_heads // self.num_kv_heads
        for query, kv in zip(self.query, self.kv, strict=True):
            assert {head // group for head in query} == set(kv), f"{query} does not read {kv}"


def _split(start: int, stop: int, parts: int) -> tuple[HeadInterval, ...]:
    """Cut `start`..`stop` into `parts` runs, the larger ones first."""
    share, larger = divmod(stop - start, parts)
    bounds = [start + part * share + min(part, larger) for part in range(parts + 1)]
    return tuple(HeadInterval(a, b) for a, b in pairwise(bounds))
