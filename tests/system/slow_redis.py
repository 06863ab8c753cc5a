"""A Redis that takes up to half a second for each command."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis.asyncio

PAUSE_MS = 500


@dataclass(slots=True)
class Pauses:
    count: int = 0


@asynccontextmanager
async def slow_redis(url: str) -> AsyncIterator[Pauses]:
    """One pause after the other, until the end; `count` are over."""
    pauses = Pauses()
    async with redis.asyncio.from_url(url, single_connection_client=True) as admin:

        async def pause_again() -> None:
            while True:  # a pause keeps the next one waiting, as it does every command
                await admin.client_pause(PAUSE_MS)
                await admin.ping()
                pauses.count += 1

        pausing = asyncio.create_task(pause_again())
        try:
            yield pauses
        finally:
            pausing.cancel()
            await asyncio.wait([pausing])
