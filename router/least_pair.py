"""The cheapest pair of a row and a column, without looking at every pair.

A pair costs what its row costs, what its column costs, and something that only the pair knows and
that is never negative. So a sum of row and column is the least that pair can cost, and pairs are
looked at in order of that until none can be cheaper any more. Costs are whole numbers: where they
are equal, the row and then the column that comes first in the argument is taken.
"""

from collections.abc import Callable, Sequence


def least_pair(
    rows: Sequence[int], columns: Sequence[int], extra: Callable[[int, int], int | None]
) -> tuple[int, int, int] | None:
    """(cost, row, column), or None when `extra` is None for every pair: it cannot be used."""
    if not rows or not columns:
        return None
    by_cost = sorted((cost, at) for at, cost in enumerate(columns))
    cheapest_column = by_cost[0][0]
    best: tuple[int, int, int] | None = None
    for row_cost, row in sorted((cost, at) for at, cost in enumerate(rows)):
        if best is not None and (row_cost + cheapest_column, row) > best[:2]:
            if row_cost + cheapest_column > best[0]:
                break
            continue
        for column_cost, column in by_cost:
            bound = (row_cost + column_cost, row, column)
            if best is not None and bound > best:
                break
            more = extra(row, column)
            if more is not None and (best is None or (bound[0] + more, row, column) < best):
                best = (bound[0] + more, row, column)
    return best
