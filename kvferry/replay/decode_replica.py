"""A simulated decode worker: a batch that shares one step time, and room for its KV.

All sequences advance by one token a step, so one count of steps serves all: a sequence that joins
at step 100 for 50 tokens is done at step 150. When the batch changes, so does the time of a step.
What is streamed here is not kept as cache.
"""

import asyncio
import heapq
from dataclasses import dataclass, field

from kvferry.replay.speeds import Speeds
from kvferry.replay.trace import Arrival
from prefix_index.index import Load


@dataclass(slots=True)
class DecodeReplica:
    name: str
    num_blocks: int
    block_tokens: int
    unit: int
    speeds: Speeds
    busy_ms: float = 0.0  # with prompts of its own
    num_prompts: int = 0
    _free_blocks: int = -1
    _context_tokens: int = 0
    _steps: float = 0.0
    _since: float = 0.0
    _ends: list[tuple[float, int, asyncio.Event]] = field(default_factory=list)
    _num_joined: int = 0
    _waiting: list[tuple[int, asyncio.Event]] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _queued_tokens: int = 0

    def __post_init__(self) -> None:
        self._free_blocks = self.num_blocks

    async def compute(self, arrival: Arrival) -> float:
        """Compute a whole prompt here; the batch stands still meanwhile. Milliseconds it took."""
        compute_ms = self.speeds.prefill_ms(arrival.num_tokens, 0)
        self._queued_tokens += arrival.num_tokens
        try:
            async with self._turn:
                self._advance()
                self._since += compute_ms / 1000
                self._arm()
                await asyncio.sleep(compute_ms / 1000)
        finally:
            self._queued_tokens -= arrival.num_tokens
        self.busy_ms += compute_ms
        self.num_prompts += 1
        return compute_ms

    async def stream(self, arrival: Arrival) -> None:
        """Wait for room, join the batch, return when the last token is out."""
        need = -(-(arrival.num_tokens + arrival.output_tokens) // self.block_tokens)
        if self._waiting or need > self._free_blocks:
            room = asyncio.Event()
            self._waiting.append((need, room))
            await room.wait()
        else:
            self._free_blocks -= need
        await self._decode(arrival)
        self._free_blocks += need
        while self._waiting and self._waiting[0][0] <= self._free_blocks:
            claim, room = self._waiting.pop(0)
            self._free_blocks -= claim
            room.set()

    async def _decode(self, arrival: Arrival) -> None:
        self._advance()
        self._context_tokens += arrival.num_tokens
        done = asyncio.Event()
        self._num_joined += 1
        end = (self._steps + max(0, arrival.output_tokens - 1), self._num_joined, done)
        heapq.heappush(self._ends, end)
        self._arm()
        await done.wait()
        self._context_tokens -= arrival.num_tokens
        self._arm()

    def load(self) -> Load:
        return Load(
            running=len(self._ends),
            waiting=len(self._waiting),
            queued_tokens=self._queued_tokens // self.unit,
            free_blocks=self._free_blocks,
            total_blocks=self.num_blocks,
            prefill_ms_per_token=self.speeds.prefill_ms_per_token * self.unit,
            decode_step_ms=self._step_ms(),
            draining=False,
        )

    def _step_ms(self) -> float:
        return self.speeds.step_ms(max(1, len(self._ends)), self._context_tokens)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._ends and now > self._since:
            self._steps += (now - self._since) * 1000 / self._step_ms()
        self._since = max(self._since, now)

    def _arm(self) -> None:
        """Wake when the next sequence ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            left_s = max(0.0, self._ends[0][0] - self._steps) * self._step_ms() / 1000
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._since + left_s, self._finish_due)

    def _finish_due(self) -> None:
        self._timer = None
        self._advance()
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            heapq.heappop(self._ends)[2].set()
        self._arm()
