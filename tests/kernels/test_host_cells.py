"""The compiled loops do what their references do, on any layout."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import host_cells
from kvcache.cells import cell_digests, cell_digests_reference
from kvcache.head_map import HeadInterval
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec


def test_the_compiler_that_make_needs_is_used() -> None:
    assert host_cells.load() is not None


@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 7), (5, 240), (17, 4096), (2, 100_001)])
def test_digests_equal_the_reference(shape: tuple[int, int]) -> None:
    cells = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    assert cell_digests(cells).tolist() == cell_digests_reference(cells).tolist()


@settings(max_examples=60, deadline=None)
@given(
    num_heads=st.integers(1, 5),
    head_dim=st.integers(1, 9),
    dtype=st.sampled_from(["float32", "bfloat16", "int64"]),
    data=st.data(),
)
def test_gather_and_scatter_equal_the_references(
    num_heads: int, head_dim: int, dtype: str, data: st.DataObject
) -> None:
    spec = CacheSpec.full(2, num_heads, head_dim, block_size=4, dtype=dtype)
    compiled = KvStore(spec, HeadInterval(0, num_heads), 6)
    with patch.object(host_cells, "load", return_value=None):
        plain = KvStore(spec, HeadInterval(0, num_heads), 6)
    for layer in range(2):
        raw = torch.randint(0, 255, compiled.layer(layer).view(torch.uint8).shape)
        for store in (compiled, plain):
            store.layer(layer).view(torch.uint8).copy_(raw.to(torch.uint8))
    blocks = data.draw(st.lists(st.integers(0, 5), min_size=1, unique=True))
    heads = sorted(data.draw(st.sets(st.integers(0, num_heads - 1), min_size=1)))
    tail = data.draw(st.none() | st.integers(1, 4))
    cells = compiled.gather_cells(1, blocks, heads, tail)
    assert np.array_equal(cells, plain.gather_cells(1, blocks, heads, tail))
    out = np.empty(cells.nbytes, dtype=np.uint8)
    assert np.array_equal(compiled.gather_cells(1, blocks, heads, tail, out), cells)
    assert np.array_equal(out, cells.reshape(-1))
    for store in (compiled, plain):
        digests = np.zeros(len(cells), dtype=np.uint64)
        store.gather_cells(1, blocks, heads, tail, digests=digests)
        assert digests.tolist() == cell_digests_reference(cells).tolist()
        store.kept.forget_all()
        assert store.digest_cells(1, blocks, heads, tail).tolist() == digests.tolist()
    everything = range(num_heads)
    want = cell_digests_reference(compiled.gather_cells(1, blocks, everything))
    compiled.kept.forget_all()
    compiled.note_cells(1, blocks)
    known = compiled.kept.known(range(1, 2), blocks, everything)
    assert known is not None and known.reshape(-1).tolist() == want.tolist()
    assert compiled.kept.unknown(range(6)) == list(range(6)), "of layer 0 nothing is known"
    changed = np.bitwise_xor(cells, np.uint8(1))
    for store in (compiled, plain):
        assert not len(store.scatter_cells(0, blocks, heads, changed))
    again = np.bitwise_xor(cells, np.uint8(3))
    digests = cell_digests_reference(again)
    spoilt = sorted(data.draw(st.sets(st.integers(0, len(cells) - 1))))
    digests[spoilt] += np.uint64(1)
    for store in (compiled, plain):
        assert store.scatter_cells(1, blocks, heads, again, digests).tolist() == spoilt
        found = store.gather_cells(1, blocks, heads)
        good = np.setdiff1d(np.arange(len(cells)), spoilt)
        assert np.array_equal(found[good], again[good])
    for layer in range(2):
        both = [store.layer(layer).view(torch.uint8) for store in (compiled, plain)]
        assert torch.equal(*both)
