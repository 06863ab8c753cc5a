"""Open-loop load: every request leaves when it is due, whatever became of those before it.

Latency counts from when a request was due, so what the client itself was late by is in it, and a
cluster that stalls cannot hide behind a client that waits for it. (Who sends the next request only
after the last answer measures only the times at which the cluster happened to be quick:
coordinated omission.) How late the client was is reported besides.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from engine.clock import Clock
from kvferry.serve_bench.doors import Door, Refused, Usage
from kvferry.serve_bench.workload import Ask

OK = "OK"
SHORT = "SHORT_ANSWER"  # the stream ended well with fewer tokens than it was asked for
STOPPED = "STOPPED"  # by us


@dataclass(slots=True)
class Reply:
    """What became of one request. Times are since it was due."""

    number: int
    tenant: str
    at_s: float
    prompt_tokens: int
    code: str = STOPPED
    message: str = ""
    late_ms: float = 0.0
    ttft_ms: float = 0.0
    last_token_ms: float = 0.0
    total_ms: float = 0.0
    num_tokens: int = 0
    worst_pause_ms: float = 0.0  # between two pieces of the answer
    usage: Usage | None = None

    @property
    def tpot_ms(self) -> float:
        """For each token after the first."""
        return (self.last_token_ms - self.ttft_ms) / max(1, self.num_tokens - 1)


@dataclass(slots=True)
class Load:
    """Runs once. `replies` is complete, whatever ended the run."""

    door: Door
    clock: Clock
    timeout_s: float
    on_end: Callable[[Reply], None] = lambda reply: None
    replies: list[Reply] = field(default_factory=list)
    started_at: float = 0.0

    async def run(self, asks: Iterable[Ask]) -> None:
        """`asks` come in order of time, each made just before it is due."""
        tasks: set[asyncio.Task[None]] = set()
        self.started_at = self.clock.now()
        try:
            for ask in asks:
                due = self.started_at + ask.at_s
                await self.clock.sleep(max(0.0, due - self.clock.now()))
                reply = Reply(ask.number, ask.tenant, ask.at_s, len(ask.prompt))
                self.replies.append(reply)
                tasks.add(asyncio.create_task(self._send(ask, reply, due)))
                await self.clock.sleep(0)  # it leaves before the next one is made
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, ask: Ask, reply: Reply, due: float) -> None:
        reply.late_ms = self._since_ms(due)
        try:
            await self._listen(ask, reply, due)
            reply.code = OK if reply.num_tokens == ask.max_tokens else SHORT
        except Refused as failure:
            reply.code, reply.message = failure.code, str(failure)
        finally:
            reply.total_ms = self._since_ms(due)
            self.on_end(reply)

    async def _listen(self, ask: Ask, reply: Reply, due: float) -> None:
        async with aclosing(self.door.stream(ask, self.timeout_s)) as pieces:
            async for piece in pieces:
                reply.usage = piece.usage or reply.usage
                if not piece.num_tokens:
                    continue
                now_ms = self._since_ms(due)
                if reply.num_tokens:
                    reply.worst_pause_ms = max(reply.worst_pause_ms, now_ms - reply.last_token_ms)
                else:
                    reply.ttft_ms = now_ms
                reply.last_token_ms = now_ms
                reply.num_tokens += piece.num_tokens

    def _since_ms(self, due: float) -> float:
        return (self.clock.now() - due) * 1000
