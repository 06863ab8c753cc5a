"""A Redis, a crowd of workers around it, and a router's mirror, fleet and decision right here."""

import asyncio
import io
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc.aio

from engine.clock import MonotonicClock
from kvcache.block_hash import BlockHash
from kvferry.die_with_parent import wrap
from kvferry.index_bench.prompts import PROMPT_TOKENS, Size
from kvferry.redis_server import redis_server
from prefix_index.mirror import Mirror
from prefix_index.redis_index import RedisIndex
from router.fleet import Fleet
from router.journal import journal
from router.policy import choose
from router.snapshot import Asked
from router.ways import Decision

POLL_S = 0.02


class CrowdProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self.pid = process.pid

    def tell(self, command: str) -> None:
        self._stdin.write(f"{command}\n".encode())

    async def hear(self) -> dict[str, Any]:
        line = await self._stdout.readline()
        assert line, "the crowd has ended"
        heard: dict[str, Any] = json.loads(line)
        return heard


@asynccontextmanager
async def crowd(url: str, size: Size) -> AsyncIterator[CrowdProcess]:
    command = (sys.executable, "-P", "-m", "kvferry.index_bench.crowd")
    process = await asyncio.create_subprocess_exec(
        *wrap((*command, url, str(size.num_workers), str(size.num_blocks)), os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield CrowdProcess(process)
    finally:
        process.kill()
        await process.wait()


@dataclass(frozen=True, slots=True)
class Stage:
    url: str
    redis_pid: int
    size: Size
    crowd: CrowdProcess
    announced_s: float  # all blocks, by all workers, for the first time

    @asynccontextmanager
    async def mirror(self) -> AsyncIterator[Mirror]:
        """One more router's, empty at first."""
        clock = MonotonicClock()
        index = RedisIndex(self.url, clock, timeout_s=10.0)
        mirror = Mirror(index, clock)
        following = asyncio.create_task(mirror.run())
        try:
            yield mirror
        finally:
            following.cancel()
            await asyncio.wait([following])
            await index.close()

    async def until_whole(self, mirror: Mirror) -> None:
        while mirror.num_blocks < self.size.num_blocks or len(mirror.workers()) < (
            self.size.num_workers
        ):
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def stage(size: Size) -> AsyncIterator[Stage]:
    """Ready when all workers have announced all they hold."""
    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "redis.log"
        async with redis_server("", log_file, MonotonicClock()) as redis:
            assert redis.pid is not None
            async with crowd(redis.url, size) as workers:
                announced = await workers.hear()
                yield Stage(redis.url, redis.pid, size, workers, announced["announced_s"])


class _Channel:
    """Nothing is called over it."""

    async def close(self, _grace: float | None) -> None:
        pass


def fleet_of(mirror: Mirror) -> Fleet:
    return Fleet(
        mirror,
        lambda _manifest: "",
        lambda _address: cast(grpc.aio.Channel, _Channel()),
        MonotonicClock(),
        journal(io.StringIO()),
    )


def decision(fleet: Fleet, names: Callable[..., Sequence[BlockHash]], key: bytes) -> Decision:
    """As the router's handler decides: a snapshot of the fleet, and the policy's choice."""
    snapshot = fleet.snapshot(Asked(PROMPT_TOKENS, key, max_tokens=256), names)
    return choose(snapshot.prompt, snapshot.replicas)
