"""uvicorn, on the event loop and the socket that we give it."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol


class HttpServer:
    """Serves `app` until `stop`; `port` is the one it listens on once `start` has returned."""

    def __init__(self, app: Starlette, host: str, port: int, head_timeout_s: float) -> None:
        self._app = app
        self._host = host
        self.port = port
        self._head_timeout_s = head_timeout_s
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises OSError when the port is taken."""
        listener = socket.create_server((self._host, self.port))
        # Each connection has it from its listener; asyncio sets it only where it made the socket
        # itself. Without it a body waits 40 ms for the receipt of its head, as does every token.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            http=partial(_ImpatientProtocol, head_timeout_s=self._head_timeout_s),  # type: ignore[arg-type]
            log_config=None,
            lifespan="off",
            access_log=False,
        )
        self._server = _UnsignalledServer(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http-door")

    async def stop(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await self._task


class _UnsignalledServer(uvicorn.Server):
    """Without its signal handlers: the router has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _ImpatientProtocol(H11Protocol):
    """Hangs up on a client that does not say its headers in time; uvicorn waits for ever."""

    def __init__(self, *arguments: Any, head_timeout_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timeout_s = head_timeout_s
        self._hang_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._mind_the_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._mind_the_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._hang_up is not None:
            self._hang_up.cancel()

    def _mind_the_head(self) -> None:
        """One deadline from the first byte on, or none once the headers are here."""
        waiting = self.conn.their_state is h11.IDLE
        if waiting and self._hang_up is None:
            self._hang_up = self.loop.call_later(self._head_timeout_s, self.transport.close)
        elif not waiting and self._hang_up is not None:
            self._hang_up.cancel()
            self._hang_up = None
