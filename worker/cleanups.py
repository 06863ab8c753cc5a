"""Work that must end even when the call that owes it has been cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger()


class Cleanups:
    """Runs letting-go to its end. A cancelled caller leaves at once; the work goes on, counted."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    async def drain(self) -> None:
        """Wait for what still runs."""
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("cleanup failed", work=task.get_name(), exc_info=task.exception())
