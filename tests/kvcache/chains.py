"""Chains of blocks of one token, named and cached."""

from kvcache.block_hash import PUBLIC, BlockHash, Namespace, name_blocks
from kvcache.block_pool import BlockPool

SPACE = Namespace(bytes(32))


def chain(*tokens: int) -> list[BlockHash]:
    """The names of a prompt of one-token blocks."""
    return name_blocks(SPACE, PUBLIC, tokens, block_size=1)


def name_all(pool: BlockPool, block_ids: list[int], names: list[BlockHash]) -> list[bool]:
    parents = [None, *names[:-1]]
    return [
        pool.name(block_id, name, parent)
        for block_id, name, parent in zip(block_ids, names, parents, strict=True)
    ]


def cache(pool: BlockPool, names: list[BlockHash]) -> list[int]:
    """Compute, name and let go of a chain; what is resident of it is shared."""
    block_ids = pool.share(names)
    block_ids += pool.take(len(names) - len(block_ids))
    name_all(pool, block_ids, names)
    pool.release(reversed(block_ids))
    pool.check()
    return block_ids
