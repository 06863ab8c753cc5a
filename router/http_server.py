"""uvicorn, on the event loop and the socket that we give it."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette


class HttpServer:
    """Serves `app` until `stop`; `port` is the one it listens on once `start` has returned."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self.port = port
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises OSError when the port is taken."""
        listener = socket.create_server((self._host, self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(self._app, log_config=None, lifespan="off", access_log=False)
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
