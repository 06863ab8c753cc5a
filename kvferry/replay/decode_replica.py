"""A simulated decode worker: a real pool of blocks, and a batch that shares one step time.

    reserved    its prompt and its answer have blocks promised; those cached here are shared
    bound       the prompt has its blocks: prefill ships into them, or they are computed here
    adopted     the prompt's full blocks are named: whoever begins alike finds them
    streaming   in the batch
    left        the answer's full blocks are named, too, and all stay as cache while there is room

All sequences advance by one token a step, so one count of steps serves all: a sequence that joins
at step 100 for 50 tokens is done at step 150. When the batch changes, so does the time of a step.
"""

import asyncio
import heapq
from dataclasses import dataclass, field
from hashlib import blake2b

from kvcache.block_hash import BlockHash
from kvcache.block_pool import BlockEvent, BlockPool, OutOfBlocks
from kvferry.replay.life import LifeOver
from kvferry.replay.speeds import Speedometer, Speeds
from kvferry.replay.trace import Arrival
from prefix_index.events import index_events
from prefix_index.index import Load


@dataclass(slots=True, eq=False)
class Place:
    """What one request owns here. `number` tells its answer from all others."""

    number: int
    arrival: Arrival
    alone: bool  # its prompt is computed here
    block_ids: list[int] = field(default_factory=list)
    num_promised: int = 0
    cached_blocks: int = 0
    counted: bool = False  # among the reserved


