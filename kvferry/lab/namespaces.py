"""Nodes that are network namespaces of this machine: each its own loopback, address and ports.

1  a namespace for each node, named for this run     `kvf-RUN-NODE`
2  a link for each pair                              devices `to-NODE`, made inside the namespaces
3  addresses                                         10.97.0.1, .2, ...; the host has no way in
4  stop: links, whoever still runs inside, namespaces

Nothing is ever made in the host's own network, so runs cannot meet.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from engine.clock import Clock
from kvferry.lab.lane import Counts
from kvferry.lab.links import COMMAND_TIMEOUT_S, End, NodeLink, node_link, run
from kvferry.lab.netns import FOLDER, in_namespace
from kvferry.lab.network import Condition
from kvferry.lab.topology import Topology

OURS = re.compile(r"kvf-[0-9a-f]{6}-[a-z0-9-]+")
INSTALL = "apt-get install iproute2 nftables"
TERM_S = 2.0  # after SIGTERM, before SIGKILL


def why_no_namespaces() -> str | None:
    """The reason, in one sentence with what to do, why nodes cannot be namespaces here.

    Found out by making one, without a trace.
    """
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"network namespaces need {' and '.join(missing)}: install with `{INSTALL}`"
    if os.geteuid() != 0:
        return "network namespaces need root: start it with sudo"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"links with a delay need /dev/net/tun ({error.strerror})"
    return _try_one(f"kvf-{secrets.token_hex(3)}-probe")


def _try_one(name: str) -> str | None:
    for action in ("add", "del"):
        done = subprocess.run(
            ["ip", "netns", action, name],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            complaint = " ".join(done.stderr.split())
            return f"network namespaces do not work here: `ip netns {action}` says {complaint}"
    return None


def why_slow_links(topology: Topology) -> str | None:
    """Said when links that the kernel could carry are emulated."""
    undelayed = any(topology.shape(*pair).delay_s == 0 for pair in topology.pairs)
    if undelayed and shutil.which("nft") is None:
        return f"without nft, links without delay are emulated too: install it with `{INSTALL}`"
    return None


def namespace_names(topology: Topology, run_name: str) -> dict[str, str]:
    """`run_name` is six hexadecimal digits that no other run has."""
    return {node: f"kvf-{run_name}-{node}" for node in topology.nodes}


class NamespaceNetwork:
    def __init__(self, topology: Topology, run_name: str, seed: int) -> None:
        self._names = namespace_names(topology, run_name)
        self._hosts = {node: f"10.97.0.{n}" for n, node in enumerate(topology.nodes, start=1)}
        has_nft = shutil.which("nft") is not None
        self._links: dict[tuple[str, str], NodeLink] = {
            (a, b): node_link(self._ends(a, b), topology.shape(a, b), has_nft, seed + 2 * number)
            for number, (a, b) in enumerate(topology.pairs)
        }

    def _ends(self, a: str, b: str) -> tuple[End, End]:
        return End(self._names[a], f"to-{b}"), End(self._names[b], f"to-{a}")

    def namespace(self, node: str) -> str:
        return self._names[node]

    def host(self, node: str) -> str:
        return self._hosts[node]

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        return command_in(self._names[node], command)

    async def address(self, source: str, target: str, port: int) -> tuple[str, int]:
        return self._hosts[target], port

    async def apply(self, source: str, target: str, condition: Condition) -> None:
        link, way = self._find(source, target)
        await link.apply(way, condition)

    async def counts(self, source: str, target: str) -> Counts | None:
        link, way = self._find(source, target)
        return await link.counts(way)

    async def start(self) -> None:
        """Raises PartFailed."""
        for name in self._names.values():
            await run("ip", "netns", "add", name)
            in_namespace(name, _like_most_hosts)
            await run("ip", "-n", name, "link", "set", "lo", "up")
        for (a, b), link in self._links.items():
            await link.start()
            ends = self._ends(a, b)
            for end, here, there in ((ends[0], a, b), (ends[1], b, a)):
                await self._join(end, self._hosts[here], self._hosts[there], link.mtu)

    async def _join(self, end: End, here: str, there: str, mtu: int) -> None:
        commands = (
            f"addr add {here} peer {there} dev {end.device}\nlink set {end.device} mtu {mtu} up\n"
        )
        await run("ip", "-n", end.namespace, "-batch", "-", text=commands)

    async def stop(self, clock: Clock) -> None:
        try:
            for link in self._links.values():
                await link.stop()
        finally:
            await remove_namespaces(list(self._names.values()), clock)

    def _find(self, source: str, target: str) -> tuple[NodeLink, int]:
        if (source, target) in self._links:
            return self._links[source, target], 0
        return self._links[target, source], 1


@asynccontextmanager
async def namespace_network(
    topology: Topology, run_name: str, clock: Clock, seed: int = 0
) -> AsyncIterator[NamespaceNetwork]:
    """Raises PartFailed."""
    network = NamespaceNetwork(topology, run_name, seed)
    try:
        await network.start()
        yield network
    finally:
        await network.stop(clock)


def command_in(namespace: str, command: Sequence[str]) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


async def remove_namespaces(names: Sequence[str], clock: Clock) -> None:
    """End what runs in them and remove them; those that are gone already are passed over."""
    present = [name for name in names if OURS.fullmatch(name) and (FOLDER / name).exists()]
    for number in (signal.SIGTERM, signal.SIGKILL):
        pids = [pid for name in present for pid in await _pids_in(name)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = clock.now() + TERM_S
        while clock.now() < deadline and any(map(_is_running, pids)):
            await clock.sleep(0.02)
    for name in present:
        await run("ip", "netns", "del", name)


async def _pids_in(name: str) -> list[int]:
    words = (await run("ip", "netns", "pids", name)).split()
    return [int(word) for word in words if int(word) != os.getpid()]


def _is_running(pid: int) -> bool:
    """Whether it still holds a namespace: one that has ended does not, reaped or not."""
    return Path(f"/proc/{pid}/ns/net").exists()


def _like_most_hosts() -> None:
    """Settings of a network namespace that would otherwise be whatever this machine has.

    CUBIC, because BBR takes the moments at which a busy machine runs the emulator for the network.
    No IPv6, because its announcements would be packets that nobody sent.
    """
    net = Path("/proc/sys/net")
    for setting, value in (
        ("ipv4/tcp_congestion_control", "cubic"),
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
    ):
        with contextlib.suppress(OSError):
            (net / setting).write_text(value)
