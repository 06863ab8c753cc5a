"""Digests that stay beside the blocks: what they catch, and whom they never accuse."""

import numpy as np
import pytest

from kernels import kept_rows
from kvcache.head_map import HeadInterval
from kvcache.kept_digests import BlockRotten, KeptDigests
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from tests.transport.harness import filled_store

SPEC = CacheSpec.full(num_layers=2, num_kv_heads=3, head_dim=4, block_size=8, dtype="int64")
HEADS = [0, 1, 2]
BLOCKS = [4, 1, 5]


def store(seed: int = 1) -> KvStore:
    return filled_store(SPEC, HeadInterval(0, 3), 6, seed)


def flip(made: KvStore, block: int, layer: int = 1, head: int = 2) -> None:
    made.layer(layer)[block, 1, head, 5, 3] ^= 1 << 40


def digested(made: KvStore, blocks: list[int], layer: int = 1, tail: int | None = None) -> None:
    digests = np.empty(len(blocks) * 6, np.uint64)
    made.gather_cells(layer, blocks, HEADS, tail, digests=digests)


def arrived(made: KvStore, blocks: list[int], block_size: int = 8) -> None:
    """The cells of another store come in, with their digests."""
    target, source = (each.cut(block_size) for each in (made, store(2)))
    ids = [block * 8 // block_size + i for block in blocks for i in range(8 // block_size)]
    for layer in range(2):
        digests = np.empty(len(ids) * 6, np.uint64)
        cells = source.gather_cells(layer, ids, HEADS, digests=digests)
        target.scatter_cells(layer, ids, HEADS, cells, digests)


def test_a_block_that_changed_since_it_was_sent_is_not_sent_again() -> None:
    made = store()
    digested(made, BLOCKS)
    digested(made, [5])
    flip(made, 1)
    with pytest.raises(BlockRotten, match=r"blocks \[1\] have changed in layer 1") as found:
        digested(made, BLOCKS)
    assert found.value.block_ids == (1,)
    digested(made, [4, 5])


def test_a_block_that_changed_since_it_arrived_is_found_when_it_is_checked() -> None:
    made = store()
    arrived(made, BLOCKS)
    assert made.kept.unknown(range(6)) == [0, 2, 3]
    assert made.recheck(BLOCKS) == []
    flip(made, 5, layer=0, head=0)
    flip(made, 4)
    assert made.recheck(BLOCKS) == [4, 5]


def test_the_first_check_of_a_block_computed_here_makes_its_digests() -> None:
    made = store()
    assert made.recheck([2, 3]) == []
    assert made.kept.unknown(range(6)) == [0, 1, 4, 5]
    flip(made, 3)
    assert made.recheck([2, 3]) == [3]


def test_what_is_noted_as_it_is_written_is_known_from_then_on_and_held_to_it() -> None:
    made, want = store(), np.empty(len(BLOCKS) * 6, np.uint64)
    made.gather_cells(1, BLOCKS, HEADS, digests=want)
    made.kept.forget(BLOCKS)
    made.note_cells(1, BLOCKS)
    known = made.kept.known(range(1, 2), BLOCKS, HEADS)
    assert known is not None and known.reshape(-1).tolist() == want.tolist()
    assert made.kept.unknown(range(6)) == [0, 1, 2, 3, 4, 5], "of another layer nothing is known"
    flip(made, 1)
    assert made.recheck(BLOCKS) == [1]
    made.kept.forget([1])
    assert made.kept.known(range(1, 2), [1], HEADS) is None
    made.note_cells(1, [1])
    assert made.recheck(BLOCKS) == []


def test_whoever_writes_a_block_and_says_so_is_not_accused() -> None:
    made = store()
    made.recheck(range(6))
    made.kept.forget([0])
    flip(made, 0)
    made.copy_blocks([(1, 2)])
    arrived(made, [3])
    arrived(made, [4], block_size=2)  # its parts have digests, it has none
    assert made.kept.unknown(range(6)) == [0, 2, 4]
    assert made.recheck(range(6)) == []


def test_what_is_read_while_it_is_written_is_neither_kept_nor_accused() -> None:
    made = store()
    made.recheck([0, 1])
    digests = np.arange(12, dtype=np.uint64).reshape(2, 3, 2)
    before = made.kept.written([0, 1])
    made.kept.forget([1])
    made.kept.forget([1])  # before, and after
    assert made.kept.compare(1, [0, 1], HEADS, digests, before) == [0]
    assert made.kept.unknown([0, 1]) == [1]


def test_a_cell_that_was_refused_has_no_digest() -> None:
    made, digests = store(), np.empty(12, np.uint64)
    cells = store(2).gather_cells(0, [0, 1], HEADS, digests=digests)
    digests[8] ^= np.uint64(1)  # block 1, head 1
    assert made.scatter_cells(0, [0, 1], HEADS, cells, digests).tolist() == [8]
    flip(made, 0, layer=0)
    flip(made, 1, layer=0, head=1)
    assert made.recheck([0, 1]) == [0]


def test_a_partial_tail_is_never_held_to_its_digest() -> None:
    made = store()
    digested(made, [1, 2], tail=3)
    flip(made, 2)
    digested(made, [1, 2], tail=3)
    assert made.kept.unknown([2]) == [2]


def test_digests_take_17_bytes_a_head_and_layer() -> None:
    assert store().kept.bytes_per_block == 2 * 3 * 17 + 4
    smollm2 = CacheSpec.full(30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
    kept = KvStore(smollm2, HeadInterval(0, 3), 2).kept
    assert kept.bytes_per_block == 1534
    assert kept.bytes_per_block / smollm2.bytes_per_block(3) < 0.003


def test_the_compiled_rows_keep_what_numpy_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_rows.load() is not None
    compiled = KeptDigests(9, 4, {6: 1, 3: 2, 4: 2})
    monkeypatch.setattr(kept_rows, "load", lambda: None)
    plain = KeptDigests(9, 4, {6: 1, 3: 2, 4: 2})
    rng, found = np.random.default_rng(5), {"rotten": 0, "same": 0}
    before = plain.written(range(9))
    for _ in range(600):
        layers, planes = ((range(3, 4), 2), (range(3, 5), 2), (range(6, 7), 1))[rng.integers(3)]
        ids = rng.permutation(9)[: rng.integers(5)]
        lo, hi = sorted(rng.choice(5, 2, replace=False).tolist())
        heads = list(range(lo, hi)) if rng.random() < 0.8 else [0, 2]
        digests = rng.integers(0, 2**64, (len(layers), len(ids), len(heads), planes), np.uint64)
        if rng.random() < 0.8 and (known := plain.known(layers, ids, heads)) is not None:
            digests = known.reshape(digests.shape)
        good = None if rng.random() < 0.5 else rng.random(digests.shape[:3]) < 0.8
        what, both = rng.integers(4), (compiled, plain)
        if what == 0:
            before = plain.written(range(9))
        elif what == 1:
            for each in both:
                each.keep(layers, ids, heads, digests, good)
        elif what == 2 and rng.random() < 0.3:
            for each in both:
                each.forget_cells(layers, ids, heads)
        else:
            read = (layers[0], ids, heads, digests[0], before[ids])
            answers = [each.compare(*read) for each in both]
            assert answers[0] == answers[1]
            found["rotten" if answers[0] else "same"] += 1
        assert (compiled.written(range(9)) == plain.written(range(9))).all()
        cells = [([block], [head]) for block in range(9) for head in range(4)]
        for where in [(ids.tolist(), heads), *cells]:  # some of many may be known, or all, or none
            ours, theirs = (each.known(layers, *where) for each in both)
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or (ours == theirs).all()
    assert min(found["rotten"], found["same"]) > 20, found
