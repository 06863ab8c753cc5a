"""The router's life, from its settings to the last answer.

opening   the model's words and fingerprint are read, the index is read once, both doors open
serving   ready as soon as one decode replica is live
leaving   no new requests; those inside may finish for `drain_s`; then everything is closed
"""

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc.aio

from engine.clock import Clock, MonotonicClock
from model.source import open_model
from prefix_index.index import IndexUnavailable
from prefix_index.mirror import Mirror
from prefix_index.redis_index import RedisIndex
from router.callers import Callers
from router.entrance import Bounds
from router.errors import CannotStart
from router.fleet import Fleet
from router.generation import Handler
from router.grpc_door import GrpcDoor
from router.http_door import HttpDoor, HttpOptions
from router.http_server import HttpServer
from router.journal import journal
from router.line import Line
from router.metrics import Metrics
from router.mirror_metrics import watch_mirror
from router.public_prompts import PublicPrompts
from router.register import Register
from router.served_model import ServedModel
from router.settings import RouterSettings
from router.validation import Validator
from router.walls import Walls
from router.ways import Weights
from transport.grpc_options import channel_options

READY_EVERY_S = 0.1
INDEX_WAIT_S = 5.0  # for a Redis that starts beside us
INDEX_RETRY_S = 0.2
GRACE_S = 1.0  # for answers on their way out
BYTES_PER_PROMPT_BYTE = 4  # of a message: JSON escapes, token ids written out, other fields

OnReady = Callable[[dict[str, Any]], None]


async def run(settings: RouterSettings, on_ready: OnReady) -> None:
    """Serve until cancelled or SIGTERM. Raises CannotStart or BadModelFile, one sentence each.

    `on_ready` is called once, when both doors are open, with their addresses.
    """
    model = await asyncio.to_thread(
        lambda: ServedModel.of(open_model(settings.model), settings.served_name)
    )
    async with serving(settings, model) as info:
        with _sigterm() as stopped:
            on_ready(info)
            await stopped.wait()


@asynccontextmanager
async def serving(settings: RouterSettings, model: ServedModel) -> AsyncIterator[dict[str, Any]]:
    """A router that serves inside the block, and has left when the block ends."""
    router = _assemble(settings, model)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(router.index.close)
        await _reach(router.mirror, router.clock)
        stack.push_async_callback(router.fleet.close)
        stack.push_async_callback(router.grpc_door.stop, GRACE_S)
        await _listen(router.grpc_door.start, "gRPC", settings.host, settings.grpc_port)
        stack.push_async_callback(router.http.stop)
        await _listen(router.http.start, "HTTP", settings.host, settings.http_port)
        await stack.enter_async_context(
            _running(router.mirror.run(), router.fleet.run(), router.tell_readiness())
        )
        stack.push_async_callback(router.leave, settings.drain_s)
        yield router.info(settings.host, model.name)


@dataclass(frozen=True, slots=True)
class _Router:
    """What has to be opened, followed and closed."""

    clock: Clock
    index: RedisIndex
    mirror: Mirror
    fleet: Fleet
    register: Register
    grpc_door: GrpcDoor
    http: HttpServer
    missing: Callable[[], str]

    async def tell_readiness(self) -> None:
        """Keep the health service current until cancelled."""
        while True:
            await self.grpc_door.set_ready(not self.missing())
            await self.clock.sleep(READY_EVERY_S)

    async def leave(self, drain_s: float) -> None:
        await self.grpc_door.set_ready(False)
        await self.register.drain(drain_s)

    def info(self, host: str, model: str) -> dict[str, Any]:
        grpc_address = f"{host}:{self.grpc_door.port}"
        http_url = f"http://{host}:{self.http.port}"
        return {
            "grpc_address": grpc_address,
            "http_url": http_url,
            "grpc_port": self.grpc_door.port,
            "http_port": self.http.port,
            "model": model,
            "summary": f"gRPC {grpc_address}, HTTP {http_url}, model {model}",
        }


