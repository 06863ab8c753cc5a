"""Other projects' engines over the same bytes, where some Python here has them installed."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.die_with_parent import wrap
from kvferry.errors import CommandError
from kvferry.transfer_bench.pair import ChildHandle

SCRIPT = Path(__file__).with_name("peer.py")
START_S = 30.0


@dataclass(frozen=True, slots=True)
class Peer:
    """Compared with the wires that move bytes the way it does."""

    name: str
    kind: str
    wires: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


PEERS = (
    Peer("mooncake, TCP", "mooncake", ("tcp", "grpc", "gloo")),
    Peer("NIXL, UCX over TCP", "nixl", ("tcp", "grpc", "gloo"), {"UCX_TLS": "tcp"}),
    Peer("NIXL, UCX over shared memory", "nixl", ("shm",), {"UCX_TLS": "shm,self"}),
)


class RunningPeer:
    """Two processes of one peer that have met."""

    def __init__(self, peer: Peer, processes: list[asyncio.subprocess.Process]) -> None:
        self.peer = peer
        self._processes = processes
        self._ends = [ChildHandle(process) for process in processes]
        self._byte = 0

    @classmethod
    async def start(cls, peer: Peer, python: str, num_bytes: int) -> "RunningPeer":
        """Raises CommandError when it is not installed, or does not start."""
        processes = [
            await asyncio.create_subprocess_exec(
                *wrap((python, "-I", str(SCRIPT), peer.kind), os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, **peer.environment},
            )
            for _ in range(2)
        ]
        made = cls(peer, processes)
        try:
            async with asyncio.timeout(START_S):
                there = [await end.ask("start", num_bytes=num_bytes) for end in made._ends]
                for end, other in zip(made._ends, reversed(there), strict=True):
                    await end.ask("meet", other=other)
        except (CommandError, TimeoutError) as error:
            await made.close()
            raise CommandError(f"{peer.name}: {error}") from None
        made._signal(signal.SIGSTOP)
        return made

    async def seconds(self, piece_bytes: int) -> float:
        """One repetition: all bytes, in pieces; the other end has them afterwards."""
        self._byte = self._byte % 255 + 1
        self._signal(signal.SIGCONT)
        try:
            took = float(await self._ends[0].ask("write", byte=self._byte, piece_bytes=piece_bytes))
            if await self._ends[1].ask("byte") != self._byte:
                raise CommandError(f"{self.peer.name} is done, but the bytes are not there")
            return took
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """Between repetitions they stand still: their threads look for work all the time."""
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(number)

    async def close(self) -> None:
        self._signal(signal.SIGCONT)
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                async with asyncio.timeout(3):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def default_python() -> str:
    """Of the environment that `make bench-peers-env` makes, if there is one."""
    made = Path(".venv-peers/transfer/bin/python")
    return str(made.absolute()) if made.exists() else sys.executable
