"""Blocks that are promised before anybody knows which."""

import pytest

from kvcache.block_pool import BlockPool, OutOfBlocks
from tests.kvcache.chains import cache, chain


def test_promised_blocks_are_out_of_reach_and_still_cache() -> None:
    pool = BlockPool(num_blocks=4)
    names = chain(1, 2, 3)
    cache(pool, names)
    pool.promise(3)
    assert (pool.num_available, pool.num_free, pool.num_cached, pool.num_used) == (1, 1, 3, 0)
    assert pool.match(names) == 3
    with pytest.raises(OutOfBlocks, match="need 2 blocks, 1 available"):
        pool.take(2)
    with pytest.raises(OutOfBlocks, match="need 3 blocks, 1 available"):
        pool.share(names)
    assert pool.share(names[:1]) == [0]
    with pytest.raises(OutOfBlocks, match="need 1 blocks, 0 available"):
        pool.promise(1)
    assert pool.take(2, promised=2) == [3, 2]
    pool.unpromise(1)
    assert (pool.num_available, pool.num_promised) == (1, 0)
    pool.check()


def test_a_hit_in_use_by_another_owner_costs_no_promise() -> None:
    pool = BlockPool(num_blocks=3)
    names = chain(1, 2)
    cache(pool, names)
    pool.share(names)
    pool.promise(1)
    assert pool.num_available == 0
    assert pool.share(names) == [0, 1]
    pool.check()


def test_a_promised_block_is_there_for_a_copy_on_write() -> None:
    pool = BlockPool(num_blocks=2)
    (shared,) = pool.take(1)
    pool.fork([shared])
    pool.promise(1)
    with pytest.raises(OutOfBlocks):
        pool.writable(shared)
    assert pool.writable(shared, promised=1) == (1, True)
    assert pool.num_promised == 0
    assert pool.writable(shared) == (shared, False)
    pool.check()
