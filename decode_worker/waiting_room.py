"""Requests that wait for blocks: first come, first served, bounded in number and in time.

Blocks come back when requests end; nobody tells us, so the head of the line asks again at a short
interval. A request that can never fit is refused at once by the engine.
"""

from collections import deque

import grpc

from engine.clock import Clock
from engine.engine import Engine
from engine.request import Request
from engine.roster import Reservation
from kvcache.block_pool import OutOfBlocks
from worker.refusal import Refused

ASK_AGAIN_S = 0.02


class WaitingRoom:
    def __init__(self, engine: Engine, clock: Clock, max_waiting: int, max_wait_s: float) -> None:
        self._engine = engine
        self._clock = clock
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._line: deque[object] = deque()

    def __len__(self) -> int:
        return len(self._line)

    async def reserve(self, request: Request) -> Reservation:
        """Blocks for the whole prompt; raises Refused (RESOURCE_EXHAUSTED) with a retry hint."""
        if not self._line:
            try:
                return self._engine.reserve(request)
            except OutOfBlocks as error:
                shortage = str(error)
        else:
            shortage = f"{len(self._line)} requests wait for blocks already"
        if len(self._line) >= self._max_waiting:
            raise self._full(shortage)
        ticket = object()
        self._line.append(ticket)
        try:
            return await self._wait(request, ticket)
        finally:
            self._line.remove(ticket)

    async def _wait(self, request: Request, ticket: object) -> Reservation:
        give_up = self._clock.now() + self._max_wait_s
        shortage = "others were first"
        while self._clock.now() < give_up:
            await self._clock.sleep(ASK_AGAIN_S)
            if self._line[0] is not ticket:
                continue
            try:
                return self._engine.reserve(request)
            except OutOfBlocks as error:
                shortage = str(error)
        raise self._full(f"no blocks within {self._max_wait_s:g} s: {shortage}")

    def _full(self, shortage: str) -> Refused:
        return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"decode: {shortage}", retry_after_s=1.0)
