"""The search finds what looking at every pair would find, and looks at few."""

from hypothesis import given
from hypothesis import strategies as st

from router.least_pair import Column, Row, least_pair

ROWS = st.lists(st.builds(Row, st.integers(0, 20), st.integers(0, 9)), max_size=7)
COLUMNS = st.lists(st.builds(Column, st.integers(0, 20), st.integers(0, 9)), max_size=7)
PAIRS = st.tuples(st.integers(0, 6), st.integers(0, 6))


def anything(_row: int, _column: int) -> bool:
    return True


@given(ROWS, COLUMNS, st.dictionaries(PAIRS, st.integers(0, 9)), st.sets(PAIRS, max_size=30))
def test_it_is_the_least_of_all_pairs_and_the_first_of_equal_ones(
    rows: list[Row],
    columns: list[Column],
    extras: dict[tuple[int, int], int],
    unusable: set[tuple[int, int]],
) -> None:
    def extra(row: int, column: int) -> int:
        more = extras.get((row, column), 0)
        return max(0, columns[column].needs - rows[row].hides + more)

    def usable(row: int, column: int) -> bool:
        return (row, column) not in unusable

    every = [
        (rows[row].cost + columns[column].cost + extra(row, column), row, column)
        for row in range(len(rows))
        for column in range(len(columns))
        if usable(row, column)
    ]
    assert least_pair(rows, columns, extra, usable) == min(every, default=None)


def test_where_all_pairs_cost_the_same_one_is_looked_at() -> None:
    seen: list[tuple[int, int]] = []

    def extra(row: int, column: int) -> int:
        seen.append((row, column))
        return 4

    found = least_pair([Row(5, 2)] * 100, [Column(7, 6)] * 100, extra, anything)
    assert found == (16, 0, 0)
    assert seen == [(0, 0)]


def test_what_a_row_hides_and_a_column_needs_spares_looking_at_the_rest() -> None:
    """Each row holds back the next one's compute; one column holds the prompt and needs nothing."""
    seen: list[tuple[int, int]] = []
    rows = [Row(10 * at, 100) for at in range(50)]
    columns = [*(Column(at, 900) for at in range(49)), Column(500, 0)]

    def extra(row: int, column: int) -> int:
        seen.append((row, column))
        return max(0, columns[column].needs - rows[row].hides)

    assert least_pair(rows, columns, extra, anything) == (500, 0, 49)
    assert seen == [(0, 49)]
