import pytest

from kvcache.head_map import HeadInterval, HeadMap
from kvcache.spec import CacheSpec, LayerGroup, LayerKind, Plane
from transport.plan import PairPlan, layer_cells, pair_plans, sources_of

SIZES = range(1, 10)


@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), [(9, 1), (10, 2), (9, 3), (16, 8)])
def test_every_decode_rank_gets_each_of_its_heads_exactly_once(
    num_query_heads: int, num_kv_heads: int
) -> None:
    maps = {tp: HeadMap.even(num_query_heads, num_kv_heads, tp).kv for tp in SIZES}
    for source in maps.values():
        for target in maps.values():
            plans = pair_plans(source, target)
            got: dict[int, list[int]] = {rank: [] for rank in range(len(target))}
            for plan in plans:
                assert all(head in source[plan.prefill_rank] for head in plan.heads)
                assert list(plan.heads) == sorted(plan.heads)
                got[plan.decode_rank] += plan.heads
            assert [sorted(heads) for heads in got.values()] == [list(i) for i in target]
            assert len({(p.prefill_rank, p.decode_rank) for p in plans}) == len(plans)
            assert (plans[0].prefill_rank, plans[0].decode_rank) == (0, 0)


def test_a_decode_rank_alone_finds_the_same_sources_as_the_whole_plan() -> None:
    source, target = HeadMap.even(9, 3, 7).kv, HeadMap.even(9, 3, 4).kv
    plans = pair_plans(source, target)
    for rank, interval in enumerate(target):
        mine = {p.prefill_rank: p.heads for p in plans if p.decode_rank == rank}
        assert sources_of(rank, interval, source) == mine


def test_the_plans_of_three_heads_are_these() -> None:
    one, two, three = (HeadMap.even(9, 3, tp).kv for tp in (1, 2, 3))
    assert pair_plans(one, two) == (PairPlan(0, 0, (0, 1)), PairPlan(0, 1, (2,)))
    assert pair_plans(two, one) == (PairPlan(0, 0, (0, 1)), PairPlan(1, 0, (2,)))
    assert pair_plans(two, three) == (
        PairPlan(0, 0, (0,)),
        PairPlan(0, 1, (1,)),
        PairPlan(1, 2, (2,)),
    )


def test_ranks_that_hold_the_same_head_share_the_work_of_sending_it() -> None:
    replicated = HeadMap.even(9, 1, 3).kv
    senders = [plan.prefill_rank for plan in pair_plans(replicated, replicated)]
    assert senders == [0, 1, 2]


def test_the_first_ranks_are_a_pair_even_when_they_share_no_head() -> None:
    crossed = (HeadInterval(1, 2), HeadInterval(0, 1))
    straight = (HeadInterval(0, 1), HeadInterval(1, 2))
    assert pair_plans(crossed, straight) == (
        PairPlan(0, 0, ()),
        PairPlan(0, 1, (1,)),
        PairPlan(1, 0, (0,)),
    )


def test_a_head_that_nobody_holds_is_named() -> None:
    with pytest.raises(ValueError, match="decode rank 1 needs KV head 2: no prefill rank has"):
        sources_of(1, HeadInterval(2, 3), [HeadInterval(0, 2)])


def test_bytes_of_a_block_follow_from_heads_planes_and_width() -> None:
    spec = CacheSpec.full(num_layers=2, num_kv_heads=3, head_dim=64, block_size=16, dtype="float16")
    first, second = layer_cells(spec)
    assert first == second
    assert first.planes == ("k", "v")
    assert first.cell_bytes == 2048
    assert first.block_bytes(3) == 12288


def test_a_cache_that_no_wire_carries_yet_is_refused_by_name() -> None:
    group = LayerGroup(LayerKind.WINDOW, (0,), (Plane("k", 4),), window=32)
    with pytest.raises(ValueError, match=r"layers \[0\] cache as 'window'"):
        layer_cells(CacheSpec(1, 16, "float16", (group,)))
