"""A share of every campaign; `make test-campaigns` runs them in full."""

import pytest

from tests.system.campaigns import CAMPAIGNS
from transport.faults import DAMAGES

SHARE = 1 / 20
SMALL_SHARE = 1 / 50  # of those that would take longest
SEED = 1


@pytest.mark.parametrize("name", CAMPAIGNS)
async def test_a_share_of_the_campaign_holds(name: str) -> None:
    run, whole = CAMPAIGNS[name]
    count, done = round(whole * (SMALL_SHARE if whole == 10_000 else SHARE)), 0

    def step(more: int) -> None:
        nonlocal done
        done += more

    outcome = await run(count, SEED, step)
    assert not outcome.broken, f"{outcome.broken}; {outcome.figures}"
    assert outcome.done >= count
    assert done >= count


def test_all_five_kinds_of_damage_together_are_10_000_cells() -> None:
    kinds = [whole for name, (_, whole) in CAMPAIGNS.items() if name.endswith(" cells")]
    assert (len(kinds), sum(kinds)) == (len(DAMAGES), 10_000)
