"""A step that hangs ends its worker's life: the event loop goes on, so nothing else would notice.

Leases would be renewed, probes answered and requests taken for as long as the process lives.
"""

from typing import Protocol

from engine.clock import Clock

LOOK_EVERY_S = 1.0


class Steps(Protocol):
    """The part of an engine that is watched, and told."""

    @property
    def step_age_s(self) -> float: ...

    def lose(self, reason: str) -> None: ...


async def watch_steps(engine: Steps, limit_s: float, clock: Clock) -> None:
    """Return once a step has lasted longer than that and the engine has failed everything."""
    while True:
        await clock.sleep(LOOK_EVERY_S)
        age_s = engine.step_age_s
        if age_s > limit_s:
            engine.lose(f"a step has lasted {age_s:.0f} s, and step_timeout_s is {limit_s:g}")
            return
