"""The task of each end that ends what nobody else ends."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import structlog

from transport.clock import Clock

log = structlog.get_logger()

T = TypeVar("T")


async def reap(clock: Clock, tick_s: float, tick: Callable[[float], None], rank: str) -> None:
    """Until cancelled, `tick` with the time, every `tick_s`."""
    while True:
        await clock.sleep(tick_s)
        try:
            tick(clock.now())
        except Exception:  # else no lease would end any more, and nobody would know
            log.exception("reaper_failed", rank=rank)


def each(things: Iterable[T], act: Callable[[T], None]) -> None:
    """Act on all of them: one that fails, which is our mistake, keeps no other's lease alive."""
    for thing in list(things):
        try:
            act(thing)
        except Exception:
            log.exception("reaper_failed", at=type(thing).__name__)
