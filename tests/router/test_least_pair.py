"""The search finds what looking at every pair would find, and looks at few."""

from hypothesis import given
from hypothesis import strategies as st

from router.least_pair import least_pair

costs = st.lists(st.integers(0, 20), max_size=7)


@given(
    costs,
    costs,
    st.dictionaries(st.tuples(st.integers(0, 6), st.integers(0, 6)), st.integers(0, 9)),
    st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30),
)
def test_it_is_the_least_of_all_pairs_and_the_first_of_equal_ones(
    rows: list[int],
    columns: list[int],
    extras: dict[tuple[int, int], int],
    unusable: set[tuple[int, int]],
) -> None:
    def extra(row: int, column: int) -> int | None:
        return None if (row, column) in unusable else extras.get((row, column), 0)

    every = [
        (rows[row] + columns[column] + more, row, column)
        for row in range(len(rows))
        for column in range(len(columns))
        if (more := extra(row, column)) is not None
    ]
    assert least_pair(rows, columns, extra) == min(every, default=None)


def test_where_all_pairs_cost_the_same_one_is_looked_at() -> None:
    seen: list[tuple[int, int]] = []

    def extra(row: int, column: int) -> int:
        seen.append((row, column))
        return 0

    assert least_pair([5] * 100, [7] * 100, extra) == (12, 0, 0)
    assert seen == [(0, 0)]
