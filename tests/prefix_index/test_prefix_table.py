"""A table answers as plain sets would, whatever has happened to it and however it is made."""

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache.block_hash import BlockHash
from prefix_index.compact_table import CompactTable, load, open_table
from prefix_index.events import pack
from prefix_index.index import BlockEvent, Removed, Stored, Tier, fingerprint
from prefix_index.prefix_table import Life, PlainTable, PrefixTable, Run
from tests.prefix_index.samples import block, blocks, removed, stored, walk

NAMES = ("w0", "w1", "w2")
NUMBERS = st.integers(0, 7)
OLD, NEW = Life("w0", 1), Life("w0", 2)

TABLES = pytest.mark.parametrize("make", [PlainTable, open_table])


def lengths(table: PrefixTable, numbers: range) -> dict[str, int]:
    return {worker: run.num_blocks for worker, run in table.longest(blocks(numbers)).items()}


def test_the_compiler_that_make_needs_gives_the_compact_table() -> None:
    assert isinstance(open_table(), CompactTable)


@TABLES
def test_a_retired_life_is_credited_no_more_though_nothing_is_swept_yet(
    make: Callable[[], PrefixTable],
) -> None:
    table = make()
    table.begin(OLD)
    table.apply(OLD, stored(1, 2, 3))
    table.retire(OLD)
    table.begin(NEW)
    assert lengths(table, range(1, 4)) == {}
    assert (table.num_blocks, table.num_entries) == (3, 0)
    assert table.sweep(2) is True
    assert table.num_blocks == 1
    table.sweep(2)
    assert table.sweep(2) is False
    assert table.num_blocks == 0


@TABLES
def test_lives_end_at_different_depths(make: Callable[[], PrefixTable]) -> None:
    table = make()
    for number in range(4):
        table.begin(Life(f"w{number}", 1))
        table.apply(Life(f"w{number}", 1), stored(*range(number)))
    assert lengths(table, range(3)) == {"w1": 1, "w2": 2, "w3": 3}


@TABLES
def test_a_run_says_how_much_of_it_must_come_from_host_memory(
    make: Callable[[], PrefixTable],
) -> None:
    table = make()
    for name in NAMES[:2]:
        table.begin(Life(name, 1))
        table.apply(Life(name, 1), stored(*range(6)))
    moved = [Stored(block(number), None, number, Tier.HOST) for number in (1, 2, 5)]
    assert table.apply(Life("w1", 1), moved) == (0, 0)
    names = blocks(range(5))
    assert table.longest(names) == {"w0": Run(5, 0), "w1": Run(5, 2)}
    (entry,) = [each for each in table.entries(Life("w1", 1)) if each.name == block(5)]
    assert (entry.depth, entry.tier) == (5, Tier.HOST)
    table.check()


@TABLES
def test_what_events_gain_and_lose_adds_up_to_fingerprints(
    make: Callable[[], PrefixTable],
) -> None:
    """With names of full length, so that sums run over."""
    rng = random.Random(4)
    names = [rng.randbytes(16) for _ in range(300)]
    chain = [Stored(BlockHash(name), None, depth) for depth, name in enumerate(names)]
    table = make()
    table.begin(NEW)
    assert table.apply(NEW, pack(chain)) == (fingerprint(names), 0)
    gone: list[BlockEvent] = [Removed(each.name) for each in chain[100:]]
    assert table.apply(NEW, [*gone, *gone, chain[100]]) == (
        fingerprint([names[100]]),
        fingerprint(names[100:]),
    )
    assert table.longest(names) == {"w0": Run(101, 0)}
    table.check()


