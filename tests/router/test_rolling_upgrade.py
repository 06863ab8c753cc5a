"""A fleet is replaced worker by worker, while it serves, by a build of another protocol."""

import asyncio
from dataclasses import replace

from tests.router.fakes import (
    MANIFEST,
    FakeCluster,
    FakeWorker,
    eventually,
    text_of,
    without_pins,
)

NEXT = replace(MANIFEST, protocol=MANIFEST.protocol + 1)
FLEET = ("prefill-0", "decode-0", "prefill-1", "decode-1")


async def replaced(cluster: FakeCluster, old: FakeWorker) -> FakeWorker:
    """As SIGTERM does: it takes no more, ends what it has, and its next life is another build's."""
    record = old.record
    await cluster.index.heartbeat(old.name, record.epoch, replace(record.load, draining=True), 60.0)
    await cluster.mirror.step()
    cluster.fleet.refresh()
    await eventually(lambda: old.num_open == 0)
    await cluster.leave(old)
    await old.die()
    return await cluster.add(old.name, manifest=NEXT)


async def test_a_rolling_upgrade_fails_no_request_and_pairs_no_two_builds(
    cluster: FakeCluster,
) -> None:
    lives = [await cluster.add(name) for name in FLEET]
    over, served = asyncio.Event(), 0

    async def client() -> None:
        nonlocal served
        while not over.is_set():  # who is drained meanwhile costs an attempt at most
            assert text_of(await cluster.ask(**without_pins())) == "Hello, world"
            served += 1

    async def some_are_served() -> None:
        """All that were asked before the last change, and some that were not."""
        enough = served + 8
        await eventually(lambda: served >= enough or any(each.done() for each in clients))

    clients = [asyncio.create_task(client()) for _ in range(4)]
    await some_are_served()
    for name in FLEET:
        lives.append(await replaced(cluster, cluster.workers[name]))
        await some_are_served()
    over.set()
    await asyncio.gather(*clients)
    builds = {each.record.instance: each.record.manifest.protocol for each in lives}
    pairs = {
        (builds[asked.source.instance], builds[each.record.instance])
        for each in lives
        for asked in each.requests
        if each.name.startswith("decode") and asked.transfer_id
    }
    assert pairs == {(1, 1), (2, 2)}
    await cluster.check()
