"""Processes of a benchmark: they say where they are, and end with the block that started them."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvferry.die_with_parent import wrap


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    made = await asyncio.create_subprocess_exec(
        *wrap(command, os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield made
    finally:
        made.kill()
        await made.wait()


async def first_line(made: asyncio.subprocess.Process) -> dict[str, Any]:
    assert made.stdout is not None
    said: dict[str, Any] = json.loads(await made.stdout.readline())
    return said