@TABLES
def test_a_thousand_lives_come_and_go_and_nothing_is_left(make: Callable[[], PrefixTable]) -> None:
    rng = random.Random(5)
    table, held = make(), dict[str, set[bytes]]()
    for _ in range(1500):
        name, start = f"w{rng.randrange(1000)}", rng.randrange(40)
        life = Life(name, 1)
        if life in table and rng.random() < 0.3:
            table.retire(life)
            del held[name]
        else:
            if life not in table:
                table.begin(life)
                held[name] = set()
            table.apply(life, stored(*range(start, start + 30)))
            table.apply(life, removed(start + 7))
            held[name] |= set(blocks(range(start, start + 30)))
            held[name].discard(block(start + 7))
        table.sweep(16)
    names = blocks(range(20, 60))
    truth = {name: walk(names, of) for name, of in held.items() if walk(names, of)}
    assert {name: run.num_blocks for name, run in table.longest(names).items()} == truth
    table.check()
    for name in held:
        table.retire(Life(name, 1))
    while table.sweep(1000):
        pass
    assert (table.num_blocks, table.num_entries) == (0, 0)
    table.check()


def test_an_entry_costs_at_most_64_bytes() -> None:
    library = load()
    assert library is not None
    rng, table = random.Random(6), CompactTable(library)
    empty_bytes = table.num_bytes
    for number in range(20):
        table.begin(Life(f"w{number}", 1))
    for _ in range(300):
        names = [rng.randbytes(16) for _ in range(256)]
        chain = pack(Stored(BlockHash(name), None, depth) for depth, name in enumerate(names))
        table.apply(Life(f"w{rng.randrange(20)}", 1), chain)
    assert table.num_entries == table.num_blocks == 300 * 256
    assert (table.num_bytes - empty_bytes) / table.num_entries <= 64


class TableAgainstSets(RuleBasedStateMachine):
    def make(self) -> PrefixTable:
        return PlainTable()

    @initialize()
    def start(self) -> None:
        self.table = self.make()
        self.epochs = dict.fromkeys(NAMES, 0)
        self.held: dict[Life, dict[bytes, Tier]] = {}

    @rule(name=st.sampled_from(NAMES), numbers=st.lists(NUMBERS))
    def begin(self, name: str, numbers: list[int]) -> None:
        """A worker has a new life; nothing is credited to the one before it."""
        self.retire(name)
        self.epochs[name] += 1
        life = self.life(name)
        self.table.begin(life)
        self.held[life] = {}
        self.apply(name, [(number, Tier.DEVICE) for number in numbers])

    @rule(
        name=st.sampled_from(NAMES),
        changes=st.lists(st.tuples(NUMBERS, st.sampled_from([None, *Tier])), max_size=12),
    )
    def apply(self, name: str, changes: list[tuple[int, Tier | None]]) -> None:
        life = self.life(name)
        if life not in self.held:
            return
        before = set(self.held[life])
        events: list[BlockEvent] = []
        for number, tier in changes:
            if tier is None:
                events.append(Removed(block(number)))
                self.held[life].pop(block(number), None)
            else:
                events.append(Stored(block(number), None, number, tier))
                self.held[life][block(number)] = tier
        gained, lost = self.table.apply(life, events)
        after = fingerprint(before) + gained - lost
        assert after % 2**128 == fingerprint(self.held[life])

    @rule(name=st.sampled_from(NAMES))
    def retire(self, name: str) -> None:
        self.table.retire(self.life(name))
        self.held.pop(self.life(name), None)

    @rule(max_blocks=st.integers(1, 9))
    def sweep(self, max_blocks: int) -> None:
        self.table.sweep(max_blocks)

    @invariant()
    def answers_as_sets_would(self) -> None:
        self.table.check()
        names = blocks(range(8))
        expected = {}
        for life, held in self.held.items():
            assert {each.name: each.tier for each in self.table.entries(life)} == held
            if length := walk(names, held):
                in_host = sum(held[name] is Tier.HOST for name in names[:length])
                expected[life.worker] = Run(length, in_host)
        assert self.table.longest(names) == expected
        assert self.table.num_entries == sum(map(len, self.held.values()))

    def life(self, name: str) -> Life:
        return Life(name, self.epochs[name])


class CompactAgainstSets(TableAgainstSets):
    def make(self) -> PrefixTable:
        return open_table()


TestPlainTable = TableAgainstSets.TestCase
TestCompactTable = CompactAgainstSets.TestCase
for case in (TestPlainTable, TestCompactTable):
    case.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
