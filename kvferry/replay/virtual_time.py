"""An event loop in which nothing takes time but waiting, and waiting takes none of ours.

When no callback is ready the loop's clock jumps to the next timer. Whatever runs on such a loop is
deterministic: its only order is that of its timers and of what they wake.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EverybodyWaits(RuntimeError):
    """No timer is left and nothing is ready: the program would wait for ever."""


class _Jump(selectors.SelectSelector):
    """Waits by moving the clock. Nothing outside the process is ever waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise EverybodyWaits("nothing is ready and no timer is set")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time starts at 0 and is in seconds."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


class VirtualClock:
    """An `engine.clock.Clock` that reads the loop it is used on."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
