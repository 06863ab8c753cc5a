"""The prefix table in C: about 40 bytes an entry, and no interpreter on the way of a lookup.

`compact_table.c` is compiled at first use. Where there is no compiler, `open_table` gives a
`PlainTable`, which answers the same.
"""

import ctypes
import functools
import weakref
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

from kernels.compiled import Signatures, loaded
from kvcache.block_hash import INDEX_KEY_BYTES
from kvcache.block_pool import BlockEvent, Stored
from prefix_index.events import EVENT_BYTES, PackedEvents, pack
from prefix_index.prefix_table import Life, PlainTable, PrefixTable, Run

SOURCE = Path(__file__).with_name("compact_table.c")
SIGNATURES: Signatures = {
    "table_new": (c_void_p, ()),
    "table_free": (None, (c_void_p,)),
    "table_num_blocks": (c_uint64, (c_void_p,)),
    "table_bytes": (c_uint64, (c_void_p,)),
    "table_held": (c_uint64, (c_void_p, c_uint32)),
    "table_begin": (c_uint32, (c_void_p,)),
    "table_retire": (None, (c_void_p, c_uint32)),
    "table_sweep": (c_int, (c_void_p, c_int64)),
    "table_apply": (None, (c_void_p, c_uint32, ctypes.c_char_p, c_int64, c_void_p, c_void_p)),
    "table_entries": (None, (c_void_p, c_uint32, c_void_p)),
    "table_longest": (c_uint32, (c_void_p, ctypes.c_char_p, c_uint32, c_void_p, c_void_p)),
    "table_check": (c_int, (c_void_p,)),
}
_Sum = c_uint64 * 2


def open_table() -> PrefixTable:
    library = load()
    return PlainTable() if library is None else CompactTable(library)


class CompactTable:
    """Belongs to one event loop."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._c = library
        self._table = c_void_p(library.table_new())
        if not self._table:
            raise MemoryError("no memory for the prefix table")
        weakref.finalize(self, library.table_free, self._table)
        self._numbers: dict[Life, int] = {}
        self._workers: list[str] = []  # by the number of their lives
        self._runs = (c_uint32 * 0)()
        self._found = (c_uint32 * 0)()
        self._gained, self._lost = _Sum(), _Sum()

    def __contains__(self, life: Life) -> bool:
        return life in self._numbers

    @property
    def num_blocks(self) -> int:
        return int(self._c.table_num_blocks(self._table))

    @property
    def num_entries(self) -> int:
        return sum(self._c.table_held(self._table, each) for each in self._numbers.values())

    @property
    def num_bytes(self) -> int:
        """Memory asked for, without what the allocator adds."""
        return int(self._c.table_bytes(self._table))

    def begin(self, life: Life) -> None:
        self.retire(life)
        number = self._numbers[life] = self._c.table_begin(self._table)
        if number == len(self._workers):
            self._workers.append(life.worker)
            self._runs = (c_uint32 * (2 * len(self._workers)))()
            self._found = (c_uint32 * len(self._workers))()
        self._workers[number] = life.worker

    def apply(self, life: Life, events: Sequence[BlockEvent]) -> tuple[int, int]:
        packed = pack(events)
        self._c.table_apply(
            self._table, self._numbers[life], packed.data, len(packed), self._gained, self._lost
        )
        return _number(self._gained), _number(self._lost)

    def retire(self, life: Life) -> None:
        if life in self._numbers:
            self._c.table_retire(self._table, self._numbers.pop(life))

    def sweep(self, max_blocks: int) -> bool:
        return bool(self._c.table_sweep(self._table, max_blocks))

    def entries(self, life: Life) -> list[Stored]:
        number = self._numbers[life]
        num_bytes = self._c.table_held(self._table, number) * EVENT_BYTES
        data = ctypes.create_string_buffer(num_bytes)
        self._c.table_entries(self._table, number, data)
        events = PackedEvents(data.raw[:num_bytes])
        return [event for event in events if isinstance(event, Stored)]

    def longest(self, names: Sequence[bytes]) -> dict[str, Run]:
        joined, runs, found = b"".join(names), self._runs, self._found
        assert len(joined) == len(names) * INDEX_KEY_BYTES
        count = self._c.table_longest(self._table, joined, len(names), runs, found)
        workers = self._workers
        return {workers[each]: Run(runs[2 * each], runs[2 * each + 1]) for each in found[:count]}

    def check(self) -> None:
        broken = self._c.table_check(self._table)
        assert broken == 0, f"rule {broken} of table_check does not hold"


def _number(words: "ctypes.Array[c_uint64]") -> int:
    return words[0] | words[1] << 64


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled functions, or None where they cannot be had."""
    return loaded(
        SOURCE,
        signatures=SIGNATURES,
        make=lambda library: library,
        otherwise="the prefix table is kept in Python, larger and slower",
        keeps_lock=True,  # the table has none of its own
    )
