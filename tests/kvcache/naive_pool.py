"""The block pool as one would write it without a care for speed: what `BlockPool` must equal."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.block_hash import BlockHash


@dataclass
class Entry:
    block_id: int
    parent: BlockHash | None
    released_at: int = 0


class NaivePool:
    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.owners = dict.fromkeys(range(num_blocks), 0)
        self.names: dict[BlockHash, Entry] = {}
        self.clock = 0

    def cached(self) -> dict[BlockHash, Entry]:
        return {n: e for n, e in self.names.items() if not self.owners[e.block_id]}

    def available(self) -> int:
        return len(self.free) + len(self.cached())

    def num_cached_of(self, names: Iterable[BlockHash]) -> int:
        return len(self.cached().keys() & set(names))

    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            if not self.free:
                self.evict()
            block_id = self.free.pop(0)
            self.owners[block_id] = 1
            taken.append(block_id)
        return taken

    def evict(self) -> None:
        cached = self.cached()
        parents = {entry.parent for entry in self.names.values()}
        leaves = {name: e for name, e in cached.items() if name not in parents}
        oldest = min(leaves or cached, key=lambda name: cached[name].released_at)
        self.forget(oldest)

    def forget(self, name: BlockHash) -> None:
        for child in sorted(
            (n for n, e in self.names.items() if e.parent == name),
            key=lambda n: self.names[n].block_id,
        ):
            self.forget(child)
        entry = self.names.pop(name)
        if not self.owners[entry.block_id]:
            self.free.append(entry.block_id)

    def share(self, names: Iterable[BlockHash]) -> list[int]:
        shared = []
        for name in names:
            if name not in self.names:
                break
            block_id = self.names[name].block_id
            self.owners[block_id] += 1
            shared.append(block_id)
        return shared

    def name(self, block_id: int, name: BlockHash, parent: BlockHash | None) -> None:
        if name not in self.names and (parent is None or parent in self.names):
            self.names[name] = Entry(block_id, parent)

    def name_of(self, block_id: int) -> BlockHash | None:
        return next((n for n, e in self.names.items() if e.block_id == block_id), None)

    def release(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.owners[block_id] -= 1
            if self.owners[block_id]:
                continue
            name = self.name_of(block_id)
            if name is None:
                self.free.append(block_id)
            else:
                self.clock += 1
                self.names[name].released_at = self.clock

    def writable(self, block_id: int) -> tuple[int, bool]:
        if self.owners[block_id] == 1 and self.name_of(block_id) is None:
            return block_id, False
        (fresh,) = self.take(1)
        self.release([block_id])
        return fresh, True
