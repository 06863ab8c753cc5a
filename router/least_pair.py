"""The cheapest pair of a row and a column, without looking at every pair.

A pair costs what its row costs, what its column costs, and something that only the pair knows: no
less than what the column needs beyond what the row hides, and never negative. So a least cost of
each pair is known beforehand: rows are gone through by their own cost, the columns of each by the
least cost of the pair, until none can be cheaper any more. Costs are whole numbers: where they are
equal, the row and then the column that comes first in the argument is taken.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Row(NamedTuple):
    cost: int
    hides: int = 0


class Column(NamedTuple):
    cost: int
    needs: int = 0


def least_pair(
    rows: Sequence[Row],
    columns: Sequence[Column],
    extra: Callable[[int, int], int],
    usable: Callable[[int, int], bool],
) -> tuple[int, int, int] | None:
    """(cost, row, column), or None when no pair is usable, which is only asked of few."""
    if not rows or not columns:
        return None
    orders: dict[int, list[tuple[int, int]]] = {}  # rows that hide as much see columns alike

    def order(hides: int) -> list[tuple[int, int]]:
        if hides not in orders:
            costs = ((cost + max(0, needs - hides), at) for at, (cost, needs) in enumerate(columns))
            orders[hides] = sorted(costs)
        return orders[hides]

    best: tuple[int, int, int] | None = None
    cheapest = min(column.cost for column in columns)
    for cost, row in sorted((row.cost, at) for at, row in enumerate(rows)):
        if best is not None and cost + cheapest > best[0]:
            break
        for least, column in order(rows[row].hides):
            if best is not None and (cost + least, row, column) > best:
                break
            found = (cost + columns[column].cost + extra(row, column), row, column)
            if (best is None or found < best) and usable(row, column):
                best = found
    return best
