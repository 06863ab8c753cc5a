"""The time a transport goes by, whoever provides it."""

from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never goes backwards; only differences mean anything."""

    async def sleep(self, seconds: float) -> None: ...
