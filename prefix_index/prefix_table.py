"""Which lives hold which block, as one bit a life: the longest prefix of all in one walk.

A life is a worker's name and epoch. A retired life is credited with nothing from that moment on;
its bits are swept out later, a bounded number at a time, and only then is its bit used again.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Life(NamedTuple):
    worker: str
    epoch: int


class PrefixTable:
    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}  # block name -> the bits of the lives that hold it
        self._names: dict[Life, set[bytes]] = {}
        self._bits: dict[Life, int] = {}
        self._retired: list[tuple[int, list[bytes]]] = []
        self._free_bits: list[int] = []
        self._num_bits = 0

    def __contains__(self, life: Life) -> bool:
        return life in self._bits

    @property
    def num_blocks(self) -> int:
        """Different blocks held by anyone, or not yet swept."""
        return len(self._holders)

    def names(self, life: Life) -> frozenset[bytes]:
        return frozenset(self._names[life])

    def begin(self, life: Life, names: Iterable[bytes] = ()) -> None:
        """Start crediting `life` with `names`, and nothing else."""
        self.retire(life)
        if not self._free_bits:
            self._free_bits.append(1 << self._num_bits)
            self._num_bits += 1
        self._bits[life] = bit = self._free_bits.pop()
        self._names[life] = held = set(names)
        holders = self._holders
        for name in held:
            holders[name] = holders.get(name, 0) | bit

    def add(self, life: Life, name: bytes) -> bool:
        """Whether this changed anything."""
        held = self._names[life]
        if name in held:
            return False
        held.add(name)
        self._holders[name] = self._holders.get(name, 0) | self._bits[life]
        return True

    def discard(self, life: Life, name: bytes) -> bool:
        """Whether this changed anything."""
        held = self._names[life]
        if name not in held:
            return False
        held.remove(name)
        self._let_go(name, self._bits[life])
        return True

    def retire(self, life: Life) -> None:
        """Credit `life` no longer. Costs nothing now; `sweep` does the work."""
        if life in self._bits:
            self._retired.append((self._bits.pop(life), list(self._names.pop(life))))

    def sweep(self, max_blocks: int) -> bool:
        """Forget up to `max_blocks` entries of retired lives; whether any are left."""
        while self._retired and max_blocks > 0:
            bit, names = self._retired[-1]
            for name in names[-max_blocks:]:
                self._let_go(name, bit)
            swept = min(max_blocks, len(names))
            del names[len(names) - swept :]
            max_blocks -= swept
            if not names:
                self._retired.pop()
                self._free_bits.append(bit)
        return bool(self._retired)

    def longest(self, names: Sequence[bytes], lives: Iterable[Life]) -> dict[str, int]:
        """For each worker, how many of `names` its life holds without a gap from the first on."""
        bits = [(life.worker, self._bits[life]) for life in lives]
        still = sum(bit for _, bit in bits)
        depths = dict.fromkeys((worker for worker, _ in bits), len(names))
        for depth, name in enumerate(names):
            holders = self._holders.get(name, 0) & still
            if holders != still:
                for worker, bit in bits:
                    if still & bit and not holders & bit:
                        depths[worker] = depth
                still = holders
                if not still:
                    break
        return depths

    def check(self) -> None:
        """Raise if the two directions of the table disagree."""
        entries = [(self._bits[life], name) for life, held in self._names.items() for name in held]
        entries += [(bit, name) for bit, names in self._retired for name in names]
        holders: dict[bytes, int] = {}
        for bit, name in entries:
            assert not holders.get(name, 0) & bit, "one bit holds a block twice"
            holders[name] = holders.get(name, 0) | bit
        assert holders == self._holders
        taken = [*self._bits.values(), *(bit for bit, _ in self._retired), *self._free_bits]
        assert sum(taken) == (1 << self._num_bits) - 1 and len(taken) == self._num_bits

    def _let_go(self, name: bytes, bit: int) -> None:
        left = self._holders[name] & ~bit
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]
