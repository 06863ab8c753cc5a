import pytest

from kvcache.head_map import HeadInterval, HeadMap

GEOMETRIES = [
    (kv_heads * group, kv_heads, tp)
    for kv_heads in (1, 2, 3, 8)
    for group in (1, 2, 3, 4, 5, 8)
    for tp in range(1, 10)
    if tp <= kv_heads * group
]


def intervals(*bounds: tuple[int, int]) -> tuple[HeadInterval, ...]:
    return tuple(HeadInterval(start, stop) for start, stop in bounds)


def test_three_kv_heads_over_two_ranks_give_the_first_rank_two() -> None:
    heads = HeadMap.even(num_query_heads=9, num_kv_heads=3, tp=2)
    assert heads.kv == intervals((0, 2), (2, 3))
    assert heads.query == intervals((0, 6), (6, 9))
    assert heads.tp == 2


def test_more_ranks_than_kv_heads_replicate_the_first_heads_first() -> None:
    heads = HeadMap.even(num_query_heads=9, num_kv_heads=3, tp=4)
    assert heads.kv == intervals((0, 1), (0, 1), (1, 2), (2, 3))
    assert heads.query == intervals((0, 2), (2, 3), (3, 6), (6, 9))


def test_one_rank_per_query_head() -> None:
    heads = HeadMap.even(num_query_heads=9, num_kv_heads=3, tp=9)
    assert [i.start for i in heads.kv] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert heads.query == intervals(*((h, h + 1) for h in range(9)))


def test_multi_query_attention_replicates_its_one_head() -> None:
    heads = HeadMap.even(num_query_heads=8, num_kv_heads=1, tp=3)
    assert heads.kv == intervals((0, 1), (0, 1), (0, 1))
    assert heads.query == intervals((0, 3), (3, 6), (6, 8))


@pytest.mark.parametrize(("query_heads", "kv_heads", "tp"), GEOMETRIES)
def test_every_split_covers_every_head_evenly(query_heads: int, kv_heads: int, tp: int) -> None:
    heads = HeadMap.even(query_heads, kv_heads, tp)
    heads.check()
    assert heads.tp == tp == len(heads.query)

    # Query heads: each on exactly one rank, in order.
    assert [head for rank in heads.query for head in rank] == list(range(query_heads))
    # KV heads: each somewhere; on one rank only while there are enough of them.
    holders = {h: [r for r in range(tp) if h in heads.kv[r]] for h in range(kv_heads)}
    assert all(holders.values())
    if tp <= kv_heads:
        assert all(len(ranks) == 1 for ranks in holders.values())
        sizes = [len(rank) for rank in heads.kv]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
    else:
        assert all(len(rank) == 1 for rank in heads.kv)
        copies = [len(holders[h]) for h in range(kv_heads)]
        assert max(copies) - min(copies) <= 1
        assert copies == sorted(copies, reverse=True)
    # A query head finds its KV head on its own rank, at h * H_kv // H_q of the local numbers.
    for query, kv in zip(heads.query, heads.kv, strict=True):
        for local, head in enumerate(query):
            of_group = head // (query_heads // kv_heads)
            assert kv.start + local * len(kv) // len(query) == of_group
    # The owner is the lowest holder.
    assert [heads.owner(h) for h in range(kv_heads)] == [holders[h][0] for h in range(kv_heads)]


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "tp", "words"),
    [
        (9, 3, 0, "tensor parallel size 0 is outside 1..9"),
        (9, 3, 10, "tensor parallel size 10 is outside 1..9"),
        (9, 3, -1, "tensor parallel size -1"),
        (9, 2, 1, "9 query heads are not a multiple of 2 KV heads"),
        (8, 0, 1, "8 query heads are not a multiple of 0 KV heads"),
        (0, 1, 1, "0 query heads"),
    ],
)
def test_an_impossible_split_is_refused_with_its_numbers(
    query_heads: int, kv_heads: int, tp: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        HeadMap.even(query_heads, kv_heads, tp)


def test_an_unknown_head_has_no_owner() -> None:
    with pytest.raises(ValueError, match=r"KV head 3 is outside 0\.\.2"):
        HeadMap.even(9, 3, 2).owner(3)


def test_a_hand_made_map_that_loses_a_head_does_not_check() -> None:
    lost = HeadMap(4, 2, intervals((0, 2), (2, 4)), intervals((0, 1), (0, 1)))
    with pytest.raises(AssertionError):
        lost.check()


def test_an_interval_is_a_run_of_heads() -> None:
    interval = HeadInterval(2, 5)
    assert len(interval) == 3
    assert list(interval) == [2, 3, 4]
    assert 4 in interval and 5 not in interval and 1 not in interval