def _assemble(settings: RouterSettings, model: ServedModel) -> _Router:
    """Every part in its place; nothing is open yet."""
    clock, log = MonotonicClock(), journal(sys.stderr)
    index = _index(settings, clock)
    mirror = Mirror(index, clock)
    fleet = Fleet(mirror, model.unfit, _connect, clock, log, settings.doubt_s)
    bounds = Bounds(
        request_timeout_s=settings.request_timeout_s,
        admission_wait_s=settings.admission_wait_s,
        max_pair_attempts=settings.max_pair_attempts,
        max_queue_s=settings.max_queue_s,
        max_wait_s=settings.max_wait_s,
    )
    line = Line(clock, settings.max_waiting, settings.tenant_weights)
    register = Register(settings.max_concurrent_requests, bounds.retry_after_s, clock)
    metrics = Metrics(model.name)
    metrics.watch(fleet, lambda: register.num_open)
    metrics.watch_departures(fleet, clock)
    watch_mirror(metrics.registry, mirror)
    validator = Validator(
        model,
        lambda: fleet.max_context(model.max_context),
        settings.max_prompt_bytes,
        seed=lambda: secrets.randbits(63),
        public=PublicPrompts.of(model, settings.public_prompts),
    )
    metrics.watch_line(line)
    walls = Walls() if len(set(settings.api_keys.values())) > 1 else None
    handler = Handler(
        model,
        validator,
        fleet,
        register,
        metrics,
        clock,
        log,
        bounds,
        line,
        Weights(fetches=settings.fetch_blocks),
        walls,
        afterwards=lambda work: asyncio.get_running_loop().call_soon(work),
    )
    callers = Callers(settings.api_keys)

    def missing() -> str:
        return "the router is stopping" if register.draining else fleet.whats_missing()

    max_bytes = settings.max_prompt_bytes * BYTES_PER_PROMPT_BYTE
    options = HttpOptions(max_bytes, settings.body_timeout_s, _version(), time.time)
    door = HttpDoor(handler, callers, metrics.registry, missing, options)
    grpc_door = GrpcDoor(
        handler,
        callers,
        settings.host,
        settings.grpc_port,
        max_requests=settings.max_concurrent_requests,
        max_message_bytes=max_bytes,
    )
    http = HttpServer(door.app, settings.host, settings.http_port, settings.body_timeout_s)
    return _Router(clock, index, mirror, fleet, register, grpc_door, http, missing)


def _index(settings: RouterSettings, clock: Clock) -> RedisIndex:
    try:
        return RedisIndex(settings.redis_url, clock, prefix=settings.key_prefix)
    except ValueError as error:
        raise CannotStart(f"the Redis URL cannot be used: {error}") from error


def _connect(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options())


async def _reach(mirror: Mirror, clock: Clock) -> None:
    """Read the index for the first time. Later on, its loss is survived."""
    give_up = clock.now() + INDEX_WAIT_S
    while True:
        try:
            return await mirror.step()
        except IndexUnavailable as error:
            if clock.now() >= give_up:
                raise CannotStart(
                    f"{error}: start a Redis there, or name another one with --redis-url"
                ) from error
        await clock.sleep(INDEX_RETRY_S)


async def _listen(start: Callable[[], Awaitable[None]], what: str, host: str, port: int) -> None:
    try:
        await start()
    except OSError as error:
        reason = error.strerror or "it is taken"
        raise CannotStart(
            f"the {what} port {port} of {host} cannot be used ({reason}): stop what listens there,"
            f" or choose another one with --{what.lower()}-port"
        ) from error


@asynccontextmanager
async def _running(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _sigterm() -> Iterator[asyncio.Event]:
    """An event that SIGTERM sets, unless somebody else already handles it or no thread may."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        if ours:
            loop.add_signal_handler(signal.SIGTERM, stopped.set)
    except (ValueError, RuntimeError):  # not the main thread: only cancellation ends us
        ours = False
    try:
        yield stopped
    finally:
        if ours:
            loop.remove_signal_handler(signal.SIGTERM)


def _version() -> str:
    try:
        return version("kvferry")
    except PackageNotFoundError:
        return "0"
