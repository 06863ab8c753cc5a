"""Which lives hold which block, for the longest prefix of all of them in one walk.

A life is a worker's name and epoch. A retired life is credited with nothing from that moment on;
what it leaves behind is swept out later, a bounded number of entries at a time.

`PlainTable` is the definition, in Python; `compact_table` does the same in less memory and time.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvcache.block_pool import BlockEvent, Stored, Tier


class Life(NamedTuple):
    worker: str
    epoch: int


class Run(NamedTuple):
    """Of a prompt, from its first block on without a gap; some of it perhaps not near at hand."""

    num_blocks: int
    num_in_host: int


class PrefixTable(Protocol):
    """Of one worker at most one life is credited at a time."""

    @property
    def num_blocks(self) -> int:
        """Different blocks held by anyone, or not yet swept."""

    @property
    def num_entries(self) -> int:
        """Blocks of every credited life, added up."""

    def __contains__(self, life: Life) -> bool: ...

    def begin(self, life: Life) -> None:
        """Credit `life` from now on; it holds nothing yet."""

    def apply(self, life: Life, events: Sequence[BlockEvent]) -> tuple[int, int]:
        """In order. Sums, modulo 2**128, of the names it gained and of those it lost."""

    def retire(self, life: Life) -> None:
        """Credit `life` no longer. Costs nothing now; `sweep` does the work."""

    def sweep(self, max_blocks: int) -> bool:
        """Forget up to `max_blocks` entries of retired lives; whether any are left."""

    def entries(self, life: Life) -> list[Stored]:
        """What it holds, in no order."""

    def longest(self, names: Sequence[bytes]) -> dict[str, Run]:
        """For each worker whose life holds the first of `names`: how far it goes on."""

    def check(self) -> None:
        """Raise if the two directions of the table disagree."""


class PlainTable:
    """Dictionaries and sets, one bit a life."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}  # block name -> the bits of the lives that hold it
        self._entries: dict[Life, dict[bytes, Stored]] = {}
        self._bits: dict[Life, int] = {}
        self._retired: list[tuple[int, list[bytes]]] = []
        self._free_bits: list[int] = []
        self._num_bits = 0

    def __contains__(self, life: Life) -> bool:
        return life in self._bits

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    @property
    def num_entries(self) -> int:
        return sum(map(len, self._entries.values()))

    def begin(self, life: Life) -> None:
        self.retire(life)
        if not self._free_bits:
            self._free_bits.append(1 << self._num_bits)
            self._num_bits += 1
        self._bits[life] = self._free_bits.pop()
        self._entries[life] = {}

    def apply(self, life: Life, events: Sequence[BlockEvent]) -> tuple[int, int]:
        held, bit = self._entries[life], self._bits[life]
        gained = lost = 0
        for event in events:
            name = event.name
            if isinstance(event, Stored):
                if name not in held:
                    self._holders[name] = self._holders.get(name, 0) | bit
                    gained += int.from_bytes(name, "little")
                held[name] = Stored(name, None, event.depth, event.tier)
            elif name in held:
                del held[name]
                self._let_go(name, bit)
                lost += int.from_bytes(name, "little")
        return gained % 2**128, lost % 2**128

    def retire(self, life: Life) -> None:
        if life in self._bits:
            self._retired.append((self._bits.pop(life), list(self._entries.pop(life))))

    def sweep(self, max_blocks: int) -> bool:
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

    def entries(self, life: Life) -> list[Stored]:
        return list(self._entries[life].values())

    def longest(self, names: Sequence[bytes]) -> dict[str, Run]:
        first = self._holders.get(names[0], 0) if names else 0
        lives = {life: bit for life, bit in self._bits.items() if bit & first}
        still = sum(lives.values())
        depths = dict.fromkeys(lives, len(names))
        for depth, name in enumerate(names):
            holders = self._holders.get(name, 0) & still
            if holders != still:
                for life, bit in lives.items():
                    if still & bit and not holders & bit:
                        depths[life] = depth
                still = holders
                if not still:
                    break
        return {
            life.worker: Run(depth, self._num_in_host(life, names[:depth]))
            for life, depth in depths.items()
        }

    def check(self) -> None:
        entries = [(self._bits[life], name) for life, of in self._entries.items() for name in of]
        entries += [(bit, name) for bit, names in self._retired for name in names]
        holders: dict[bytes, int] = {}
        for bit, name in entries:
            assert not holders.get(name, 0) & bit, "one bit holds a block twice"
            holders[name] = holders.get(name, 0) | bit
        assert holders == self._holders
        taken = [*self._bits.values(), *(bit for bit, _ in self._retired), *self._free_bits]
        assert sum(taken) == (1 << self._num_bits) - 1 and len(taken) == self._num_bits

    def _num_in_host(self, life: Life, names: Iterable[bytes]) -> int:
        held = self._entries[life]
        return sum(held[name].tier is Tier.HOST for name in names)

    def _let_go(self, name: bytes, bit: int) -> None:
        left = self._holders[name] & ~bit
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]
