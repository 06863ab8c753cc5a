"""A pool that another process reads, and may not write."""

import os
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcache.head_map import HeadInterval
from kvcache.kv_store import KvStore
from kvcache.layout import KvLayout
from kvcache.mapped_pool import MappedCells, MappedPool, PoolMap
from kvcache.shared_memory import SharedMemory
from kvcache.spec import CacheSpec

SPEC = CacheSpec.full(num_layers=2, num_kv_heads=3, head_dim=8, block_size=16, dtype="int64")
BLOCKS, TARGET, HEADS = [5, 1, 6, 0], [2, 7, 3, 4], [0, 1, 2]


def store_of(
    spec: CacheSpec = SPEC, layout: KvLayout = KvLayout.HEAD_MAJOR, *, share: bool = False
) -> KvStore:
    store = KvStore(spec, HeadInterval(0, 3), 8, layout=layout, share=share)
    for layer in range(store.num_layers):
        pool_NPHSD = store.layer(layer)
        pool_NPHSD.copy_(torch.arange(pool_NPHSD.numel()).reshape(pool_NPHSD.shape) + layer)
    return store


def map_of(store: KvStore) -> tuple[SharedMemory, PoolMap]:
    """As another process has it."""
    shown = store.shown
    assert shown is not None
    return SharedMemory.open(os.dup(shown.memory.fd), shown.map.num_bytes), shown.map


def cells_of(store: KvStore, blocks: Sequence[int], tail: int | None = None) -> MappedCells:
    pool = MappedPool(*map_of(store), store.spec)
    cells = pool.cells(np.array(blocks, "<i8").tobytes(), store.spec.block_size, tail)
    assert cells is not None
    return cells


@pytest.mark.parametrize("theirs", list(KvLayout))
@pytest.mark.parametrize("ours", list(KvLayout))
@pytest.mark.parametrize(("heads", "tail"), [([0, 1, 2], None), ([0, 2], 5), ([1], 16 - 1)])
def test_cells_are_taken_as_if_gathered_there_and_scattered_here(
    theirs: KvLayout, ours: KvLayout, heads: list[int], tail: int | None
) -> None:
    source, sink = store_of(layout=theirs, share=True), store_of(layout=ours)
    want = source.gather_cells(1, BLOCKS, heads, tail)
    digests = source.digest_cells(1, BLOCKS, heads, tail)
    digests[3] += np.uint64(1)
    before = sink.gather_cells(1, TARGET, heads)
    assert sink.take_cells(1, TARGET, heads, cells_of(source, BLOCKS, tail), digests).tolist() == [
        3
    ]
    got = sink.gather_cells(1, TARGET, heads)
    want[3] = before[3]
    assert np.array_equal(got, want)


def test_digests_are_those_that_a_gather_makes_and_are_made_once() -> None:
    store, digests = store_of(share=True), np.zeros(4 * 3 * 2, np.uint64)
    store.gather_cells(0, BLOCKS, HEADS, 7, digests=digests)
    assert store.digest_cells(0, BLOCKS, HEADS, 7).tolist() == digests.tolist()
    store.layer(0).zero_()  # and nobody says so: what is known of whole blocks stands
    again = store.digest_cells(0, BLOCKS, HEADS, 7)
    assert again[:18].tolist() == digests[:18].tolist()
    store.kept.forget_all()
    assert store.digest_cells(0, BLOCKS, HEADS, 7)[0] != digests[0]


def test_who_is_shown_a_pool_cannot_write_to_it() -> None:
    store = store_of(share=True)
    memory, _ = map_of(store)
    with pytest.raises(ValueError, match="read-only"):
        memory.array[0] = 1
    with pytest.raises(OSError):
        os.pwrite(memory.fd, b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(memory.fd, 0)
    store.layer(0)[0, 0, 0, 0, 0] = 77
    assert memory.array[:8].view(np.int64)[0] == 77


def test_memory_that_we_could_not_trust_is_refused() -> None:
    fd = os.memfd_create("shrinks", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="of 4096 bytes, not 8192"):
        SharedMemory.open(os.dup(fd), 8192)
    with pytest.raises(ValueError, match="may shrink"):
        SharedMemory.open(fd, 4096)


def test_a_map_that_leads_out_of_the_memory_is_refused() -> None:
    _, shown = map_of(store_of(share=True))
    shown.check(SPEC)
    last = shown.layers[-1]
    for wrong in (
        replace(shown, num_blocks=shown.num_blocks + 1),
        replace(shown, num_bytes=shown.num_bytes - 1),
        replace(shown, block_size=32),
        replace(shown, kv_heads=HeadInterval(0, 4)),
        replace(shown, layers=(shown.layers[0], replace(last, offset=last.offset + 8))),
    ):
        with pytest.raises(ValueError, match="ends at"):
            wrong.check(SPEC)
    with pytest.raises(ValueError, match="1 layers"):
        replace(shown, layers=shown.layers[:1]).check(SPEC)


def test_blocks_and_heads_that_are_not_there_are_not_read() -> None:
    store = store_of(share=True)
    pool, sink = MappedPool(*map_of(store), SPEC), store_of()
    for ids, size, tail in (([8], 16, None), ([-1], 16, None), ([0], 12, None), ([0], 16, 16)):
        assert pool.cells(np.array(ids, "<i8").tobytes(), size, tail) is None
    assert pool.cells(b"123", 16, None) is None
    few = KvStore(SPEC, HeadInterval(0, 1), 8, share=True)
    digests = np.zeros(6, np.uint64)
    assert len(sink.take_cells(0, [1], HEADS, cells_of(few, [1]), digests)) == 6
    assert len(sink.take_cells(0, [1], HEADS, cells_of(store, [1, 2]), digests)) == 6


def test_what_is_written_is_what_was_digested_however_the_pool_changes() -> None:
    """Its owner writes all the time: no cell is taken that is not what it was."""
    ours, theirs, stop = store_of(share=True), store_of(), threading.Event()
    digests, right = ours.digest_cells(0, BLOCKS, HEADS), ours.gather_cells(0, BLOCKS, HEADS)

    def write() -> None:
        while not stop.is_set():
            ours.layer(0).neg_()

    writing, num_bad = threading.Thread(target=write), 0
    writing.start()
    try:
        for _ in range(300):
            theirs.layer(0).zero_()
            bad = theirs.take_cells(0, TARGET, HEADS, cells_of(ours, BLOCKS), digests)
            got = theirs.gather_cells(0, TARGET, HEADS)
            good = np.setdiff1d(np.arange(len(digests)), bad)
            assert (got[good] == right[good]).all() and not got[bad].any()
            num_bad += len(bad)
    finally:
        stop.set()
        writing.join()
    assert num_bad > 0
