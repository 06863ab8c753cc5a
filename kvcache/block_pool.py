"""Ownership of KV blocks: promise, take, share, fork, write, name, release.

A block is in exactly one of three places:

    free     refcount 0, no name      handed out first
    cached   refcount 0, has a name   handed out last; a hit revives it
    in use   refcount > 0             never handed out

A promise is a number of blocks, not blocks: as many free and cached ones stay out of everybody
else's reach, and the cached ones among them may be hit meanwhile, until the promise is taken up.

`take` moves free or cached -> in use. `share` moves cached -> in use, or adds an owner, and so does
`fork`. `release` moves in use -> cached (named) or free (unnamed) when the last owner lets go.

A name hangs under its parent's, and a name is resident only while its parent is: what is cached is
always a run from the root, without holes. So eviction takes leaves, least recently used first. When
every cached name has a name in use below it (two owners computed the same block, and the one whose
block bears the name left first), the names below go too; their blocks stay with their owners.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from kvcache.block_hash import BlockHash
from kvcache.ledger import Ledger
from kvcache.ledger_row import Account, Book, Reason


class OutOfBlocks(Exception):
    """The pool cannot serve the request; the caller must wait, preempt or refuse."""


class Tier(Enum):
    """Which memory of a worker a block is in, nearest first. A pool's own blocks are all near."""

    DEVICE = "g"  # where the model computes, whatever that is
    HOST = "h"  # beside it: loaded back before it is used


@dataclass(frozen=True, slots=True)
class Stored:
    """`depth` is the number of blocks before this one in its chain."""

    name: BlockHash
    parent: BlockHash | None
    depth: int = 0
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Removed:
    name: BlockHash


BlockEvent = Stored | Removed


@dataclass(slots=True)
class Block:
    block_id: int
    refcount: int = 0
    name: BlockHash | None = None
    parent: int | None = None  # the block whose name this one's hangs under
    depth: int = 0  # blocks between its name and the root
    children: set[int] = field(default_factory=set)
    released_at: int = 0  # on the pool's own count of releases


