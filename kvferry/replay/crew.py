"""The simulated workers and what announces them: real announcers, a real index, real mirrors.

start   every worker registers under its first epoch
fail    a worker dies without a word: its lease lapses, its announcer is silent
revive  the next life under the same name registers, empty, under the next epoch
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from engine.clock import Clock
from kvcache.block_pool import BlockEvent, BlockPool
from kvferry.replay.decode_replica import DecodeReplica
from kvferry.replay.options import INDEX, Fault, Options
from kvferry.replay.prefill_replica import PrefillReplica
from kvferry.replay.rivals import Policy
from kvferry.replay.simulated_index import LateNews, SimulatedIndex
from kvferry.replay.trace import NAMESPACE, Trace
from prefix_index.announcer import Announcer
from prefix_index.index import Load, Manifest, Role, WorkerRecord

HEARTBEAT_S = 1.0
LEASE_S = 5.0
# The largest block a worker can have. A trace with larger ones is replayed in units of several
# tokens, so that a trace's block is one block of the index.
MAX_BLOCK_TOKENS = 128


def unit_tokens(trace: Trace) -> int:
    """Tokens that the router is told are one."""
    return max(1, trace.block_tokens // MAX_BLOCK_TOKENS)


class Crew:
    """Belongs to one event loop."""

    def __init__(self, trace: Trace, options: Options, clock: Clock) -> None:
        self._trace = trace
        self._options = options
        self._clock = clock
        self._unit = unit_tokens(trace)
        self.index = SimulatedIndex(clock)
        self._pool: BlockPool | None = None
        if options.policy in (Policy.SHARED_CACHE, Policy.INFINITE_CACHE):
            self._pool = BlockPool(self._shared_blocks())
        self.prefills: dict[str, PrefillReplica] = {}  # by instance: all lives there ever were
        self.decodes: dict[str, DecodeReplica] = {}
        self._living: dict[str, tuple[str, asyncio.Task[None]]] = {}

    async def start(self) -> None:
        for name in (*self._options.prefills, *self._options.decodes):
            await self._begin(name)

    async def stop(self) -> None:
        for _, task in self._living.values():
            task.cancel()
        for _, task in self._living.values():
            with suppress(asyncio.CancelledError):
                await task

    async def suffer(self, fault: Fault) -> None:
        """Let one fault happen when it is due."""
        await self._clock.sleep(fault.at_s)
        if fault.worker == INDEX:
            self.index.lose()
        else:
            self.fail(fault.worker)
        if fault.down_s is None:
            return
        await self._clock.sleep(fault.down_s)
        if fault.worker == INDEX:
            self.index.come_back_empty()
        else:
            await self._begin(fault.worker)

    def fail(self, name: str) -> None:
        if name not in self._living:
            return  # an earlier fault has ended it
        instance, announcing = self._living.pop(name)
        self.replica(instance).fail()
        announcing.cancel()

    def replica(self, instance: str) -> PrefillReplica | DecodeReplica:
        return self.prefills.get(instance) or self.decodes[instance]

    def work_ms(self) -> dict[str, float]:
        """By name, over all lives."""
        work: dict[str, float] = {}
        for instance, replica in self.prefills.items():
            name = instance.partition("/")[0]
            work[name] = work.get(name, 0.0) + replica.busy_ms
        return work

    async def _begin(self, name: str) -> None:
        if name in self._options.prefills:
            await self._begin_prefill(name)
        else:
            await self._begin_decode(name)

    async def _begin_prefill(self, name: str) -> None:
        blocks = self._options.cache_tokens // self._trace.block_tokens
        pool = self._pool or BlockPool(blocks)
        replica = PrefillReplica(
            name, pool, self._trace.block_tokens, self._unit, self._options.speeds
        )
        record = await self._record(name, Role.PREFILL, replica.load())
        self.prefills[record.instance] = replica
        if self._pool is None:
            self._live(record, replica.news, pool, replica.resident)
        else:
            self._live(record, lambda: (replica.load(), []), None, list)

    async def _begin_decode(self, name: str) -> None:
        pool = BlockPool(self._options.decode_tokens // self._trace.block_tokens)
        replica = DecodeReplica(
            name,
            pool,
            self._trace.block_tokens,
            self._unit,
            self._options.speeds,
            self._options.decode_cache,
        )
        record = await self._record(name, Role.DECODE, replica.load())
        self.decodes[record.instance] = replica
        self._live(record, replica.news, pool, replica.resident)

    def _live(
        self,
        record: WorkerRecord,
        source: Callable[[], tuple[Load, Sequence[BlockEvent]]],
        pool: BlockPool | None,
        held: Callable[[], Sequence[BlockEvent]],
    ) -> None:
        def num_new() -> int:
            return pool.num_events if pool else 0

        news = LateNews(source, num_new, self._clock, self._options.index_lag_s)
        announcer = Announcer(
            self.index,
            record,
            source=news,
            resident=held,
            clock=self._clock,
            heartbeat_s=HEARTBEAT_S,
            lease_s=LEASE_S,
        )
        task = asyncio.create_task(_announce(announcer, news, self._clock))
        self._living[record.name] = (record.instance, task)

    async def _record(self, name: str, role: Role, load: Load) -> WorkerRecord:
        epoch = await self.index.next_epoch(name)
        return WorkerRecord(
            name=name,
            role=role,
            instance=f"{name}/{epoch}",
            epoch=epoch,
            address=name,
            system_address="",
            rank_addresses=(name,),
            kv_intervals=((0, 1),),
            manifest=self._manifest(),
            load=load,
        )

    def _manifest(self) -> Manifest:
        """Of a model whose KV of one unit of tokens has as many bytes as the speeds say."""
        token_bytes = self._options.speeds.token_bytes * self._unit
        return Manifest(
            protocol=1,
            model="replay",
            namespace=NAMESPACE.hex(),
            block_size=self._trace.block_tokens // self._unit,
            dtype="float16",
            num_layers=32,
            num_query_heads=1,
            num_kv_heads=1,
            head_dim=token_bytes // (2 * 2 * 32),
            max_context=2**31 - 1,
            vocab_size=1,
            wires=("tcp",),
        )

    def _shared_blocks(self) -> int:
        if self._options.policy is Policy.INFINITE_CACHE:
            block_tokens = self._trace.block_tokens
            return sum(-(-each.num_tokens // block_tokens) for each in self._trace.arrivals)
        return self._options.num_replicas * self._options.cache_tokens // self._trace.block_tokens


async def _announce(announcer: Announcer, news: LateNews, clock: Clock) -> None:
    """`Announcer.run` without its goodbye, as a worker that dies says none, and without the steps
    in which it would say nothing, which are most of a replay's.
    """
    while True:
        wait_s = await announcer.step()
        await clock.sleep(wait_s)
        while clock.now() < announcer.silent_until and not news.waiting:
            await clock.sleep(wait_s)
