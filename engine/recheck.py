"""Cached blocks are held against their digests: which of them, when, and what every rank finds.

    sampled    a share of the blocks that a prompt is about to share, drawn on rank 0
    suspected  all of some chain, because somebody who read it found a change
    idle       blocks without a digest, a few at a time while nobody waits: they were computed here,
               and not shipped (what is shipped has its digests made on the way)

Rank 0 says which, and every rank reads its own heads of them in between two steps. What one rank
finds changed is dropped for all: names are rank 0's.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from random import Random

import torch

from kvcache.block_hash import BlockHash
from kvcache.block_pool import BlockPool
from kvcache.kept_digests import KeptDigests
from kvcache.kv_store import KvStore
from model.comm import Comm

IDLE_BLOCKS = 8  # digested at once: a request that comes waits for them, a few milliseconds
Findings = Mapping[int, list[int]]  # by block, the ranks that find it changed
Due = Mapping[int, BlockHash]  # blocks to check, with the names they bear


def recheck(store: KvStore, comm: Comm, block_ids: Sequence[int]) -> Findings:
    """Every rank of the group calls this with the same blocks; rank 0 gets what all have found."""
    rotten = set(store.recheck(block_ids))
    flags = [block_id in rotten for block_id in block_ids]
    flags_B = torch.tensor(flags, dtype=torch.int32, device=store.layer(0).device)
    gathered = comm.gather_to_0(flags_B, [len(block_ids)] * comm.size) or []
    findings: dict[int, list[int]] = {}
    for rank, theirs_B in enumerate(gathered):
        for block_id, changed in zip(block_ids, theirs_B.tolist(), strict=True):
            if changed:
                findings.setdefault(block_id, []).append(rank)
    return findings


class Rechecks:
    """What is to be checked next. Not thread-safe: its engine locks it."""

    def __init__(self, pool: BlockPool, kept: KeptDigests, share: float, random: Random) -> None:
        self._pool = pool
        self._kept = kept  # rank 0's, which knows of as many blocks as every rank's
        self._share = share
        self._random = random
        self._due: dict[int, BlockHash] = {}
        self._waiting: list[Future[None]] = []
        self._blanks: deque[tuple[int, BlockHash]] = deque()
        self._num_seen = 0  # namings, when blanks were last looked for

    @property
    def has_blanks(self) -> bool:
        """Whether blocks are known that have no digest, and would be checked if they had one."""
        return bool(self._blanks)

    def sample(self, names: Sequence[BlockHash]) -> bool:
        """Draw among those of these blocks that are resident now; whether any is due."""
        return self._add(names, self._share)

    def suspect(self, names: Sequence[BlockHash]) -> bool:
        """All that are resident now; whether any is."""
        return self._add(names, 1.0)

    def suspect_blocks(self, block_ids: Sequence[int]) -> bool:
        """Whether any of these bears a name."""
        names = {block_id: self._pool.name_of(block_id) for block_id in block_ids}
        found = {block_id: name for block_id, name in names.items() if name is not None}
        self._due.update(found)
        return bool(found)

    def await_due(self) -> "Future[None]":
        """Done when everything that is due now has been checked, and dropped if need be."""
        future: Future[None] = Future()
        self._waiting.append(future)
        return future

    def take(self) -> tuple[Due, list["Future[None]"]]:
        """What is due, and who waits for it."""
        due, self._due = self._due, {}
        waiting, self._waiting = self._waiting, []
        return due, waiting

    def take_blanks(self) -> Due:
        """A few cached blocks without a digest, while there are any."""
        if not self._blanks and self._share > 0 and self._num_seen != self._pool.num_namings:
            self._num_seen = self._pool.num_namings
            named = self._pool.named()
            unknown = set(self._kept.unknown(list(named)))
            self._blanks.extend(item for item in named.items() if item[0] in unknown)
        some = [self._blanks.popleft() for _ in range(min(IDLE_BLOCKS, len(self._blanks)))]
        return {block_id: name for block_id, name in some if self._pool.bears(block_id, name)}

    def _add(self, names: Sequence[BlockHash], share: float) -> bool:
        resident = self._pool.find(names)
        drawn = [
            (block_id, name)
            for name, block_id in zip(names, resident, strict=False)
            if share >= 1 or self._random.random() < share
        ]
        self._due.update(drawn)
        return bool(drawn)