class BlockPool:
    """Not thread-safe: whoever owns it locks it."""

    def __init__(self, num_blocks: int, ledger: Ledger | None = None) -> None:
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = deque(range(num_blocks))
        self._named: dict[BlockHash, int] = {}  # a name is always inserted after its parent
        self._leaves: list[tuple[int, int]] = []  # heap of (released_at, block id), some outdated
        self.num_namings = 0  # ever
        self._num_cached = 0
        self._num_promised = 0
        self._num_releases = 0
        self._events: dict[BlockHash, BlockEvent] = {}  # what changed since the last drain
        self._ledger = ledger
        self._post(Account.OUTSIDE, Account.FREE, Reason.OPENED, range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_promised(self) -> int:
        """Of the free and cached blocks, how many are spoken for."""
        return self._num_promised

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self._num_cached

    @property
    def num_available(self) -> int:
        """How many blocks `take` can hand out to whoever was promised none."""
        return len(self._free) + self._num_cached - self._num_promised

    def promise(self, count: int) -> None:
        """Set `count` blocks aside for a later `take`, without saying which."""
        self._require(count)
        self._num_promised += count
        if self._ledger is not None and count:
            move = (Account.OUTSIDE, Account.PROMISED, Reason.PROMISED)
            self._ledger.post(Book.PROMISES, *move, count=count)

    def unpromise(self, count: int) -> None:
        """Give up a promise that was not taken up."""
        assert 0 <= count <= self._num_promised, f"{self._num_promised} promised, {count} given up"
        self._num_promised -= count
        if self._ledger is not None and count:
            move = (Account.PROMISED, Account.OUTSIDE, Reason.TAKEN_UP)
            self._ledger.post(Book.PROMISES, *move, count=count)

    def take(self, count: int, promised: int = 0) -> list[int]:
        """Own `count` blocks with undefined contents, evicting cached ones if needed.

        `promised` of them were promised to the caller, and are not any more.
        """
        assert promised <= count, f"{promised} of {count} blocks taken from a promise"
        self._require(count - promised)
        self.unpromise(promised)
        block_ids = [self._take_one() for _ in range(count)]
        self._post(Account.FREE, Account.IN_USE, Reason.TAKEN, block_ids)
        return block_ids

    def match(self, names: Iterable[BlockHash]) -> int:
        """How many of `names`, from the first on, are resident. Owns nothing."""
        count = 0
        for name in names:
            if name not in self._named:
                break
            count += 1
        return count

    def find(self, names: Iterable[BlockHash]) -> list[int]:
        """The blocks that `share` would give. Owns nothing."""
        block_ids: list[int] = []
        for name in names:
            block_id = self._named.get(name)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def share(self, names: Iterable[BlockHash]) -> list[int]:
        """Own the longest run of resident blocks, stopping at the first miss.

        Raises OutOfBlocks, owning nothing, where that would leave too few for what is promised.
        """
        block_ids = self.find(names)
        revived = [block_id for block_id in block_ids if self._blocks[block_id].refcount == 0]
        self._require(len(revived))
        for block_id in block_ids:
            self._blocks[block_id].refcount += 1
        self._num_cached -= len(revived)
        shared = [block_id for block_id in block_ids if self._blocks[block_id].refcount > 1]
        self._post(Account.CACHED, Account.IN_USE, Reason.REVIVED, revived)
        self._post(Account.IN_USE, Account.IN_USE, Reason.SHARED, shared)
        return block_ids

    def fork(self, block_ids: Iterable[int]) -> None:
        """Add one owner to each block, which must already have one."""
        block_ids = list(block_ids)
        self._post(Account.IN_USE, Account.IN_USE, Reason.FORKED, block_ids)
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.refcount > 0, f"block {block_id} forked without an owner"
            block.refcount += 1

    def name(self, block_id: int, name: BlockHash, parent: BlockHash | None) -> bool:
        """Publish a block that has just become full; say whether it bears the name now.

        It does not when another block bears it already, or when the parent is not resident.
        """
        block = self._blocks[block_id]
        assert block.refcount > 0, f"block {block_id} named without an owner"
        if name in self._named:
            return self._named[name] == block_id
        assert block.name is None, f"block {block_id} has a name already"
        if parent is not None:
            if parent not in self._named:
                return False
            block.parent = self._named[parent]
            self._blocks[block.parent].children.add(block_id)
        block.name = name
        block.depth = 0 if block.parent is None else self._blocks[block.parent].depth + 1
        self._named[name] = block_id
        self.num_namings += 1
        self._record(Stored(name, parent, block.depth))
        return True

    def writable(self, block_id: int, promised: int = 0) -> tuple[int, bool]:
        """Return a block this owner may write, and whether the contents must be copied over.

        A block with another owner or a name is exchanged for a fresh one, a promised one if so.
        """
        block = self._blocks[block_id]
        assert block.refcount > 0, f"block {block_id} written without an owner"
        if block.refcount == 1 and block.name is None:
            return block_id, False
        (fresh,) = self.take(1, promised)
        self.release([block_id])
        return fresh, True

    def release(self, block_ids: Iterable[int]) -> None:
        """Let go of blocks. Pass them last-first, so that a prefix outlives its suffix."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.refcount > 0, f"block {block_id} released twice"
            block.refcount -= 1
            if block.refcount == 0:
                self._shelve(block)
            else:
                self._post(Account.IN_USE, Account.IN_USE, Reason.LET_GO, (block_id,))

    def flush(self) -> int:
        """Forget every cached block; say how many became free. Blocks in use stay as they are,
        but lose their names where a cached one stood above them.
        """
        num_cached = self._num_cached
        for block in self._blocks:
            if block.refcount == 0 and block.name is not None:
                self._forget(block, Reason.FLUSHED)
        return num_cached

    def disown(self, name: BlockHash, block_id: int) -> int:
        """The block that bears this name is not what it should be: forget the name, and all below
        it. Returns how many names are gone, 0 when the block does not bear it any more.
        """
        if not self.bears(block_id, name):
            return 0
        block = self._blocks[block_id]
        account = Account.IN_USE if block.refcount else Account.CACHED
        self._post(account, account, Reason.ROTTEN, (block_id,))
        num_below = len(self._below(block))
        self._forget(block, Reason.DISOWNED)
        return num_below

    def named(self) -> dict[int, BlockHash]:
        """Every block that bears a name, with it."""
        return {block_id: name for name, block_id in self._named.items()}

    def name_of(self, block_id: int) -> BlockHash | None:
        return self._blocks[block_id].name

    def bears(self, block_id: int, name: BlockHash) -> bool:
        return self._named.get(name) == block_id

    def take_stock(self) -> None:
        """Enter into the ledger how many blocks the pool itself counts in each account."""
        counts = {
            Account.FREE: self.num_free,
            Account.CACHED: self.num_cached,
            Account.IN_USE: sum(block.refcount > 0 for block in self._blocks),
        }
        if self._ledger is not None:
            for account, count in counts.items():
                self._ledger.post(Book.BLOCKS, account, account, Reason.COUNTED, count=count)

    @property
    def num_events(self) -> int:
        """That `drain_events` would return."""
        return len(self._events)

    def drain_events(self) -> list[BlockEvent]:
        """What became resident and what ceased to since the last call, net, in an order in which
        no name ever stands without its parent.
        """
        events = list(self._events.values())
        self._events.clear()
        return events

    def resident(self) -> list[BlockHash]:
        """Every name `match` would find, each after its parent."""
        return list(self._named)

    def resident_blocks(self) -> list[Stored]:
        """`resident` with each name's parent: the events that tell all of it anew."""
        return [
            Stored(
                name,
                None if block.parent is None else self._blocks[block.parent].name,
                block.depth,
            )
            for name, block in ((name, self._blocks[i]) for name, i in self._named.items())
        ]

    def check(self) -> None:
        """Raise if any block is in two places or in none, or a name without its parent."""
        free, cached, used = set(self._free), set(), set()
        for block in self._blocks:
            assert block.refcount >= 0, f"block {block.block_id} has {block.refcount} owners"
            if block.refcount:
                used.add(block.block_id)
            elif block.name is not None:
                cached.add(block.block_id)
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(cached | used), f"free blocks in use or named: {free}"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is nowhere"
        assert len(cached) == self._num_cached, f"{len(cached)} cached, {self._num_cached} counted"
        assert 0 <= self._num_promised <= len(free) + len(cached), (
            f"{self._num_promised} blocks promised, {len(free)} free and {len(cached)} cached"
        )
        self._check_names(cached)

    def _check_names(self, cached: set[int]) -> None:
        named = {b.name: b.block_id for b in self._blocks if b.name is not None}
        assert named == self._named, "names and blocks disagree"
        children: dict[int, set[int]] = {}
        for block_id in self._named.values():
            parent = self._blocks[block_id].parent
            if parent is not None:
                assert parent in children, f"block {block_id} stands without its parent"
                children[parent].add(block_id)
            children[block_id] = set()
        for block in self._blocks:
            assert block.children == children.get(block.block_id, set()), f"children of {block}"
        leaves = {i for i in cached if not self._blocks[i].children}
        evictable = {block_id for _, block_id in filter(self._is_current, self._leaves)}
        assert evictable == leaves, f"leaves {leaves}, evictable {evictable}"

    def _require(self, count: int) -> None:
        if count > self.num_available:
            raise OutOfBlocks(f"need {count} blocks, {self.num_available} available")

    def _take_one(self) -> int:
        if not self._free:
            self._forget(self._victim(), Reason.EVICTED)
        block_id = self._free.popleft()
        self._blocks[block_id].refcount = 1
        return block_id

    def _victim(self) -> Block:
        """The least recently released leaf, or any cached block where no leaf is cached."""
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_current(entry):
                return self._blocks[entry[1]]
        cached = (b for b in self._blocks if b.refcount == 0 and b.name is not None)
        return min(cached, key=lambda block: block.released_at)

    def _is_current(self, entry: tuple[int, int]) -> bool:
        released_at, block_id = entry
        block = self._blocks[block_id]
        leaf = block.name is not None and not block.children
        return leaf and block.refcount == 0 and block.released_at == released_at

    def _forget(self, top: Block, why: Reason) -> None:
        """Take the names from a block and all below it, children first; free the unowned."""
        for block in reversed(self._below(top)):
            assert block.name is not None and not block.children
            del self._named[block.name]
            self._record(Removed(block.name))
            block.name = None
            if block.parent is not None:
                parent = self._blocks[block.parent]
                parent.children.remove(block.block_id)
                block.parent = None
                self._offer(parent)
            if block.refcount == 0:
                self._num_cached -= 1
                self._free.append(block.block_id)
                self._post(Account.CACHED, Account.FREE, why, (block.block_id,))

    def _below(self, top: Block) -> list[Block]:
        """`top` and every block whose name hangs under it, parents first."""
        blocks = [top]
        for block in blocks:
            blocks += [self._blocks[child] for child in sorted(block.children)]
        return blocks

    def _shelve(self, block: Block) -> None:
        if block.name is None:
            self._free.append(block.block_id)
            self._post(Account.IN_USE, Account.FREE, Reason.RELEASED, (block.block_id,))
            return
        self._post(Account.IN_USE, Account.CACHED, Reason.KEPT, (block.block_id,))
        self._num_cached += 1
        self._num_releases += 1
        block.released_at = self._num_releases
        self._offer(block)

    def _offer(self, block: Block) -> None:
        """Make a cached leaf evictable."""
        if block.refcount or block.children or block.name is None:
            return
        heapq.heappush(self._leaves, (block.released_at, block.block_id))
        if len(self._leaves) > 2 * self.num_blocks:
            self._leaves = list(set(filter(self._is_current, self._leaves)))
            heapq.heapify(self._leaves)

    def _post(
        self, source: Account, target: Account, reason: Reason, block_ids: Iterable[int]
    ) -> None:
        if self._ledger is not None:
            self._ledger.post_blocks(source, target, reason, block_ids)

    def _record(self, event: BlockEvent) -> None:
        """Note a change; a name that came and went, or went and came, has not changed."""
        pending = self._events.pop(event.name, None)
        if pending is None:
            self._events[event.name] = event
