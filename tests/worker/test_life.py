"""Why a life of a worker ends, as its log and its supervisor read it."""

import asyncio
from typing import Any, cast

import pytest

from engine.clock import MonotonicClock
from worker.host import WorkerLost, _Life
from worker.settings import WorkerSettings


class Announces:
    """Until `error`, or until a later life has the name."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def run(self) -> None:
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "p0 was started again elsewhere"),
        (KeyError("b7"), "p0 cannot announce itself: KeyError('b7')"),
    ],
    ids=["fenced", "a mistake"],
)
async def test_a_worker_that_can_announce_itself_no_more_says_why(
    error: Exception | None, reason: str
) -> None:
    nothing = cast(Any, None)
    life = _Life(
        settings=WorkerSettings.model_validate({"name": "p0"}),
        clock=MonotonicClock(),
        engine=nothing,
        ranks=nothing,
        record=nothing,
        announcer=cast(Any, Announces(error)),
        doors=nothing,
        others=(),
        quarantines=nothing,
        over=asyncio.get_running_loop().create_future(),
    )
    with pytest.raises(WorkerLost) as caught:
        await life.serve()
    assert str(caught.value) == reason
    assert caught.value.__cause__ is error
