"""The seam between what a lab does and what its nodes and links are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.lab.lane import Counts
from kvferry.lab.topology import Shape


@dataclass(frozen=True, slots=True)
class Condition:
    """What one direction of a link is like at the moment."""

    shape: Shape
    is_cut: bool = False


class Network(Protocol):
    def host(self, node: str) -> str:
        """The address that processes of this node listen on."""

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        """The command line, for this machine, that runs `command` inside the node."""

    async def address(self, source: str, target: str, port: int) -> tuple[str, int]:
        """Where a process of `source` connects to reach what listens on `port` of `target`."""

    async def apply(self, source: str, target: str, condition: Condition) -> None:
        """Make this direction so, for what enters from now on. Raises CommandError."""

    async def counts(self, source: str, target: str) -> Counts | None:
        """What this direction has carried, where the link counts."""
