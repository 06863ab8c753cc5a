"""What joins two network namespaces: a veth pair shaped by `tc`, or our emulator between two TUNs.

A link with a delay needs the emulator. One without goes through the kernel, much faster, if `nft`
is there to cut it, else through the emulator too.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from kvferry.errors import PartFailed
from kvferry.lab.lane import MIN_QUEUE_S, Counts
from kvferry.lab.network import Condition
from kvferry.lab.topology import Shape
from kvferry.settings import child_environment

COMMAND_TIMEOUT_S = 10.0
VETH_MTU = 9_000
MIN_MTU, MAX_MTU = 1_500, 65_000
PACKET_S = 0.00036  # a packet's time on the line: fewer of them to emulate, and still smooth
MIN_BURST_BYTES = 65_536  # tc needs one offloaded segment to fit
BURST_S = 0.001


@dataclass(frozen=True, slots=True)
class End:
    """One end of a link: a device in a namespace."""

    namespace: str
    device: str


class NodeLink(Protocol):
    mtu: int

    async def start(self) -> None:
        """Make both devices. Raises PartFailed."""

    async def apply(self, way: int, condition: Condition) -> None:
        """Way 0 goes from the first end to the second, way 1 back."""

    async def counts(self, way: int) -> Counts | None: ...

    async def stop(self) -> None:
        """Idempotent. Devices that remain go with their namespace."""


async def run(*command: str, text: str = "") -> str:
    """What a system command prints. Raises PartFailed with what it complains about."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            output, complaint = await process.communicate(text.encode())
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        raise PartFailed(f"`{' '.join(command)}`: {' '.join(complaint.decode().split())}")
    return output.decode()


class KernelLink:
    """A veth pair; `tc tbf` holds the rate, `nft` drops at the receiving end."""

    mtu = VETH_MTU

    def __init__(self, ends: tuple[End, End], shape: Shape) -> None:
        self._ends = ends
        self._shape = shape

    async def start(self) -> None:
        one, other = self._ends
        peer = ("peer", "name", other.device, "netns", other.namespace)
        await run(
            *("ip", "link", "add", "name", one.device, "netns", one.namespace, "type", "veth"),
            *peer,
        )
        for way, end in enumerate(self._ends):
            if self._shape.rate_bits_per_s is not None:
                await run(
                    *("tc", "-n", end.namespace, "qdisc", "add", "dev", end.device), *self._tbf
                )
            if self._shape.loss:
                await self.apply(way, Condition(self._shape))

    @property
    def _tbf(self) -> Sequence[str]:
        rate = self._shape.rate_bits_per_s
        assert rate is not None
        burst = max(int(rate / 8 * BURST_S), MIN_BURST_BYTES)
        latency = f"{MIN_QUEUE_S * 1000:g}ms"
        return (
            *("root", "tbf", "rate", f"{int(rate)}bit"),
            *("burst", f"{burst}b", "latency", latency),
        )

    async def apply(self, way: int, condition: Condition) -> None:
        end = self._ends[1 - way]
        await run(
            *("ip", "netns", "exec", end.namespace, "nft", "-f", "-"),
            text=drop_rules(end.device, condition),
        )

    async def counts(self, way: int) -> Counts | None:
        return None

    async def stop(self) -> None:
        pass


def drop_rules(device: str, condition: Condition) -> str:
    """A table that drops what arrives at `device`, in place of the one before, at one stroke."""
    table = f"kvferry-{device}"
    rules = []
    if condition.is_cut:
        rules.append(f'iifname "{device}" drop')
    elif condition.shape.loss:
        lost = round(condition.shape.loss * 1_000_000)
        rules.append(f'iifname "{device}" numgen random mod 1000000 < {lost} drop')
    lines = [
        f"table ip {table}",
        f"delete table ip {table}",
        f"table ip {table} {{",
        "  chain arriving {",
        "    type filter hook prerouting priority raw",
        *(f"    {rule}" for rule in rules),
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


class EmulatedLink:
    """The process of `kvferry/lab/link_emulator.py`, seen from here."""

    def __init__(self, ends: tuple[End, End], shape: Shape, seed: int) -> None:
        self._ends = ends
        self._shape = shape
        self._seed = seed
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()
        self.mtu = emulated_mtu(shape)

    async def start(self) -> None:
        one, other = self._ends
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "kvferry.lab.link_emulator"),
            *(one.namespace, one.device, other.namespace, other.device),
            *(json.dumps(asdict(self._shape)), str(self._seed)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,
        )
        await self._answer()

    async def apply(self, way: int, condition: Condition) -> None:
        shape = asdict(condition.shape)
        await self._ask({"way": way, "is_cut": condition.is_cut, "shape": shape})

    async def counts(self, way: int) -> Counts | None:
        return Counts(**(await self._ask({}))[way])

    async def stop(self) -> None:
        """Closing its standard input is the word; it has nothing to save."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(2):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _ask(self, request: Mapping[str, Any]) -> Any:
        process = self._running()
        async with self._asking:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            return await self._answer()

    async def _answer(self) -> Any:
        process = self._running()
        assert process.stdout is not None and process.stderr is not None
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            line = await process.stdout.readline()
            if line:
                return json.loads(line)
            complaint = (await process.stderr.read()).decode().strip().splitlines()
        raise PartFailed(f"the emulator of {self._name} ended: {complaint[-1:] or 'no reason'}")

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise PartFailed(f"the emulator of {self._name} is not running")
        return self._process

    @property
    def _name(self) -> str:
        return " - ".join(end.namespace for end in self._ends)


def emulated_mtu(shape: Shape) -> int:
    if shape.rate_bits_per_s is None:
        return MAX_MTU
    return min(max(int(shape.rate_bits_per_s / 8 * PACKET_S), MIN_MTU), MAX_MTU)


def node_link(ends: tuple[End, End], shape: Shape, has_nft: bool, seed: int) -> NodeLink:
    if shape.delay_s > 0 or not has_nft:
        return EmulatedLink(ends, shape, seed)
    return KernelLink(ends, shape)
