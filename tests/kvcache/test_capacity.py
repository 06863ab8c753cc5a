import pytest

from kvcache.capacity import (
    GIB,
    RankMemory,
    demand,
    max_requests,
    pool_blocks,
    rank_bytes,
    shared_by,
    stored_as,
    techniques,
    windowed,
)
from kvcache.head_map import HeadMap
from kvcache.spec import CacheSpec, LayerGroup, LayerKind, Plane, ShardAxis

LARGE = CacheSpec.full(num_layers=80, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
SMOL = CacheSpec.full(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float16")


def gib(spec: CacheSpec, batch: int) -> float:
    return round(demand(spec, num_tokens=128_000, batch=batch).batch_bytes / GIB, 1)


def test_the_70b_geometry_at_128_000_tokens_and_32_requests() -> None:
    rows = techniques(LARGE, window=32_000)
    assert {name: gib(spec, 32) for name, spec in rows.items()} == {
        "as it is": 1250.0,
        "FP8": 625.0,
        "layers shared by pairs": 625.0,
        "window of 32,000 tokens": 312.5,
        "FP8 and pairs": 312.5,
    }
    assert gib(rows["as it is"], 32) / gib(rows["FP8 and pairs"], 32) == 4.0


def test_one_sequence_of_the_70b_geometry() -> None:
    assert gib(LARGE, 1) == 39.1
    assert gib(shared_by(stored_as(LARGE, "float8_e4m3fn"), 2), 1) == 9.8
    assert demand(LARGE, 128_000).request_bytes == 41_943_040_000


def test_bytes_per_token() -> None:
    assert demand(LARGE, 1).request_bytes == 327_680
    assert demand(SMOL, 1).request_bytes == 23_040


def test_planning_and_admission_count_blocks_alike() -> None:
    for num_tokens in (1, 16, 17, 128_000):
        assert demand(LARGE, num_tokens).request_blocks == LARGE.blocks_needed(num_tokens)
    assert max_requests(LARGE, num_blocks=100, num_tokens=33) == 33


def test_whole_blocks_hold_what_the_formula_counts() -> None:
    for num_tokens in (16, 32, 8_192):
        blocks = SMOL.blocks_needed(num_tokens)
        assert blocks * SMOL.bytes_per_block(3) == demand(SMOL, num_tokens).request_bytes


def test_a_window_stores_all_of_a_short_context_and_its_sinks_of_a_long_one() -> None:
    spec = windowed(SMOL, window=100, sinks=4)
    assert demand(spec, 50).request_bytes == 50 * 23_040
    assert demand(spec, 1_000).request_bytes == 104 * 23_040


def test_layers_that_do_not_divide_share_what_they_can() -> None:
    assert demand(shared_by(SMOL, 4), 1).request_bytes == 8 * 768
    with pytest.raises(ValueError, match="shared by 1 are not shared"):
        shared_by(SMOL, 1)


def test_ranks_take_their_share_of_each_plane() -> None:
    planes = (
        Plane("latent", 512, ShardAxis.REPLICATED),
        Plane("channels", 100, ShardAxis.CHANNEL),
    )
    latent = CacheSpec(1, 16, "bfloat16", (LayerGroup(LayerKind.LATENT, (0, 1), planes),))
    assert rank_bytes(latent, num_tokens=10, kv_heads=1, tp=1) == 10 * 2 * (512 + 100) * 2
    assert rank_bytes(latent, num_tokens=10, kv_heads=1, tp=8) == 10 * 2 * (512 + 13) * 2
    halves = HeadMap.even(9, 3, 2)
    assert [rank_bytes(SMOL, 1, len(kv), 2) for kv in halves.kv] == [15_360, 7_680]
    replicas = HeadMap.even(9, 3, 9)
    assert {rank_bytes(SMOL, 1, len(kv), 9) for kv in replicas.kv} == {7_680}


def test_a_recurrent_state_is_counted_once_a_request() -> None:
    state = (Plane("ssm", 1_000, ShardAxis.CHANNEL, dtype="float32"),)
    spec = CacheSpec(1, 16, "bfloat16", (LayerGroup(LayerKind.STATE, (0, 1, 2), state),))
    assert demand(spec, 5).request_bytes == demand(spec, 50_000).request_bytes == 12_000
    assert demand(spec, 50_000).request_blocks == 0


def test_a_pool_is_what_weights_and_activations_leave() -> None:
    memory = RankMemory(80 * GIB, utilisation=0.9, weight_bytes=140 * 10**9, activation_bytes=GIB)
    left = int(80 * GIB * 0.9) - 35 * 10**9 - GIB
    assert pool_blocks(LARGE, memory, HeadMap.even(64, 8, 4)) == left // (16 * 81_920) == 31_460
    assert pool_blocks(LARGE, memory, HeadMap.even(64, 8, 16)) == 102_974


def test_the_rank_with_most_heads_decides_the_pool() -> None:
    memory = RankMemory(1_000_000_000, utilisation=1.0)
    assert pool_blocks(SMOL, memory, HeadMap.even(9, 3, 2)) == 1_000_000_000 // (16 * 15_360)


def test_weights_that_leave_nothing_are_refused_with_the_numbers() -> None:
    memory = RankMemory(80 * GIB, weight_bytes=140 * 10**9)
    with pytest.raises(ValueError, match=r"72\.0 usable GiB leave no block .* beside 130\.4 GiB"):
        pool_blocks(LARGE, memory, HeadMap.even(64, 8, 1))


def test_only_a_full_cache_can_be_changed() -> None:
    with pytest.raises(ValueError, match="not window"):
        shared_by(windowed(SMOL, 100), 2)
