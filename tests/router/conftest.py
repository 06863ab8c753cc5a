from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.router.fakes import FakeCluster, FakeWorker
from tests.router.fleet_bench import Bench


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


@pytest.fixture
async def cluster(stack: AsyncExitStack) -> FakeCluster:
    """A router and an index; the test adds its workers."""
    return FakeCluster(stack)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
async def pair(cluster: FakeCluster) -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    """Workers that must never hear of any request of these tests."""
    pair = await cluster.add_pair()
    yield pair
    for worker in pair:
        assert worker.requests == []
    assert cluster.register.num_open == 0
