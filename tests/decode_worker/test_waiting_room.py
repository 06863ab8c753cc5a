import asyncio
from typing import cast

import grpc
import pytest

from decode_worker.waiting_room import WaitingRoom
from engine.clock import ManualClock
from engine.engine import Engine
from engine.request import Request
from engine.roster import Reservation
from kvcache.block_pool import OutOfBlocks
from worker.refusal import Refused


class FullEngine:
    """An engine whose pool has room for so many requests, and gets more when told."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.served: list[object] = []

    def reserve(self, request: object) -> object:
        if self.room == 0:
            raise OutOfBlocks("need 2 blocks, 0 available")
        self.room -= 1
        self.served.append(request)
        return f"reservation of {request}"


def make(room: int, max_waiting: int = 2) -> tuple[FullEngine, ManualClock, WaitingRoom]:
    engine, clock = FullEngine(room), ManualClock()
    return engine, clock, WaitingRoom(cast(Engine, engine), clock, max_waiting, max_wait_s=5)


def ask(waiting_room: WaitingRoom, name: str) -> asyncio.Task[Reservation]:
    return asyncio.create_task(waiting_room.reserve(cast(Request, name)))


async def test_with_blocks_to_be_had_nobody_waits() -> None:
    _, _, waiting_room = make(room=1)
    assert cast(str, await ask(waiting_room, "a")) == "reservation of a"


async def test_whoever_came_first_is_served_first() -> None:
    engine, clock, waiting_room = make(room=0)
    tasks = [ask(waiting_room, name) for name in "ab"]
    await clock.run(0.1)
    engine.room = 2
    await clock.run(0.1)
    assert [task.done() for task in tasks] == [True, True]
    assert engine.served == ["a", "b"]
    assert len(waiting_room) == 0


async def test_a_full_line_is_refused_at_once_with_a_hint() -> None:
    _, clock, waiting_room = make(room=0, max_waiting=1)
    first = ask(waiting_room, "a")
    await clock.run(0.1)
    with pytest.raises(Refused, match=r"need 2 blocks|wait for blocks already") as refused:
        await ask(waiting_room, "b")
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.retry_after_s == 1.0
    first.cancel()


async def test_nobody_waits_for_ever() -> None:
    _, clock, waiting_room = make(room=0)
    task = ask(waiting_room, "a")
    await clock.run(5.1)
    with pytest.raises(Refused, match="no blocks within 5 s: need 2 blocks, 0 available"):
        await task
    assert len(waiting_room) == 0


async def test_one_who_leaves_the_line_makes_room_for_the_next() -> None:
    engine, clock, waiting_room = make(room=0)
    first, second = ask(waiting_room, "a"), ask(waiting_room, "b")
    await clock.run(0.1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    engine.room = 1
    await clock.run(0.1)
    assert engine.served == ["b"]
    assert second.done()
