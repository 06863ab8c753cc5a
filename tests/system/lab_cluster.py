"""A cluster of real processes whose nodes are hosts of a lab: hub (Redis, router), p0, p1, d0, d1.

In namespaces each part runs inside its node, and `Doors` carry what the test says into them. Where
nodes are only names, prefill workers start by `proxied_prefill`, which dials decode workers through
the lab's proxies, over the gRPC wire; the links to the hub are then plain loopback.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from decode_worker.settings import DecodeSettings
from engine.clock import MonotonicClock
from kvferry.lab.lab import Kind, Lab, running_lab
from kvferry.lab.namespaces import NamespaceNetwork
from kvferry.lab.netns import in_namespace
from kvferry.lab.redis_in_node import redis_in
from kvferry.lab.topology import parse_topology
from kvferry.launcher import Handle, Part, PartEvent, Role
from kvferry.local_launcher import LocalLauncher, Patience, role_command
from prefill_worker.settings import PrefillSettings
from router.settings import RouterSettings
from tests.system.live_cluster import LiveCluster
from transport.grpc_options import channel_options

PREFILL, DECODE = ("p0", "p1"), ("d0", "d1")
PIECE_BYTES = 65_536
PROXIED = Path(__file__).with_name("proxied_prefill.py")


class Doors:
    """Loopback ports of the host that lead to ports inside nodes."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._servers: list[asyncio.Server] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def into(self, node: str, address: str) -> str:
        """The address, for the test, of what listens at `address` inside the node."""
        network = self._lab.network
        if not isinstance(network, NamespaceNetwork):
            return address
        host, _, port = address.rpartition(":")
        namespace, target = network.namespace(node), (host, int(port))

        def connect() -> socket.socket:
            return socket.create_connection(target, timeout=5)

        async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            try:
                sock = await asyncio.to_thread(in_namespace, namespace, connect)
                far_reader, far_writer = await asyncio.open_connection(sock=sock)
                await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
            except OSError:
                pass  # nobody is there: the caller sees its connection end
            finally:
                writer.close()
                self._calls.discard(task)

        server = await asyncio.start_server(call, "127.0.0.1", 0)
        self._servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in tuple(self._calls):
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(PIECE_BYTES):
            target.write(piece)
            await target.drain()
    target.close()


@asynccontextmanager
async def cluster_in_lab(
    folder: Path, kind: Kind, links: list[str], **changes: Any
) -> AsyncIterator[tuple[LiveCluster, Lab]]:
    """`changes` are settings of all workers. Nothing of it is left, however the block ends."""
    for inside in ("logs", "parts"):
        (folder / inside).mkdir(parents=True, exist_ok=True)
    topology = parse_topology(",".join(("hub", *PREFILL, *DECODE)), links)
    async with AsyncExitStack() as stack:
        lab = await stack.enter_async_context(running_lab(topology, folder / "lab", kind))
        doors = Doors(lab)
        stack.push_async_callback(doors.close)
        redis_url = await stack.enter_async_context(
            redis_in(lab, "hub", folder / "logs" / "redis.log")
        )
        parts = _Parts(lab, folder, redis_url, changes)
        stack.push_async_callback(parts.launcher.stop)
        handles = await parts.start()
        router = await doors.into("hub", handles["router"].info["grpc_address"])
        channel = grpc.aio.insecure_channel(router, options=channel_options())
        stack.push_async_callback(channel.close, None)
        cluster = LiveCluster(router, "", redis_url, "test", handles, parts.events, channel)
        for name in (*PREFILL, *DECODE):
            cluster.admin_addresses[name] = await doors.into(name, handles[name].info["address"])
        await cluster.until_pairs(len(PREFILL) * len(DECODE))
        yield cluster, lab


class _Parts:
    def __init__(self, lab: Lab, folder: Path, redis_url: str, changes: Mapping[str, Any]) -> None:
        self.events: list[PartEvent] = []
        self._lab = lab
        self._shared = {"model": "checksum", "redis_url": redis_url, "key_prefix": "test"}
        self._changes = (
            dict(changes) if lab.kind == "namespaces" else {**changes, "wires": ["grpc"]}
        )
        self._dial_file = folder / "dial.json"
        self.launcher = LocalLauncher(
            folder, self.events.append, MonotonicClock(), Patience(start=120), self._command
        )

    async def start(self) -> dict[str, Handle]:
        """Decode first: where nodes are only names, proxies lead to what listens already."""
        decode = await asyncio.gather(self._start_router(), *map(self._start_decode, DECODE))
        handles = {handle.part.name: handle for handle in decode}
        for source in PREFILL if self._lab.kind == "proxy" else ():
            await self._write_dial_file(source, handles)
        prefill = await asyncio.gather(*map(self._start_prefill, PREFILL))
        return handles | {handle.part.name: handle for handle in prefill}

    def _command(self, part: Part, settings_file: Path, ready_fd: int) -> list[str]:
        command = role_command(part, settings_file, ready_fd)
        node = "hub" if part.role is Role.ROUTER else part.name
        if self._lab.kind == "proxy" and part.role is Role.PREFILL:
            at = command.index("kvferry")
            dial_file = str(self._dial_file.with_suffix(f".{part.name}"))
            command[at - 1 : at + 1] = [str(PROXIED), dial_file]
        return self._lab.command(node, command)

    async def _start_router(self) -> Handle:
        where = {"host": self._lab.host("hub"), "grpc_port": 0, "http_port": 0, "doubt_s": 1.0}
        settings = RouterSettings.model_validate(self._shared | where)
        return await self.launcher.start(Part("router", Role.ROUTER, settings))

    async def _start_decode(self, name: str) -> Handle:
        settings = DecodeSettings.model_validate(self._worker(name))
        return await self.launcher.start(Part(name, Role.DECODE, settings))

    async def _start_prefill(self, name: str) -> Handle:
        settings = PrefillSettings.model_validate(self._worker(name))
        return await self.launcher.start(Part(name, Role.PREFILL, settings))

    def _worker(self, name: str) -> dict[str, Any]:
        return self._shared | {"name": name, "host": self._lab.host(name)} | self._changes

    async def _write_dial_file(self, source: str, handles: Mapping[str, Handle]) -> None:
        """Where a prefill worker finds each decode worker: at the lab's proxy for the two."""
        dial = {}
        for target in DECODE:
            address = handles[target].info["address"]
            host, port = await self._lab.address(source, target, int(address.rpartition(":")[2]))
            dial[address] = f"{host}:{port}"
        self._dial_file.with_suffix(f".{source}").write_text(json.dumps(dial))