@dataclass(slots=True)
class DecodeReplica:
    """With `keeps_cache` false nothing is ever named, so that all reuse is prefill's."""

    name: str
    pool: BlockPool
    block_tokens: int
    unit: int
    speeds: Speeds
    keeps_cache: bool = True
    busy_ms: float = 0.0  # with prompts of its own
    num_prompts: int = 0
    alive: bool = True
    _num_reserved: int = 0
    _context_tokens: int = 0
    _steps: float = 0.0
    _since: float = 0.0
    _ends: list[tuple[float, int, asyncio.Event]] = field(default_factory=list)
    _num_joined: int = 0
    _waiting: list[tuple[Place, asyncio.Event]] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _died: asyncio.Event = field(default_factory=asyncio.Event)
    _queued_tokens: int = 0
    _speed: Speedometer = field(init=False)

    def __post_init__(self) -> None:
        self._speed = Speedometer(self.speeds.usual_ms_per_token)

    async def reserve(self, number: int, arrival: Arrival, *, alone: bool = False) -> Place:
        """Wait, in order of arrival, for room for all it will ever need. Raises LifeOver."""
        self._live()
        place = Place(number, arrival, alone)
        if self._waiting or not self._promise(place):
            room = asyncio.Event()
            self._waiting.append((place, room))
            try:
                await room.wait()
                self._live()
            except BaseException:
                self.leave(place, whole=False)
                raise
        self._count(place, True)
        return place

    def bind(self, place: Place) -> None:
        """Turn the promise for the prompt into blocks; what came in meanwhile is shared."""
        self._live()
        num_blocks = self._blocks(place.arrival.num_tokens)
        missing = num_blocks - len(place.block_ids)
        self.pool.unpromise(missing)
        place.num_promised -= missing
        place.block_ids += self.pool.share(self._reusable(place)[len(place.block_ids) :])
        place.cached_blocks = len(place.block_ids)
        place.block_ids += self.pool.take(num_blocks - len(place.block_ids))

    def adopt(self, place: Place) -> None:
        """The prompt's KV is here."""
        self._live()
        self._name(place, place.arrival.names)

    async def compute(self, place: Place) -> int:
        """Compute the prompt here, while the batch stands still; tokens found. Raises LifeOver."""
        arrival = place.arrival
        self._queued_tokens += arrival.num_tokens
        try:
            async with self._turn:
                self.bind(place)
                cached_tokens = place.cached_blocks * self.block_tokens
                compute_ms = self.speeds.prefill_ms(arrival.num_tokens, cached_tokens)
                self._advance()
                self._since += compute_ms / 1000
                self._arm()
                await self._spend(compute_ms)
        finally:
            self._queued_tokens -= arrival.num_tokens
        self._speed.learn(compute_ms, arrival.num_tokens - cached_tokens)
        self.busy_ms += compute_ms
        self.num_prompts += 1
        self.adopt(place)
        return cached_tokens

    async def stream(self, place: Place) -> None:
        """Join the batch, return when the last token is out. Raises LifeOver."""
        self._live()
        arrival = place.arrival
        self._advance()
        self._count(place, False)
        self._context_tokens += arrival.num_tokens
        done = asyncio.Event()
        self._num_joined += 1
        end = (self._steps + max(0, arrival.output_tokens - 1), self._num_joined, done)
        heapq.heappush(self._ends, end)
        self._arm()
        await done.wait()
        if not self.alive:
            raise LifeOver(self.name, streaming=True)
        self._context_tokens -= arrival.num_tokens
        self._arm()
        self.leave(place, whole=True)

    def leave(self, place: Place, *, whole: bool) -> None:
        """Give everything back, once; the answer is there when it is `whole`."""
        if not self.alive:
            return
        for waiting in [each for each in self._waiting if each[0] is place]:
            self._waiting.remove(waiting)
        if whole:
            place.block_ids += self.pool.take(place.num_promised, place.num_promised)
            self._name(place, self._all_names(place))
        else:
            self.pool.unpromise(place.num_promised)
            self._count(place, False)
        place.num_promised = 0
        self.pool.release(reversed(place.block_ids))
        place.block_ids = []
        while self._waiting and self._promise(self._waiting[0][0]):
            self._waiting.pop(0)[1].set()

    def fail(self) -> None:
        self.alive = False
        self._died.set()
        for _, room in self._waiting:
            room.set()
        for _, _, done in self._ends:
            done.set()
        self._ends.clear()
        self._arm()

    def load(self) -> Load:
        return Load(
            running=len(self._ends) + self._num_reserved,
            waiting=len(self._waiting),
            queued_tokens=self._queued_tokens // self.unit,
            free_blocks=self.pool.num_available,
            total_blocks=self.pool.num_blocks,
            prefill_ms_per_token=self._speed.ms_per_token * self.unit,
            decode_step_ms=self._step_ms(),
            draining=False,
            step_sequences=max(1, len(self._ends)),
            step_context_tokens=self._context_tokens / self.unit,
            context_tokens=self._context_tokens // self.unit,
            computed_prompts=self.num_prompts,
        )

    def news(self) -> tuple[Load, list[BlockEvent]]:
        """As an announcer wants it."""
        return self.load(), index_events(self.pool.drain_events())

    def resident(self) -> list[BlockEvent]:
        return index_events(self.pool.resident_blocks())

    def _count(self, place: Place, reserved: bool) -> None:
        self._num_reserved += reserved - place.counted
        place.counted = reserved

    def _live(self) -> None:
        if not self.alive:
            raise LifeOver(self.name)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _stored_tokens(self, arrival: Arrival) -> int:
        """Tokens whose KV will be here: the last output token's never is."""
        return arrival.num_tokens + max(0, arrival.output_tokens - 1)

    def _reusable(self, place: Place) -> tuple[BlockHash, ...]:
        """Of a prompt computed here the last token always is."""
        names = place.arrival.names
        return (
            names[: (place.arrival.num_tokens - 1) // self.block_tokens] if place.alone else names
        )

    def _promise(self, place: Place) -> bool:
        try:
            held = self.pool.share(self._reusable(place))
        except OutOfBlocks:
            return False
        missing = self._blocks(self._stored_tokens(place.arrival)) - len(held)
        if missing > self.pool.num_available:
            self.pool.release(reversed(held))
            return False
        self.pool.promise(missing)
        place.block_ids, place.num_promised = held, missing
        return True

    def _name(self, place: Place, names: tuple[BlockHash, ...]) -> None:
        if not self.keeps_cache:
            return
        parent: BlockHash | None = None
        for block_id, name in zip(place.block_ids, names, strict=False):
            self.pool.name(block_id, name, parent)
            parent = name

    def _all_names(self, place: Place) -> tuple[BlockHash, ...]:
        """The prompt's, and those of the full blocks of its answer, which is like no other."""
        names = place.arrival.names
        more = range(len(names), self._stored_tokens(place.arrival) // self.block_tokens)
        return names + tuple(_answer_name(place.number, index) for index in more)

    def _step_ms(self) -> float:
        return self.speeds.step_ms(max(1, len(self._ends)), self._context_tokens)

    async def _spend(self, milliseconds: float) -> None:
        try:
            async with asyncio.timeout(milliseconds / 1000):
                await self._died.wait()
        except TimeoutError:
            return
        raise LifeOver(self.name)

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


def _answer_name(number: int, index: int) -> BlockHash:
    return BlockHash(blake2b(f"answer {number}.{index}".encode(), digest_size=32).digest())
