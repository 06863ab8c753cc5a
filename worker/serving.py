"""One streaming call from the router: the same checks, the same ending, whatever is served."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from worker.admin import Doors
from worker.refusal import Context, Refused, abort


async def serve_call(
    context: Context,
    doors: Doors,
    expected_instance: str,
    instance: str,
    events: AsyncGenerator[Any, None],
) -> None:
    """Write `events` to the caller. A caller who leaves closes them, which lets everything go."""
    try:
        async with aclosing(events):
            _check(doors, expected_instance, instance)
            async for event in events:
                await context.write(event)
    except Refused as refused:
        await abort(context, refused)


def _check(doors: Doors, expected_instance: str, instance: str) -> None:
    if not doors.open:
        raise Refused(grpc.StatusCode.UNAVAILABLE, "this worker is draining")
    if expected_instance != instance:
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"this is instance {instance}, not {expected_instance}: it was started again",
        )
