"""The port for operators, apart from the serving port, so that probes need no key.

live     the event loop answers, and no rank is lost and no step has hung; never asks Redis
ready    the model is loaded, all ranks are there, the lease is held, nobody asked to drain
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from worker.errors import CannotStart


@dataclass(frozen=True, slots=True)
class Probe:
    """One answer to "are you well": `reason` says what is missing when `ok` is false."""

    ok: bool
    reason: str = ""


class SystemServer:
    """Serves until `stop`; `address` is known once `start` has returned."""

    def __init__(
        self,
        host: str,
        port: int,
        live: Callable[[], Probe],
        ready: Callable[[], Probe],
        registry: CollectorRegistry,
    ) -> None:
        self._host = host
        self._port = port
        self._live = live
        self._ready = ready
        self._registry = registry
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen. Raises CannotStart, naming the port, when it is taken."""
        try:
            listener = socket.create_server((self._host, self._port))
        except OSError as error:
            raise CannotStart(
                f"cannot listen on {self._host}:{self._port}: stop what listens there, or set "
                "another system_port"
            ) from error
        # Each connection has it from its listener: else a body waits 40 ms for its head's receipt.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address = f"{self._host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(self._app(), log_level="error", lifespan="off")
        self._server = _UnsignalledServer(config)
        self._task = asyncio.create_task(
            self._server.serve(sockets=[listener]), name="system-server"
        )

    async def stop(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/live", lambda request: _answer(self._live())),
                Route("/ready", lambda request: _answer(self._ready())),
                Route("/metrics", self._metrics, methods=["GET", "HEAD"]),
            ]
        )

    def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class _UnsignalledServer(uvicorn.Server):
    """uvicorn, without its signal handlers: the worker has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _answer(probe: Probe) -> Response:
    body = {"ok": probe.ok} | ({} if probe.ok else {"reason": probe.reason})
    return JSONResponse(body, status_code=200 if probe.ok else 503)
