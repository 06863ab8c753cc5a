"""Real ends, real bytes, a faulty wire, and an audit at the end of each history."""

import pytest

from tests.transport.random_transfers import random_transfers

CHUNK = 10  # histories in one test


@pytest.mark.parametrize(
    ("wire", "first"), [*(("loopback", first) for first in range(0, 40, CHUNK)), ("tcp", 40)]
)
async def test_random_transfers_over_a_faulty_wire_end_whole_or_let_go(
    wire: str, first: int
) -> None:
    ends = [await random_transfers(seed, wire=wire) for seed in range(first, first + CHUNK)]
    assert sum(end.whole + end.failed for end in ends) == 6 * CHUNK
    assert sum(end.whole for end in ends) > CHUNK
    assert sum(end.faults for end in ends) > CHUNK
