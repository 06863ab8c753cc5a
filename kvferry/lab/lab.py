"""A lab and the faults in it, from the moment its names are chosen to the moment nothing is left.

<state_dir>/lab/       mode 0700
  lock                 held for as long as the lab lives
  lab.json             its nodes, written before the first of them is made
  control              a socket: `kvferry lab cut`, `heal`, `loss`, `show`, `address`, `down`

A lab that was killed leaves `lab.json` behind; `down`, or the next `up`, removes what it names.
"""

import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.clock import Clock, MonotonicClock
from kvferry.errors import BadSettings, CommandError, NoCluster
from kvferry.lab.lane import Counts
from kvferry.lab.namespaces import (
    command_in,
    namespace_names,
    namespace_network,
    remove_namespaces,
    why_no_namespaces,
)
from kvferry.lab.netns import FOLDER
from kvferry.lab.network import Condition, Network
from kvferry.lab.proxied import proxy_network
from kvferry.lab.topology import Direction, Topology
from kvferry.state import open_state_dir, write_private

Kind = Literal["namespaces", "proxy"]
ADVICE = "start one with `kvferry lab up --nodes 2 --link 1gbit,5ms`"


def parse_kind(text: str | None) -> Kind | None:
    match text:
        case None | "namespaces" | "proxy":
            return text
    raise BadSettings(f"{text!r} is no kind of lab: namespaces or proxy")


class LabRecord(BaseModel):
    model_config = ConfigDict(frozen=True)

    pid: int
    kind: Kind
    namespaces: dict[str, str]  # of each node; empty where nodes are only names
    nodes: tuple[str, ...]

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` inside the node. Raises CommandError."""
        if node not in self.nodes:
            raise CommandError(f"there is no node {node}: the lab has {', '.join(self.nodes)}")
        return command_in(self.namespaces[node], command) if self.namespaces else list(command)


@dataclass(frozen=True, slots=True)
class LinkReport:
    """One direction of a link at the moment."""

    source: str
    target: str
    condition: Condition
    counts: Counts | None


class Lab:
    """Nodes, links, and what is wrong with them. `network` says where processes run and connect."""

    def __init__(self, kind: Kind, topology: Topology, network: Network) -> None:
        self.kind = kind
        self.topology = topology
        self.network = network
        self._conditions = {
            direction: Condition(topology.shape(*direction)) for direction in topology.directions
        }

    def host(self, node: str) -> str:
        """The address that processes of this node listen on."""
        self._must_know(node)
        return self.network.host(node)

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        """The command line, for this machine, that runs `command` inside the node."""
        self._must_know(node)
        return self.network.command(node, command)

    async def address(self, source: str, target: str, port: int) -> tuple[str, int]:
        """Where a process of `source` connects to reach what listens on `port` of `target`."""
        self._must_know(source, target)
        if source == target:
            return self.network.host(target), port
        return await self.network.address(source, target, port)

    async def cut(self, source: str, target: str, one_way: bool = False) -> None:
        """Nothing arrives any more: neither way, or (`one_way`) only from `source` to `target`."""
        for direction in self._directions(source, target, one_way):
            await self._apply(direction, replace(self._conditions[direction], is_cut=True))

    async def lose(self, source: str, target: str, loss: float, one_way: bool = False) -> None:
        """This share of packets is lost, at random."""
        for direction in self._directions(source, target, one_way):
            now = self._conditions[direction]
            await self._apply(direction, replace(now, shape=replace(now.shape, loss=loss)))

    async def heal(self, source: str | None = None, target: str | None = None) -> None:
        """Make the link between two nodes, those of one, or all of them as they were at first."""
        named = {node for node in (source, target) if node is not None}
        self._must_know(*named)
        for direction in self._conditions:
            if named <= set(direction):
                await self._apply(direction, Condition(self.topology.shape(*direction)))

    async def report(self) -> list[LinkReport]:
        return [
            LinkReport(*direction, condition, await self.network.counts(*direction))
            for direction, condition in self._conditions.items()
        ]

    async def _apply(self, direction: Direction, condition: Condition) -> None:
        if self._conditions[direction] != condition:
            await self.network.apply(*direction, condition)
            self._conditions[direction] = condition

    def _directions(self, source: str, target: str, one_way: bool) -> list[Direction]:
        self._must_know(source, target)
        if source == target:
            raise CommandError(f"{source} has no link to itself")
        return [(source, target)] if one_way else [(source, target), (target, source)]

    def _must_know(self, *nodes: str) -> None:
        for node in nodes:
            if node not in self.topology.nodes:
                known = ", ".join(self.topology.nodes)
                raise CommandError(f"there is no node {node}: the lab has {known}")


@asynccontextmanager
async def running_lab(
    topology: Topology,
    folder: Path,
    kind: Kind | None = None,
    clock: Clock | None = None,
    seed: int = 0,
) -> AsyncIterator[Lab]:
    """Make the lab, hand it over, leave nothing behind. Raises CommandError.

    Without a `kind` it is namespaces where they work. Losses repeat for the same `seed`, except in
    links without delay between namespaces, which the kernel carries.
    """
    clock = clock or MonotonicClock()
    reason = why_no_namespaces()
    if kind == "namespaces" and reason:
        raise CommandError(reason)
    kind = kind or ("proxy" if reason else "namespaces")
    with only_lab(folder):
        await sweep(folder, clock)
        run_name = secrets.token_hex(3)
        names = namespace_names(topology, run_name) if kind == "namespaces" else {}
        record = LabRecord(pid=os.getpid(), kind=kind, namespaces=names, nodes=topology.nodes)
        write_private(folder / "lab.json", record.model_dump_json(indent=2) + "\n")
        try:
            if kind == "namespaces":
                async with namespace_network(topology, run_name, clock, seed) as namespaces:
                    yield Lab(kind, topology, namespaces)
            else:
                async with proxy_network(topology, clock, seed) as proxies:
                    yield Lab(kind, topology, proxies)
        finally:
            if not any((FOLDER / name).exists() for name in names.values()):
                (folder / "lab.json").unlink()


@contextmanager
def only_lab(folder: Path) -> Iterator[None]:
    """Hold the folder. Raises CommandError when a lab already lives there."""
    open_state_dir(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"a lab already runs from {folder}: end it with `kvferry lab down`, or give this "
                "one its own --state-dir"
            ) from None
        yield


def is_held(folder: Path) -> bool:
    """Whether a lab lives there now."""
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def read_record(folder: Path) -> LabRecord:
    """The lab that runs there. Raises NoCluster when none does."""
    record = _find_record(folder) if is_held(folder) else None
    if record is None:
        raise NoCluster(f"no lab is running: {ADVICE}")
    return record


async def sweep(folder: Path, clock: Clock) -> list[str]:
    """Remove what a lab that was killed left behind, and name it. Only while the lock is held."""
    record = _find_record(folder)
    if record is None:
        return []
    names = list(record.namespaces.values())
    if names and (reason := why_no_namespaces()):
        raise CommandError(f"cannot remove what the last lab left: {reason}")
    await remove_namespaces(names, clock)
    (folder / "lab.json").unlink()
    return names


def _find_record(folder: Path) -> LabRecord | None:
    try:
        return LabRecord.model_validate_json((folder / "lab.json").read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise CommandError(f"cannot read {folder}/lab.json ({error})") from None
