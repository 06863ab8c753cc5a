import os
import subprocess
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import host_cells
from kvcache.capacity import shared_by
from kvcache.cells import cell_digests
from kvcache.head_map import HeadInterval, HeadMap
from kvcache.kv_store import KvStore
from kvcache.layout import KvLayout
from kvcache.spec import CacheSpec, LayerGroup, LayerKind, Plane, ShardAxis

DTYPES = ["float32", "float16", "bfloat16", "int64"]


def spec(dtype: str = "float32", kv_heads: int = 3, head_dim: int = 8) -> CacheSpec:
    return CacheSpec.full(2, kv_heads, head_dim, block_size=4, dtype=dtype)


def store(dtype: str = "float32", heads: tuple[int, int] = (0, 3), num_blocks: int = 6) -> KvStore:
    made = KvStore(spec(dtype), HeadInterval(*heads), num_blocks)
    made.poison()
    return made


def fill_by_head(stores: list[KvStore]) -> None:
    """The same values for the same (layer, block, plane, head) on whatever rank holds it."""
    for made in stores:
        for layer in range(made.num_layers):
            pool = made.layer(layer)
            for local, head in enumerate(made.kv_heads):
                whole = torch.arange(pool[:, :, 0].numel()).reshape(pool[:, :, 0].shape)
                pool[:, :, local] = (whole + 1_000 * head + 7 * layer).to(pool.dtype)


