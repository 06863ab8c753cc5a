from dataclasses import replace

import pytest

from kvcache.spec import CacheSpec, LayerGroup, LayerKind, Permits, Plane, ShardAxis

SMOL = CacheSpec.full(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float16")
K_AND_V = (Plane("k", 64), Plane("v", 64))


def group(kind: LayerKind, layers: tuple[int, ...], **fields: object) -> LayerGroup:
    planes = () if kind is LayerKind.SHARED else K_AND_V
    return replace(LayerGroup(kind, layers, planes), **fields)  # type: ignore[arg-type]


def with_groups(*groups: LayerGroup) -> CacheSpec:
    return CacheSpec(3, 16, "float16", groups)


def test_sizes_of_a_full_cache() -> None:
    assert SMOL.num_layers == 30
    assert SMOL.cell_bytes(K_AND_V[0]) == 16 * 64 * 2
    assert SMOL.bytes_per_block(3) == 16 * 23_040
    assert SMOL.bytes_per_block(1) == 16 * 7_680


@pytest.mark.parametrize(
    ("num_tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (8192, 512)]
)
def test_a_full_cache_needs_a_block_per_started_sixteen_tokens(
    num_tokens: int, blocks: int
) -> None:
    assert SMOL.blocks_needed(num_tokens) == blocks
    assert SMOL.blocks_needed(num_tokens, max_chunk_tokens=16) == blocks


def test_a_window_needs_its_tokens_the_chunk_in_flight_and_one_block_for_a_crooked_start() -> None:
    spec = with_groups(group(LayerKind.WINDOW, (0, 1), window=64, sinks=4))
    assert spec.blocks_needed(40) == 3
    assert spec.blocks_needed(10_000, max_chunk_tokens=1) == 1 + 4 + 1
    assert spec.blocks_needed(10_000, max_chunk_tokens=32) == 1 + 6 + 1
    assert spec.blocks_needed(10_000) == 625  # in one chunk nothing can be let go in between


def test_the_neediest_group_decides_how_many_blocks_a_request_needs() -> None:
    window = group(LayerKind.WINDOW, (0,), window=32)
    mixed = with_groups(window, group(LayerKind.FULL, (1,)))
    assert mixed.blocks_needed(1_600, max_chunk_tokens=1) == 100


def test_shared_and_state_layers_take_no_blocks() -> None:
    state = replace(group(LayerKind.STATE, (1,)), planes=(Plane("ssm", 4096, ShardAxis.CHANNEL),))
    shared = group(LayerKind.SHARED, (2,), sources=(0,))
    spec = with_groups(group(LayerKind.FULL, (0,)), state, shared)
    spec.validate()
    assert spec.blocks_needed(100) == 7
    assert spec.bytes_per_block(3) == 16 * 3 * 2 * 64 * 2


def test_planes_are_cut_over_ranks_by_their_axis() -> None:
    planes = (
        Plane("k", 64),
        Plane("latent", 10, ShardAxis.CHANNEL),
        Plane("count", 1, ShardAxis.REPLICATED, dtype="float32"),
    )
    spec = with_groups(LayerGroup(LayerKind.FULL, (0,), planes))
    assert spec.bytes_per_block(kv_heads=3, tp=1) == 16 * (3 * 64 * 2 + 10 * 2 + 4)
    assert spec.bytes_per_block(kv_heads=1, tp=3) == 16 * (64 * 2 + 4 * 2 + 4)


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    assert SMOL.fingerprint().hex() == "9378f3cb6b69ddbf64c328104ce1a5b2"


@pytest.mark.parametrize(
    "other",
    [
        replace(SMOL, dtype="bfloat16"),
        replace(SMOL, num_kv_heads=1),
        CacheSpec.full(29, 3, 64, 16, "float16"),
        CacheSpec.full(30, 3, 32, 16, "float16"),
        replace(SMOL, groups=(replace(SMOL.groups[0], permits=Permits.NOTHING),)),
        replace(SMOL, groups=(replace(SMOL.groups[0], planes=(Plane("v", 64), Plane("k", 64))),)),
        replace(SMOL, groups=(replace(SMOL.groups[0], kind=LayerKind.WINDOW, window=9),)),
    ],
)
def test_a_fingerprint_tells_every_difference(other: CacheSpec) -> None:
    assert other.fingerprint() != SMOL.fingerprint()
    assert len(other.fingerprint()) == 16


def test_the_size_of_blocks_is_no_part_of_what_a_token_stores() -> None:
    assert replace(SMOL, block_size=32).fingerprint() == SMOL.fingerprint()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(SMOL, block_size=24), "block size 24 is not a power of two up to 128"),
        (replace(SMOL, block_size=0), "block size 0"),
        (replace(SMOL, block_size=256), "block size 256"),
        (replace(SMOL, dtype="float64"), "cache dtype 'float64' is not one of float32, float16"),
        (replace(SMOL, num_kv_heads=0), "0 KV heads"),
        (with_groups(), "each layer"),
        (with_groups(group(LayerKind.FULL, (0, 2))), "each layer"),
        (with_groups(group(LayerKind.FULL, (0, 0))), "each layer"),
        (with_groups(group(LayerKind.WINDOW, (0,))), "a window of 0 tokens"),
        (with_groups(group(LayerKind.FULL, (0,), window=8)), "a window of 8 tokens"),
        (with_groups(group(LayerKind.FULL, (0,), sinks=4)), "keeps 4 sink tokens"),
        (with_groups(group(LayerKind.FULL, (0,), planes=())), "must have planes"),
        (with_groups(group(LayerKind.FULL, (0,), planes=(Plane("k", 0),))), "a width of at least"),
        (with_groups(group(LayerKind.FULL, (0,), planes=(Plane("k", 1),) * 2)), "different names"),
        (with_groups(group(LayerKind.LATENT, (0,))), "no KV heads to cut a plane by"),
        (with_groups(group(LayerKind.FULL, (0,), sources=(0,))), "reads no other's"),
        (
            with_groups(group(LayerKind.FULL, (0,)), group(LayerKind.SHARED, (1,))),
            "names 0 sources",
        ),
        (
            with_groups(group(LayerKind.FULL, (1,)), group(LayerKind.SHARED, (0,), sources=(1,))),
            "layer 0 cannot read the cache of layer 1",
        ),
        (
            with_groups(
                group(LayerKind.FULL, (0,)), group(LayerKind.SHARED, (1, 2), sources=(0, 1))
            ),
            "layer 2 cannot read the cache of layer 1",
        ),
        (
            with_groups(
                group(LayerKind.FULL, (0,)),
                group(LayerKind.SHARED, (1,), sources=(0,), planes=K_AND_V),
            ),
            "must not have planes",
        ),
    ],
)
def test_an_impossible_cache_is_refused_in_one_sentence(spec: CacheSpec, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec.validate()
