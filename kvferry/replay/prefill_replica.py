"""A simulated prefill worker: a real pool of blocks, and time instead of arithmetic.

One life ends with `fail`; whoever waits for it then gets `LifeOver`. Prompts run one after another
in the order in which they came, as a worker that has one prompt at a time in its token budget does.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcache.block_hash import BlockHash
from kvcache.block_pool import BlockEvent, BlockPool, OutOfBlocks
from kvferry.replay.life import LifeOver
from kvferry.replay.speeds import Speedometer, Speeds
from kvferry.replay.trace import Arrival
from prefix_index.events import index_events
from prefix_index.index import Load

FULL_POLL_S = 0.005


@dataclass(slots=True)
class Computed:
    """A prompt whose blocks the worker still holds."""

    cached_tokens: int
    compute_ms: float
    block_ids: list[int]


@dataclass(slots=True)
class Fetched:
    """What came from another worker, after the blocks that were here."""

    had_blocks: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    ms: float = 0.0


@dataclass(slots=True)
class PrefillReplica:
    """Tokens it reports are counted in units of `unit` tokens; see `simulation`."""

    name: str
    pool: BlockPool
    block_tokens: int
    unit: int
    speeds: Speeds
    busy_ms: float = 0.0
    num_prompts: int = 0
    alive: bool = True
    _queued_tokens: int = 0
    _num_waiting: int = 0
    _num_running: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _died: asyncio.Event = field(default_factory=asyncio.Event)
    _coming: dict[BlockHash, asyncio.Event] = field(default_factory=dict)  # see `fetch`
    _speed: Speedometer = field(init=False)

    def __post_init__(self) -> None:
        self._speed = Speedometer(self.speeds.usual_ms_per_token)

    async def fetch(self, names: Sequence[BlockHash], holds: Callable[[], int]) -> Fetched:
        """Take what is lacking of these blocks from a worker that holds so many of them, as
        `prefill_worker.borrowing` does: prompts that begin alike wait for one. Raises LifeOver.
        """
        for came in [self._coming[name] for name in names if name in self._coming]:
            await came.wait()
        fetched = Fetched(had_blocks=self.pool.match(names))
        lacking = min(holds(), len(names)) - fetched.had_blocks
        if lacking <= 0 or lacking > self.pool.num_available:
            return fetched
        last = names[fetched.had_blocks + lacking - 1]
        self._coming[last] = asyncio.Event()
        try:
            block_ids = self._owned(names[: fetched.had_blocks], lacking)
        except OutOfBlocks:
            self._coming.pop(last).set()
            return fetched
        try:
            num_bytes = lacking * self.block_tokens * self.speeds.token_bytes
            fetched.ms = self.speeds.fetch_ms(num_bytes)
            await self._pass(fetched.ms)
            if holds() >= fetched.had_blocks + lacking:  # else its life has ended meanwhile
                fetched.num_blocks, fetched.num_bytes = lacking, num_bytes
                self._name(block_ids, names)
        finally:
            self.pool.release(reversed(block_ids))
            self._coming.pop(last).set()
        return fetched

    def _owned(self, held: Sequence[BlockHash], fresh: int) -> list[int]:
        """Blocks of which the first are here. Raises OutOfBlocks, owning nothing."""
        shared = self.pool.share(held)
        try:
            return shared + self.pool.take(fresh)
        except OutOfBlocks:
            self.pool.release(reversed(shared))
            raise

    def _name(self, block_ids: Sequence[int], names: Sequence[BlockHash]) -> None:
        parent: BlockHash | None = None
        for block_id, name in zip(block_ids, names, strict=False):
            self.pool.name(block_id, name, parent)
            parent = name

    async def compute(self, arrival: Arrival) -> Computed:
        """Wait for a turn, reuse what is here, compute the rest. Raises LifeOver."""
        if not self.alive:
            raise LifeOver(self.name)
        self._queued_tokens += arrival.num_tokens
        self._num_waiting += 1
        try:
            async with self._turn:
                return await self._run(arrival)
        finally:
            self._queued_tokens -= arrival.num_tokens
            self._num_waiting -= 1

    async def _run(self, arrival: Arrival) -> Computed:
        held = await self._acquire(arrival)
        cached_tokens = len(held) * self.block_tokens
        fresh = -(-arrival.num_tokens // self.block_tokens) - len(held)
        block_ids = held + self.pool.take(fresh)
        compute_ms = self.speeds.prefill_ms(arrival.num_tokens, cached_tokens)
        self._num_running = 1
        try:
            await self._spend(compute_ms)
        except BaseException:
            self.pool.release(reversed(block_ids))
            raise
        finally:
            self._num_running = 0
        self._speed.learn(compute_ms, arrival.num_tokens - cached_tokens)
        self._name(block_ids, arrival.names)
        return Computed(cached_tokens, compute_ms, block_ids)

    async def _acquire(self, arrival: Arrival) -> list[int]:
        """The reusable blocks, once there is room for the rest as well."""
        reusable = arrival.names[: (arrival.num_tokens - 1) // self.block_tokens]
        num_blocks = -(-arrival.num_tokens // self.block_tokens)
        while self.alive:
            try:
                held = self.pool.share(reusable)
            except OutOfBlocks:
                held = []
            else:
                if num_blocks - len(held) <= self.pool.num_available:
                    return held
            self.pool.release(reversed(held))
            await asyncio.sleep(FULL_POLL_S)
        raise LifeOver(self.name)

    async def _spend(self, milliseconds: float) -> None:
        await self._pass(milliseconds)
        self.busy_ms += milliseconds
        self.num_prompts += 1

    async def _pass(self, milliseconds: float) -> None:
        """Raises LifeOver when this life ends first."""
        try:
            async with asyncio.timeout(milliseconds / 1000):
                await self._died.wait()
        except TimeoutError:
            return
        raise LifeOver(self.name)

    def release(self, computed: Computed) -> None:
        """What was shipped need not be held any more; it stays as cache."""
        self.pool.release(reversed(computed.block_ids))

    def fail(self) -> None:
        self.alive = False
        self._died.set()

    def load(self) -> Load:
        return Load(
            running=self._num_running,
            waiting=self._num_waiting - self._num_running,
            queued_tokens=self._queued_tokens // self.unit,
            free_blocks=self.pool.num_available,
            total_blocks=self.pool.num_blocks,
            prefill_ms_per_token=self._speed.ms_per_token * self.unit,
            decode_step_ms=0.0,
            draining=False,
            computed_prompts=self.num_prompts,
        )

    def news(self) -> tuple[Load, list[BlockEvent]]:
        """As an announcer wants it."""
        return self.load(), index_events(self.pool.drain_events())

    def resident(self) -> list[BlockEvent]:
        return index_events(self.pool.resident_blocks())
