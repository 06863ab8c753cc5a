"""The router's life, from its settings to the last answer.

opening   the model's words and fingerprint are read, the index is followed, both doors open
serving   ready as soon as one decode replica is live
leaving   no new requests; those inside may finish for `drain_s`; then everything is closed
"""

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc.aio

from engine.clock import MonotonicClock
from model.source import open_model
from prefix_index.mirror import Mirror
from prefix_index.redis_index import RedisIndex
from router.callers import Callers
from router.errors import CannotStart
from router.fleet import Fleet
from router.generation import Bounds, Handler
from router.grpc_door import GrpcDoor
from router.http_door import HttpDoor, HttpOptions, HttpServer
from router.journal import journal
from router.metrics import Metrics
from router.register import Register
from router.served_model import ServedModel
from router.settings import RouterSettings
from router.validation import Validator
from transport.grpc_options import channel_options

READY_EVERY_S = 0.1
BODY_BYTES_PER_PROMPT_BYTE = 4  # JSON escapes, and token ids written out

OnReady = Callable[[dict[str, Any]], None]


async def run(settings: RouterSettings, on_ready: OnReady) -> None:
    """Serve until cancelled or SIGTERM. Raises CannotStart, BadModelFile or IndexUnavailable.

    `on_ready` is called once, when both doors are open, with their addresses.
    """
    model = await asyncio.to_thread(lambda: ServedModel.of(open_model(settings.model)))
    async with serving(settings, model) as info:
        with _sigterm() as stopped:
            on_ready(info)
            await stopped.wait()


@asynccontextmanager
async def serving(settings: RouterSettings, model: ServedModel) -> AsyncIterator[dict[str, Any]]:
    """A router that serves inside the block, and has left when the block ends."""
    clock = MonotonicClock()
    log = journal(sys.stderr)
    index = RedisIndex(settings.redis_url, clock, prefix=f"{settings.key_prefix}:")
    mirror = Mirror(index, clock)
    fleet = Fleet(mirror, model.unfit, _connect, clock, log, settings.doubt_s)
    bounds = Bounds(
        request_timeout_s=settings.request_timeout_s,
        admission_wait_s=settings.admission_wait_s,
        max_pair_attempts=settings.max_pair_attempts,
    )
    register = Register(settings.max_concurrent_requests, bounds.retry_after_s, clock)
    metrics = Metrics(model.name)
    metrics.watch(fleet, lambda: register.num_open)
    validator = Validator(
        model,
        lambda: fleet.max_context(model.max_context),
        settings.max_prompt_bytes,
        seed=lambda: secrets.randbits(63),
    )
    handler = Handler(model, validator, fleet, register, metrics, clock, log, bounds)
    callers = Callers(settings.api_keys)

    def missing() -> str:
        return "the router is stopping" if register.draining else fleet.whats_missing()

    grpc_door = GrpcDoor(
        handler, callers, settings.host, settings.grpc_port, settings.max_concurrent_requests
    )
    options = HttpOptions(
        settings.max_prompt_bytes * BODY_BYTES_PER_PROMPT_BYTE, _version(), time.time
    )
    door = HttpDoor(handler, callers, metrics.registry, missing, options)
    http = HttpServer(door.app, settings.host, settings.http_port)

    async def tell_readiness() -> None:
        while True:
            await grpc_door.set_ready(not missing())
            await clock.sleep(READY_EVERY_S)

    try:
        await _listen(grpc_door.start, "gRPC", "--grpc-port", settings.host, settings.grpc_port)
        await _listen(http.start, "HTTP", "--http-port", settings.host, settings.http_port)
        async with _running(mirror.run(), fleet.run(), tell_readiness()):
            try:
                yield {
                    "grpc_address": f"{settings.host}:{grpc_door.port}",
                    "http_url": f"http://{settings.host}:{http.port}",
                    "grpc_port": grpc_door.port,
                    "http_port": http.port,
                    "model": model.name,
                    "summary": f"gRPC {settings.host}:{grpc_door.port},"
                    f" HTTP http://{settings.host}:{http.port}, model {model.name}",
                }
            finally:
                await grpc_door.set_ready(False)
                await register.drain(settings.drain_s)
    finally:
        await http.stop()
        await grpc_door.stop(grace_s=1.0)
        await fleet.close()
        await index.close()


def _connect(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options())


async def _listen(
    start: Callable[[], Coroutine[Any, Any, None]], what: str, flag: str, host: str, port: int
) -> None:
    try:
        await start()
    except OSError as error:
        raise CannotStart(
            f"the {what} port {port} of {host} cannot be used ({error.strerror or 'it is taken'}):"
            f" stop what listens there, or choose another one with {flag}"
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
    """An event that SIGTERM sets; what it did before is put back afterwards."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    before = signal.getsignal(signal.SIGTERM)
    theirs = before not in (signal.SIG_DFL, signal.SIG_IGN, None)
    try:
        if not theirs:
            loop.add_signal_handler(signal.SIGTERM, stopped.set)
    except (ValueError, RuntimeError):  # not the main thread: only cancellation ends us
        theirs = True
    try:
        yield stopped
    finally:
        if not theirs:
            loop.remove_signal_handler(signal.SIGTERM)


def _version() -> str:
    try:
        return version("kvferry")
    except PackageNotFoundError:
        return "0"