def test_a_layer_is_blocks_by_planes_by_local_heads_by_slots_by_width() -> None:
    made = store(heads=(1, 3))
    assert made.num_layers == 2
    assert made.layer(1).shape == (6, 2, 2, 4, 8)
    assert made.layer(1).dtype == torch.float32
    assert made.kv_heads == HeadInterval(1, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cells_go_from_one_store_to_another_byte_for_byte(dtype: str) -> None:
    source, target = store(dtype), store(dtype)
    fill_by_head([source])
    cells = source.gather_cells(1, [4, 0], heads=[0, 1, 2])
    assert cells.shape == (2 * 3 * 2, spec(dtype).cell_bytes(Plane("k", 8)))
    assert cells.dtype == np.uint8
    target.scatter_cells(1, [2, 5], [0, 1, 2], cells.tobytes())
    assert torch.equal(target.layer(1)[[2, 5]], source.layer(1)[[4, 0]])
    assert (target.gather_cells(1, [2, 5], [0, 1, 2]) == cells).all()
    untouched = store(dtype)
    for block in (0, 1, 3, 4):
        assert (
            target.gather_cells(1, [block], [0]) == untouched.gather_cells(1, [block], [0])
        ).all()
    assert (target.gather_cells(0, [2], [1]) == untouched.gather_cells(0, [2], [1])).all()


def test_the_order_of_cells_is_block_then_head_then_plane() -> None:
    made = store()
    fill_by_head([made])
    cells = made.gather_cells(0, [3, 1], heads=[0, 2])
    expected = [
        made.layer(0)[block, plane, head].numpy().tobytes()
        for block in (3, 1)
        for head in (0, 2)
        for plane in (0, 1)
    ]
    assert [cell.tobytes() for cell in cells] == expected


@pytest.mark.parametrize("target_tp", range(1, 10))
@pytest.mark.parametrize("source_tp", [1, 2, 3, 4, 9])
def test_any_split_reshards_into_any_other_by_head_numbers(source_tp: int, target_tp: int) -> None:
    source_map, target_map = HeadMap.even(9, 3, source_tp), HeadMap.even(9, 3, target_tp)
    sources = [KvStore(spec(), kv, 4) for kv in source_map.kv]
    fill_by_head(sources)
    whole = store(num_blocks=4)
    fill_by_head([whole])
    for kv in target_map.kv:
        target = KvStore(spec(), kv, 4)
        for head in kv:
            owner = sources[source_map.owner(head)]
            cells = owner.gather_cells(0, [1, 2], [head])
            assert (
                cell_digests(cells) == cell_digests(whole.gather_cells(0, [1, 2], [head]))
            ).all()
            target.scatter_cells(0, [3, 0], [head], cells)
        moved = target.layer(0)[[3, 0]]
        assert torch.equal(moved, whole.layer(0)[[1, 2]][:, :, kv.start : kv.stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_past_the_tail_come_out_zero_whatever_was_there(dtype: str) -> None:
    made, other = store(dtype), store(dtype)
    fill_by_head([made, other])
    made.layer(0)[2, :, :, 3:] = 77
    other.layer(0)[2, :, :, 3:] = 99
    tail = made.gather_cells(0, [1, 2], [0, 1, 2], tail_tokens=3)
    assert (tail == other.gather_cells(0, [1, 2], [0, 1, 2], tail_tokens=3)).all()
    assert not tail.reshape(2, 6, 4, -1)[1, :, 3].any()
    assert (tail[:6] == made.gather_cells(0, [1], [0, 1, 2])).all()
    assert (made.layer(0)[2, :, :, 3:] == 77).all()  # the pool itself is left alone
    assert not made.gather_cells(0, [2], [0], tail_tokens=0).any()


@pytest.mark.parametrize("target_layout", KvLayout)
@pytest.mark.parametrize("source_layout", KvLayout)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_layout_gives_and_takes_the_same_cells(
    dtype: str, source_layout: KvLayout, target_layout: KvLayout
) -> None:
    usual, source, target = (
        KvStore(spec(dtype), HeadInterval(0, 3), 6, layout=layout)
        for layout in (KvLayout.HEAD_MAJOR, source_layout, target_layout)
    )
    fill_by_head([usual, source])
    assert torch.equal(source.layer(1), usual.layer(1))
    cells = source.gather_cells(1, [4, 0], [0, 2], tail_tokens=3)
    assert (cells == usual.gather_cells(1, [4, 0], [0, 2], tail_tokens=3)).all()
    target.scatter_cells(1, [2, 5], [0, 2], cells)
    assert (target.gather_cells(1, [2, 5], [0, 2]) == cells).all()
    target.copy_blocks([(5, 1)])
    assert torch.equal(target.layer(1)[1, :, 0], target.layer(1)[5, :, 0])


def test_a_layout_is_the_order_in_which_memory_runs() -> None:
    strides = {
        layout: KvStore(spec(), HeadInterval(0, 3), 6, layout=layout).layer(0).stride()
        for layout in KvLayout
    }
    assert strides == {
        KvLayout.HEAD_MAJOR: (192, 32, 64, 8, 1),
        KvLayout.TOKEN_MAJOR: (192, 96, 8, 24, 1),
        KvLayout.PLANE_MAJOR: (96, 576, 8, 24, 1),
    }


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.tuples(st.sampled_from([2, 4, 8, 16]), st.sampled_from([2, 4, 8, 16])),
    layouts=st.tuples(st.sampled_from(KvLayout), st.sampled_from(KvLayout)),
    compiled=st.tuples(st.booleans(), st.booleans()),
    num_tokens=st.integers(1, 50),
    data=st.data(),
)
def test_stores_of_different_block_sizes_agree_on_every_cell_of_the_smaller_one(
    sizes: tuple[int, int],
    layouts: tuple[KvLayout, KvLayout],
    compiled: tuple[bool, bool],
    num_tokens: int,
    data: st.DataObject,
) -> None:
    """The same tokens, written where each store keeps them, give the same bytes; and scattered from
    one into the other, they are found there token by token.
    """
    unit = min(sizes)
    source, target = (
        KvStore(CacheSpec.full(1, 2, 3, size, "float32"), HeadInterval(0, 2), 32, layout=layout)
        for size, layout in zip(sizes, layouts, strict=True)
    )
    tables = [
        data.draw(st.permutations(range(32)), label="blocks")[: -(-num_tokens // size)]
        for size in sizes
    ]
    for made in (source, target):
        made.poison()

    def token(made: KvStore, table: list[int], position: int) -> torch.Tensor:
        size = made.spec.block_size
        return made.layer(0)[table[position // size], :, :, position % size]

    for position in range(num_tokens):
        token(source, tables[0], position)[...] = torch.arange(12.0).view(2, 2, 3) + 100 * position
    views = []
    for made, on in zip((source, target), compiled, strict=True):
        with patch.object(host_cells, "load", return_value=host_cells.load() if on else None):
            views.append(made.cut(unit))
    ids = [
        [block * (size // unit) + part for block in table for part in range(size // unit)]
        for size, table in zip(sizes, tables, strict=True)
    ]
    num_units = -(-num_tokens // unit)
    tail = num_tokens % unit or None
    cells = views[0].gather_cells(0, ids[0][:num_units], [0, 1], tail)
    assert cells.shape == (num_units * 2 * 2, unit * 3 * 4)
    views[1].scatter_cells(0, ids[1][:num_units], [0, 1], cells)
    for position in range(num_tokens):
        assert torch.equal(
            token(target, tables[1], position), token(source, tables[0], position)
        ), position
    there = views[1].gather_cells(0, ids[1][:num_units], [0, 1], tail)
    assert (cell_digests(there) == cell_digests(cells)).all()


def test_a_block_is_only_cut_into_equal_parts() -> None:
    made = store()
    assert made.cut(2).spec.block_size == 2
    for size in (3, 8):
        with pytest.raises(ValueError, match=f"blocks of 4 tokens have none of {size}"):
            made.cut(size)


@pytest.mark.parametrize("heads", [[0, 1, 2], [1, 2], [0, 2]], ids=str)
@pytest.mark.parametrize("begin", [0, 32, 8])  # of what is written, in a line of a cache
def test_much_at_once_is_gathered_alike_with_digests_and_without(
    heads: list[int], begin: int
) -> None:
    source = KvStore(spec(head_dim=64), HeadInterval(0, 3), 600)
    source.layer(1).copy_(torch.rand(source.layer(1).shape))
    ids = np.random.default_rng(3).permutation(600).tolist()
    width = len(heads) * 2 * 4 * 64 * 4
    out = np.zeros(begin + len(ids) * width + 64, np.uint8)
    out = out[(begin - out.ctypes.data) % 64 :][: len(ids) * width]
    cells = source.gather_cells(1, ids, heads, 3, out)
    assert np.shares_memory(cells, out) and cells.nbytes > 1 << 20
    digests = np.zeros(len(cells), np.uint64)
    assert (source.gather_cells(1, ids, heads, 3, digests=digests) == cells).all()


def test_gathered_cells_are_a_copy() -> None:
    made = store()
    fill_by_head([made])
    cells = made.gather_cells(0, [1], [0])
    before = cells.copy()
    made.poison()
    assert (cells == before).all()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_cells_may_come_in_any_buffer(kind: type) -> None:
    source, target = store("bfloat16"), store("bfloat16")
    fill_by_head([source])
    raw = source.gather_cells(0, [5], [1]).tobytes()
    target.scatter_cells(0, [0], [1], kind(raw))
    assert torch.equal(target.layer(0)[0, :, 1], source.layer(0)[5, :, 1])


def test_cells_may_lie_anywhere_in_a_received_message() -> None:
    source, target = store("int64"), store("int64")
    fill_by_head([source])
    message = b"x" + source.gather_cells(0, [5], [1]).tobytes()
    target.scatter_cells(0, [0], [1], memoryview(message)[1:])
    assert torch.equal(target.layer(0)[0, :, 1], source.layer(0)[5, :, 1])


@pytest.mark.parametrize("surplus", [-1, 1, 256])
def test_a_wrong_number_of_bytes_is_refused_and_writes_nothing(surplus: int) -> None:
    made, before = store("int64"), store("int64")
    fill_by_head([made, before])
    with pytest.raises(ValueError, match=rf"are 1024 bytes, not {1024 + surplus}"):
        made.scatter_cells(0, [0, 1], [2], bytes(1024 + surplus))
    assert torch.equal(made.layer(0), before.layer(0))


def test_a_head_of_another_rank_is_refused() -> None:
    made = store(heads=(1, 3))
    with pytest.raises(ValueError, match="KV head 0 is not on this rank"):
        made.gather_cells(0, [0], [0, 1])
    with pytest.raises(ValueError, match="KV head 3 is not on this rank"):
        made.scatter_cells(0, [0], [3], b"")


@pytest.mark.parametrize("block_id", [-1, 6])
def test_a_block_outside_the_pool_is_our_bug(block_id: int) -> None:
    with pytest.raises(AssertionError, match=r"block id outside 0\.\.5"):
        store().gather_cells(0, [block_id], [0])


def test_blocks_are_copied_in_every_layer() -> None:
    made, before = store(), store()
    fill_by_head([made, before])
    made.copy_blocks([(0, 3), (0, 1)])
    made.copy_blocks([])
    for layer in range(2):
        assert torch.equal(made.layer(layer)[[3, 1]], before.layer(layer)[[0, 0]])
        assert torch.equal(made.layer(layer)[[0, 2, 4, 5]], before.layer(layer)[[0, 2, 4, 5]])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
@settings(max_examples=50, deadline=None)
def test_copies_happen_one_after_another(pairs: list[tuple[int, int]]) -> None:
    made, expected = store(), store()
    fill_by_head([made, expected])
    made.copy_blocks(pairs)
    for src, dst in pairs:
        expected.layer(1)[dst] = expected.layer(1)[src].clone()
    assert torch.equal(made.layer(1), expected.layer(1))


def test_poison_leaves_nothing_readable() -> None:
    assert store("float16").layer(0).isnan().all()
    assert (store("int64").layer(1) == -0x0BADCAFE).all()


LATENT = LayerGroup(LayerKind.LATENT, (0,), (Plane("latent", 8, ShardAxis.REPLICATED),))
WIDTHS = LayerGroup(LayerKind.FULL, (0,), (Plane("k", 8), Plane("v", 4)))


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (shared_by(spec(), 2), r"layers \[1\] cache as 'shared', which can be planned but not"),
        (CacheSpec(1, 4, "float32", (LATENT,)), "cache as 'latent'"),
        (CacheSpec(3, 4, "float32", (WIDTHS,)), "need planes of one width"),
        (spec("float8_e4m3fn"), "in one of float32, float16, bfloat16, int64, to be run"),
    ],
)
def test_what_cannot_be_run_yet_is_refused_in_one_sentence(refused: CacheSpec, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KvStore(refused, HeadInterval(0, 1), 4)


@pytest.mark.parametrize("heads", [(0, 4), (2, 2), (-1, 1)])
def test_a_rank_holds_a_run_of_the_models_kv_heads(heads: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is not a run of the 3 KV heads"):
        KvStore(spec(), HeadInterval(*heads), 4)


def test_only_the_store_needs_torch() -> None:
    code = (
        "import sys, kvcache.block_hash, kvcache.block_pool, kvcache.capacity, kvcache.cells\n"
        "import kvcache.head_map, kvcache.spec\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules\n"
    )
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
