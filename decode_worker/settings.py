"""What a decode worker is told at start."""

from typing import Annotated

from pydantic import Field

from worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """A decode group.

    `max_reserving` requests may wait for blocks at once, each for at most `reserve_wait_s`;
    beyond either the answer is RESOURCE_EXHAUSTED with a retry hint.
    """

    max_reserving: Annotated[int, Field(ge=0)] = 64
    reserve_wait_s: Annotated[float, Field(ge=0, le=600)] = 10.0
