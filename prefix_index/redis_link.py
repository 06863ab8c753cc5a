"""One connection to Redis that is either in step with the server or gone.

An exchange writes some commands and reads exactly as many replies, under one deadline. If it ends
in any other way (late, cancelled, cut, garbled) the connection is dropped with whatever the server
may still send on it, so no reply can ever be taken for the answer to a later command. A connection
with an unfinished WATCH is dropped too.

After a failure the next exchanges are refused at once for a while, twice as long each time, so that
a server that hangs is asked now and then by one caller instead of waited for by all of them.

A node of a Redis Cluster that does not have our slot says who has: the next exchange goes there.
When that one fails, the URL's is asked again.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

from redis.asyncio import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, ReadOnlyError, RedisError, ResponseError

from prefix_index.index import Clock, IndexUnavailable

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
MAX_WAITING = 64

Command = tuple[bytes | str | int, ...]
Reply = Any  # bytes, int, None, a list of replies, or a ResponseError as a value
Exchange = Callable[..., Awaitable[list[Reply]]]


class RedisLink:
    """`url` as redis-py takes it: redis://, rediss:// (TLS) or unix://, with user and password."""

    def __init__(self, url: str, clock: Clock, *, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._place = place(url)
        # RESP2 and no CLIENT SETINFO: nothing that Redis 7.0 or a strict ACL would refuse.
        self._connections = ConnectionPool.from_url(
            url,
            protocol=2,
            driver_info=None,
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._home = dict(self._connections.connection_kwargs)
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._watching = False
        self._pause_s = 0.0
        self._retry_at = -math.inf
        self._last_reason = ""

    async def exchange(self, *commands: Command, wait_s: float = 0.0) -> list[Reply]:
        """The replies, in order; an error reply is a value. `wait_s` is added to the deadline.

        Raises IndexUnavailable.
        """
        async with self.session() as session:
            return await session(*commands, wait_s=wait_s)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Exchange]:
        """Several exchanges with nobody's commands in between, as WATCH, MULTI, EXEC need."""
        await self._enter()
        try:
            yield self._exchange
        finally:
            if self._watching:
                await self._drop()
            self._lock.release()

    async def close(self) -> None:
        await self._drop()

    async def _enter(self) -> None:
        if self._num_waiting >= MAX_WAITING:
            raise IndexUnavailable(f"{self._place}: {MAX_WAITING} callers wait for it already")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise IndexUnavailable(f"{self._place}: busy for {self._timeout_s} s") from None
        finally:
            self._num_waiting -= 1

    async def _exchange(self, *commands: Command, wait_s: float = 0.0) -> list[Reply]:
        if not commands:
            return []
        now = self._clock.now()
        if now < self._retry_at:
            raise IndexUnavailable(
                f"{self._place}: {self._last_reason}; next try in {self._retry_at - now:.1f} s"
            )
        self._watching = commands[0][0] == "WATCH"
        in_step = False
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                replies = await self._send_and_read(commands)
            in_step = True
        except (RedisError, OSError, TimeoutError) as error:
            self._follow(error)
            self._trip(str(error) or f"no answer within {self._timeout_s + wait_s:.1f} s")
            raise IndexUnavailable(f"{self._place}: {self._last_reason}") from error
        finally:
            if not in_step:
                await self._drop()
        self._pause_s = 0.0
        return replies

    async def _send_and_read(self, commands: Sequence[Command]) -> list[Reply]:
        if self._connection is None:
            connection = self._connections.make_connection()  # type: ignore[no-untyped-call]
            self._connection = cast(Connection, connection)
            await connection.connect()
        connection = self._connection
        packed = connection.pack_commands(commands)
        await connection.send_packed_command(packed, check_health=False)
        return [await _read(connection) for _ in commands]

    def _follow(self, error: Exception) -> None:
        """Ask where a cluster's node has sent us, or where we began."""
        asked = dict(self._home)
        if isinstance(error, MovedError):
            asked.update(host=error.host or asked.get("host"), port=error.port)
        self._connections.connection_kwargs = asked

    def _trip(self, reason: str) -> None:
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), MAX_PAUSE_S)
        self._retry_at = self._clock.now() + self._pause_s
        self._last_reason = reason

    async def _drop(self) -> None:
        connection, self._connection, self._watching = self._connection, None, False
        if connection is not None:
            await connection.disconnect(nowait=True)


async def _read(connection: Connection) -> Reply:
    try:
        return await connection.read_response()
    except (ReadOnlyError, MovedError):
        raise  # a demoted server, or a cluster's node without our slot: look for another one
    except ResponseError as error:
        return error


def place(url: str) -> str:
    """Where the URL leads, without its secrets."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"Redis at {parts.path}"
    return f"Redis at {parts.hostname or 'localhost'}:{parts.port or 6379}"
