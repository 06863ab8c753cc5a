"""Whatever has happened, once it is over every mirror and the index equal the workers' pools.

A history is any mix of blocks stored and removed, pools flushed, workers killed, restarted and left
behind as zombies, the store wiped, entries damaged, requests and answers lost, and stream entries
lost, repeated, reordered and trimmed away.
"""

import asyncio
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.clock import ManualClock
from prefix_index.announcer import Announcer, AnnouncerState
from prefix_index.index import Changes, Cursor, IndexUnavailable, PrefixIndex
from prefix_index.mirror import Mirror
from prefix_index.redis_index import RedisIndex
from tests.prefix_index.flaky_index import FlakyIndex
from tests.prefix_index.redis_server import RedisServer
from tests.prefix_index.samples import Pool, blocks, walk, worker

NAMES = ("w0", "w1", "w2")
CHAINS = [blocks(range(start, start + 6)) for start in range(0, 24, 3)]


class Fleet:
    """Workers with pools of their own, two routers' mirrors, and one step of any of them."""

    def __init__(self, index: PrefixIndex, clock: ManualClock, rng: Random, lease_s: float) -> None:
        self.index = index
        self.clock = clock
        self.rng = rng
        self.lease_s = lease_s
        self.current: dict[str, tuple[Pool, Announcer]] = {}
        self.zombies: list[Announcer] = []
        self.mirrors = [Mirror(index, clock), Mirror(index, clock)]

    async def restart(self, name: str) -> None:
        if name in self.current:
            self.zombies.append(self.current.pop(name)[1])
        pool, record = Pool(), worker(name, await self.index.next_epoch(name))
        announcer = Announcer(
            self.index, record, pool.source, pool.resident, self.clock, lease_s=self.lease_s
        )
        self.current[name] = (pool, announcer)

    async def kill(self, name: str) -> None:
        self.current.pop(name, None)

    async def store(self, name: str) -> None:
        if name in self.current:
            start = self.rng.randrange(24)
            self.current[name][0].store(*range(start, start + self.rng.randrange(1, 9)))

    async def remove(self, name: str) -> None:
        if name in self.current:
            self.current[name][0].remove(*self.rng.sample(range(32), 6))

    async def flush(self, name: str) -> None:
        if name in self.current:
            self.current[name][0].remove(*range(32))

    async def announce(self, name: str) -> None:
        if name in self.current:
            await self.current[name][1].step()

    async def let_zombies_act(self, _: str) -> None:
        for zombie in self.zombies:
            await zombie.step()

    async def look(self, _: str) -> None:
        for mirror in self.mirrors:
            with suppress(IndexUnavailable):
                await mirror.step()

    async def wait(self, _: str) -> None:
        self.clock.advance(self.rng.choice((0.1, 0.5, 1.1, 6.0)))

    async def settle(self) -> None:
        for _ in range(40):
            for name in list(self.current):
                await self.announce(name)
            await self.let_zombies_act("")
            await self.look("")
            self.clock.advance(0.25)

    async def assert_all_agree(self) -> None:
        for chain in CHAINS:
            truth = {name: walk(chain, pool.names) for name, (pool, _) in self.current.items()}
            assert await self.index.longest(chain) == truth
            for mirror in self.mirrors:
                assert mirror.longest(chain) == truth
        for mirror in self.mirrors:
            listed = {record.name: record.epoch for record in mirror.workers()}
            assert listed == {n: a.record.epoch for n, (_, a) in self.current.items()}
            mirror.check()
        assert all(
            announcer.state is AnnouncerState.INSIDE for _, announcer in self.current.values()
        )
        assert all(
            zombie.state is AnnouncerState.FENCED
            for zombie in self.zombies
            if zombie.record.name in self.current
        )


STEPS = (
    "restart",
    "kill",
    "store",
    "remove",
    "flush",
    "announce",
    "look",
    "let_zombies_act",
    "wait",
)
COMMON = ("store", "store", "remove", "announce", "announce", "look", "look", "wait")


class ImpatientIndex(RedisIndex):
    """Time is the test's own: never wait for a change."""

    async def follow(self, cursor: Cursor, wait_s: float) -> Changes:
        return await super().follow(cursor, 0)


async def play(fleet: Fleet, num_steps: int) -> None:
    for name in NAMES:
        await fleet.restart(name)
    for _ in range(num_steps):
        step = fleet.rng.choice(COMMON if fleet.rng.random() < 0.8 else STEPS)
        await getattr(fleet, step)(fleet.rng.choice(NAMES))


async def history(seed: int, fault_rate: float) -> None:
    clock, rng = ManualClock(), Random(seed)
    index = FlakyIndex(clock, rng, max_changes=rng.choice((2, 8, 4096)))
    fleet = Fleet(index, clock, rng, lease_s=5.0)
    index.fault_rate = fault_rate
    await play(fleet, num_steps=60)
    if rng.random() < 0.3:
        index.wipe()
        await play(fleet, num_steps=10)
    if rng.random() < 0.3:
        await index.doubt("w0", fleet.rng.randrange(4))
    index.fault_rate = 0.0
    await fleet.settle()
    await fleet.assert_all_agree()


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), fault_rate=st.sampled_from((0.0, 0.1, 0.4)))
def test_every_history_ends_in_the_truth(seed: int, fault_rate: float) -> None:
    asyncio.run(history(seed, fault_rate))


@pytest.mark.timed
@pytest.mark.parametrize("hundred", range(10))
async def test_a_thousand_histories_end_in_the_truth(hundred: int) -> None:
    """The same ones each time: every run finds what one has found."""
    for seed in range(100 * hundred, 100 * hundred + 100):
        await history(seed, fault_rate=(0.0, 0.1, 0.4)[seed % 3])


@pytest.mark.parametrize("seed", range(6))
async def test_every_history_over_redis_ends_in_the_truth(server: RedisServer, seed: int) -> None:
    clock, rng = ManualClock(), Random(seed)
    index = ImpatientIndex(server.url, clock, max_changes=rng.choice((2, 8, 4096)))
    fleet = Fleet(index, clock, rng, lease_s=3600.0)
    await play(fleet, num_steps=60)
    with server.admin() as admin:
        if rng.random() < 0.5:
            admin.flushall()
        await play(fleet, num_steps=20)
        for name in set(NAMES) - fleet.current.keys():
            for lease in admin.keys(f"{{kvferry}}:2:lease:{name}:*"):
                admin.delete(lease)
    await fleet.settle()
    await fleet.assert_all_agree()
    await index.close()
