from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.router.fakes import FakeCluster


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


@pytest.fixture
async def cluster(stack: AsyncExitStack) -> FakeCluster:
    """A router and an index; the test adds its workers."""
    return FakeCluster(stack)
