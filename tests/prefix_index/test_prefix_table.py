"""The table answers as plain sets would, whatever has happened to it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefix_index.prefix_table import Life, PrefixTable
from tests.prefix_index.samples import block, blocks, walk

LIVES = [Life(name, epoch) for name in ("w0", "w1", "w2") for epoch in (1, 2)]
NUMBERS = st.integers(0, 7)


def test_a_retired_life_is_credited_no_more_though_nothing_is_swept_yet() -> None:
    table = PrefixTable()
    old, new = Life("w0", 1), Life("w0", 2)
    table.begin(old, blocks([1, 2, 3]))
    table.retire(old)
    table.begin(new)
    assert table.longest(blocks([1, 2, 3]), [new]) == {"w0": 0}
    assert table.num_blocks == 3
    assert table.sweep(2) is True
    assert table.num_blocks == 1
    assert table.sweep(2) is False
    assert table.num_blocks == 0


def test_lives_end_at_different_depths() -> None:
    table = PrefixTable()
    lives = [Life(f"w{i}", 1) for i in range(4)]
    for number, life in enumerate(lives):
        table.begin(life, blocks(range(number)))
    assert table.longest(blocks(range(3)), lives) == {"w0": 0, "w1": 1, "w2": 2, "w3": 3}


class TableAgainstSets(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.table = PrefixTable()
        self.sets: dict[Life, set[bytes]] = {}

    @rule(life=st.sampled_from(LIVES), numbers=st.lists(NUMBERS))
    def begin(self, life: Life, numbers: list[int]) -> None:
        self.table.begin(life, blocks(numbers))
        self.sets[life] = set(blocks(numbers))

    @rule(life=st.sampled_from(LIVES), number=NUMBERS)
    def add(self, life: Life, number: int) -> None:
        if life in self.sets:
            assert self.table.add(life, block(number)) == (block(number) not in self.sets[life])
            self.sets[life].add(block(number))

    @rule(life=st.sampled_from(LIVES), number=NUMBERS)
    def discard(self, life: Life, number: int) -> None:
        if life in self.sets:
            assert self.table.discard(life, block(number)) == (block(number) in self.sets[life])
            self.sets[life].discard(block(number))

    @rule(life=st.sampled_from(LIVES))
    def retire(self, life: Life) -> None:
        self.table.retire(life)
        self.sets.pop(life, None)

    @rule(max_blocks=st.integers(1, 9))
    def sweep(self, max_blocks: int) -> None:
        self.table.sweep(max_blocks)

    @invariant()
    def answers_as_sets_would(self) -> None:
        self.table.check()
        names = blocks(range(8))
        for epoch in (1, 2):
            lives = [life for life in self.sets if life.epoch == epoch]
            expected = {life.worker: walk(names, self.sets[life]) for life in lives}
            assert self.table.longest(names, lives) == expected


TestTableAgainstSets = TableAgainstSets.TestCase
TestTableAgainstSets.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
