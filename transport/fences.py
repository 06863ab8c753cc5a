"""Waiting for threads that read or write blocks, whoever cancels the waiting."""

import asyncio
from collections.abc import Iterable
from typing import Any


async def ended(jobs: "Iterable[asyncio.Future[Any]]") -> None:
    """Returns when all are done. Cancelled meanwhile, it raises CancelledError only then."""
    jobs, cancelled = list(jobs), False
    while running := [job for job in jobs if not job.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
