"""A cluster of real processes for tests: a real Redis, a router, workers of any TP side by side."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from decode_worker.settings import DecodeSettings
from engine.clock import MonotonicClock
from kvferry.launcher import Handle, Launcher, Part, PartEvent, Role
from kvferry.local_launcher import LocalLauncher, Patience
from kvferry.ray_launcher import RayLauncher
from kvferry.redis_server import redis_server
from prefill_worker.settings import PrefillSettings
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.settings import RouterSettings
from transport.grpc_options import channel_options

Changes = Mapping[str, Any]


@dataclass(slots=True)
class Reply:
    """One whole answer, by choice."""

    started: pb.Started = field(default_factory=pb.Started)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finished: dict[int, pb.Finished] = field(default_factory=dict)
    logprobs: dict[int, list[pb.TokenLogprobs]] = field(default_factory=dict)
    usage: pb.Usage = field(default_factory=pb.Usage)

    @property
    def output(self) -> list[int]:
        return self.tokens.get(0, [])

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    def take(self, response: pb.GenerateResponse) -> None:
        if response.HasField("started"):
            self.started = response.started
        if response.HasField("delta"):
            delta = response.delta
            tokens = self.tokens.setdefault(delta.choice, [])
            if delta.token_ids:
                assert delta.index == len(tokens), "the stream repeats or skips a token"
            tokens += delta.token_ids
            self.texts[delta.choice] = self.texts.get(delta.choice, "") + delta.text
            self.logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
        if response.HasField("finished"):
            assert response.finished.choice not in self.finished
            self.finished[response.finished.choice] = response.finished
        if response.HasField("usage"):
            self.usage = response.usage


@dataclass(slots=True)
class LiveCluster:
    grpc_address: str
    http_url: str
    redis_url: str
    key_prefix: str
    handles: dict[str, Handle]
    events: list[PartEvent]
    channel: grpc.aio.Channel
    admin_addresses: dict[str, str] = field(default_factory=dict)  # where they are not announced

    @property
    def stub(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self.channel)

    async def generate(
        self,
        prompt: str | list[int],
        pins: pb.Pins | None = None,
        timeout_s: float = 120,
        request_id: str = "",
        **sampling: Any,
    ) -> Reply:
        """Raises AioRpcError when the stream ends otherwise than OK."""
        reply = Reply()
        async for response in self.stream(prompt, pins, timeout_s, request_id, **sampling):
            reply.take(response)
        return reply

    def stream(
        self,
        prompt: str | list[int],
        pins: pb.Pins | None = None,
        timeout_s: float = 120,
        request_id: str = "",
        **sampling: Any,
    ) -> Any:
        request = pb.GenerateRequest(
            request_id=request_id, sampling=pb.SamplingParams(**sampling), pins=pins
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return self.stub.Generate(request, timeout=timeout_s)

    async def inspect(self, name: str) -> worker_pb2.InspectResponse:
        """A worker's books, checked there; raises AioRpcError when they do not balance."""
        async with self._admin(name) as stub:
            answer: worker_pb2.InspectResponse = await stub.Inspect(
                worker_pb2.InspectRequest(), timeout=10
            )
            return answer

    async def flush(self) -> None:
        """Empty the caches of all workers."""
        for name in self.workers:
            async with self._admin(name) as stub:
                await stub.FlushCache(worker_pb2.FlushCacheRequest(), timeout=10)

    @property
    def workers(self) -> list[str]:
        return [name for name in self.handles if name != "router"]

    @asynccontextmanager
    async def _admin(self, name: str) -> AsyncIterator[Any]:
        address = self.admin_addresses.get(name) or self.handles[name].info["address"]
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            yield worker_pb2_grpc.WorkerAdminStub(channel)

    async def settled(self, timeout_s: float = 10) -> dict[str, worker_pb2.InspectResponse]:
        """Wait until no worker holds anything for anybody."""
        async with asyncio.timeout(timeout_s):
            while True:
                books = {name: await self.inspect(name) for name in self.workers}
                if all(_is_idle(book) for book in books.values()):
                    return books
                await asyncio.sleep(0.05)

    async def until_alive(self, name: str, pid_was: int | None, timeout_s: float = 60) -> None:
        """Wait for the next life of a part."""
        async with asyncio.timeout(timeout_s):
            while not self.handles[name].alive or self.handles[name].pid == pid_was:
                await asyncio.sleep(0.05)

    async def until_pairs(self, count: int, timeout_s: float = 30) -> None:
        """Wait until the router sees so many usable pairs."""
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
        seen: Any = None
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    seen = (await self.stub.Explain(request)).explanation.candidates
                    if sum(bool(pair.prefill) and not pair.refused for pair in seen) >= count:
                        return
                except grpc.aio.AioRpcError as error:
                    seen = error
                await asyncio.sleep(0.1)


def _is_idle(book: worker_pb2.InspectResponse) -> bool:
    busy = book.waiting_requests + book.running_requests + book.held_requests
    return not busy + book.open_transfers + book.pool.used_blocks + book.pool.promised_blocks


@asynccontextmanager
async def live_cluster(
    folder: Path,
    model: str,
    prefill: Mapping[str, Changes],
    decode: Mapping[str, Changes],
    router: Changes | None = None,
    key_prefix: str = "test",
    ray: bool = False,
) -> AsyncIterator[LiveCluster]:
    """Start everything, wait until the router can use every pair, stop everything.

    With `ray`, prefill workers are Ray actors; else they are plain processes like the rest.
    """
    clock, events = MonotonicClock(), list[PartEvent]()
    for inside in ("logs", "parts"):
        (folder / inside).mkdir(parents=True, exist_ok=True)
    async with redis_server("", folder / "logs" / "redis.log", clock) as redis:
        shared = {"model": model, "redis_url": redis.url, "key_prefix": key_prefix}
        doors = {"grpc_port": free_port(), "http_port": free_port()}
        settings = RouterSettings.model_validate(shared | doors | dict(router or {}))
        parts = [Part("router", Role.ROUTER, settings)]
        for name, changes in prefill.items():
            worker = PrefillSettings.model_validate(shared | {"name": name} | dict(changes))
            parts.append(Part(name, Role.PREFILL, worker))
        for name, changes in decode.items():
            group = DecodeSettings.model_validate(shared | {"name": name} | dict(changes))
            parts.append(Part(name, Role.DECODE, group))
        patience = Patience(start=120)
        local = LocalLauncher(folder, events.append, clock, patience)
        launcher: Launcher = local
        if ray:
            launcher = RayLauncher(len(prefill), local, events.append, clock, patience)
        address = f"127.0.0.1:{settings.grpc_port}"
        channel = grpc.aio.insecure_channel(address, options=channel_options())
        try:
            handles = await asyncio.gather(*(launcher.start(part) for part in parts))
            named = {handle.part.name: handle for handle in handles}
            http_url = f"http://127.0.0.1:{settings.http_port}"
            cluster = LiveCluster(
                address, http_url, redis.url, key_prefix, dict(named), events, channel
            )
            await cluster.until_pairs(len(prefill) * len(decode))
            yield cluster
        finally:
            await channel.close(None)
            await launcher.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
