"""How the parts of a cluster become processes: one seam, two implementations.

A part goes through these states; each change is told to the reporter.

    STARTING -> READY -> STOPPED
                READY -> DIED -> STARTING      (a new life, after a short wait)
    STARTING -> FAILED                         (its first start: the cluster does not come up)
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from pydantic import BaseModel


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


class PartState(Enum):
    STARTING = "starting"
    READY = "ready"
    DIED = "died"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Part:
    """One process, or one tensor-parallel group of them, to start."""

    name: str
    role: Role
    settings: BaseModel


@dataclass(frozen=True, slots=True)
class PartEvent:
    name: str
    state: PartState
    seconds: float = 0.0  # how long the change took
    text: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)  # what the part says when it is ready


Reporter = Callable[[PartEvent], None]


class Handle(Protocol):
    @property
    def part(self) -> Part: ...

    @property
    def pid(self) -> int | None:
        """The process that a kill would hit; None while there is none."""

    @property
    def alive(self) -> bool:
        """Whether the part is ready and its process runs."""

    @property
    def info(self) -> Mapping[str, Any]:
        """What the part said when it last became ready."""

    async def stop(self) -> None:
        """End the part, giving it the time to finish what it has; never started again."""


class Launcher(Protocol):
    async def start(self, part: Part) -> Handle:
        """Return when the part is ready; it is kept alive from then on. Raises PartFailed."""

    async def stop(self) -> None:
        """End whatever is left and what the launcher itself holds."""


def cause_of_death(status: int) -> str:
    """Of a child process, for people."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
