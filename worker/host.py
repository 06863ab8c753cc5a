"""One life of a worker, seen from rank 0.

    epoch      the index gives this life a number greater than every earlier one of its name
    ranks      the others are spawned, and all load their share of the model at the same time
    doors      gRPC for the router and for peers, a system port for probes and metrics
    announced  the lease is held, the index knows what is cached: routers may send work
    drained    on SIGTERM: no new work, what runs may finish, the name leaves the index
    over       a rank or the engine is lost or hangs: everything fails at once and the process
               ends, so that whoever supervises it starts the next life

Whatever is opened is closed in reverse order, however it ends.
"""

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc.aio
import structlog

from engine.clock import Clock, MonotonicClock
from engine.engine import Engine, EngineConfig
from kvcache.block_pool import BlockPool
from kvcache.layout import KvLayout
from model.source import ModelSource, open_model
from prefix_index.announcer import Announcer
from prefix_index.events import index_events
from prefix_index.index import Load, WorkerRecord
from prefix_index.redis_index import RedisIndex
from protos import rank_pb2, rank_pb2_grpc, worker_pb2_grpc
from transport.grpc_options import channel_options
from transport.orders import Identity
from worker.admin import AdminServicer, Doors, RankReports, rank_report
from worker.cleanups import Cleanups
from worker.doors import GrpcDoor
from worker.ledgers import open_ledger, reading
from worker.metrics import worker_registry
from worker.named_blocks import BlockNamesServicer, NamedBlocks
from worker.quarantines import GroupQuarantines
from worker.rank_parts import RankParts, check_device, manifest_of
from worker.ranks import WorkerRanks
from worker.role import Front, RankContext, RankSide, RoleSpec
from worker.settings import WorkerSettings
from worker.step_watch import watch_steps
from worker.system_server import Probe, SystemServer
from worker.warm_up import warm_up
from worker.wires import connectors
from worker.work import WorkIntake

log = structlog.get_logger()

REPORT_EVERY_S = 1.0
REPORT_TIMEOUT_S = 3.0  # a rank that does not answer for so long is lost
OnReady = Callable[[Mapping[str, Any]], None]


class WorkerLost(Exception):
    """This life cannot go on: a rank or the engine is gone, or a later life has the name."""


async def run_worker(spec: RoleSpec, settings: WorkerSettings, on_ready: OnReady) -> None:
    """Serve until cancelled. Raises CannotStart, BadModelFile, IndexUnavailable or WorkerLost."""
    clock = MonotonicClock()
    async with AsyncExitStack() as stack:
        life = await _open(spec, settings, clock, stack)
        info = {"summary": life.summary(), "pid": os.getpid(), "address": life.record.address}
        on_ready(info)
        await life.serve()


@dataclass(slots=True)
class _Life:
    settings: WorkerSettings
    clock: Clock
    engine: Engine
    ranks: WorkerRanks
    record: WorkerRecord
    announcer: Announcer
    doors: Doors
    others: Sequence[grpc.aio.Channel]
    quarantines: GroupQuarantines
    over: "asyncio.Future[str]"

    async def serve(self) -> None:
        """Announce and watch until cancelled, then drain; WorkerLost when it is over before."""
        announcing = asyncio.create_task(self.announcer.run(), name="announcer")
        limit_s = self.settings.step_timeout_s
        watches = (
            asyncio.create_task(self._watch_ranks(), name="rank reports"),
            asyncio.create_task(watch_steps(self.engine, limit_s, self.clock), name="step watch"),
        )
        try:
            first: set[asyncio.Future[Any]] = {announcing, self.over}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self.over.done():
                await asyncio.to_thread(self.ranks.stop, 0.0)  # the engine may wait for one of them
                raise WorkerLost(self.over.result())
            if (error := announcing.exception()) is not None:  # a mistake of ours
                reason = f"{self.settings.name} cannot announce itself: {error!r}"
                raise WorkerLost(reason) from error
            raise WorkerLost(f"{self.settings.name} was started again elsewhere")
        except asyncio.CancelledError:
            await self._drain()
            raise
        finally:
            for task in (*watches, announcing):
                task.cancel()
            await asyncio.gather(*watches, announcing, return_exceptions=True)

    async def _drain(self) -> None:
        """No new work; wait for what runs, as long as `drain_s` allows."""
        self.doors.close()
        self.announcer.drain()
        give_up = self.clock.now() + self.settings.drain_s
        while self.clock.now() < give_up and not self.over.done():
            books = self.engine.books()
            busy = books.waiting_requests + books.running_requests + books.held_requests
            if not busy + books.reserved_requests:
                return
            await self.clock.sleep(0.05)

    async def _watch_ranks(self) -> None:
        """A rank whose process lives but does not answer is as lost as a dead one."""
        stubs = [rank_pb2_grpc.RankLifeStub(channel) for channel in self.others]
        while stubs:
            await self.clock.sleep(REPORT_EVERY_S)
            for rank, stub in enumerate(stubs, start=1):
                try:
                    asked = rank_pb2.RankReportRequest()
                    report = await stub.Report(asked, timeout=REPORT_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    self.engine.lose(f"rank {rank} does not answer: {error.code().name}")
                    return
                self.quarantines.hear(rank, report.quarantines)

    def summary(self) -> str:
        heads = " ".join(f"[{start}..{stop})" for start, stop in self.record.kv_intervals)
        usual = self.settings.kv_layout is KvLayout.HEAD_MAJOR
        layout = "" if usual else f" {self.settings.kv_layout}"
        return (
            f"{self.settings.num_blocks} blocks x {self.settings.block_size} tokens"
            f"{layout}, "
            f"tp {self.settings.tp}, KV heads {heads}, {self.record.address}"
        )


async def _open(
    spec: RoleSpec, settings: WorkerSettings, clock: Clock, stack: AsyncExitStack
) -> _Life:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[str] = loop.create_future()
    check_device(settings)
    source = await asyncio.to_thread(open_model, settings.model)
    index = RedisIndex(settings.redis_url, clock, prefix=settings.key_prefix)
    stack.push_async_callback(index.close)
    epoch = await index.next_epoch(settings.name)
    identity = Identity(settings.name, secrets.token_hex(8), epoch, rank=0)

    ranks = WorkerRanks(spec, settings, identity)
    stack.push_async_callback(asyncio.to_thread, ranks.stop)
    # The tokenizer, whose fingerprint the manifest holds, is made while the weights are read.
    naming = asyncio.create_task(asyncio.to_thread(manifest_of, settings, source))
    parts = await asyncio.to_thread(ranks.start, source)
    manifest = await naming
    ledger = open_ledger(settings, identity, spec.role.value)
    stack.callback(ledger.close)
    side = spec.make_side(
        RankContext(
            settings,
            parts,
            identity,
            manifest,
            clock,
            connectors(settings, parts.store.shown),
            ledger,
        )
    )
    await side.start()
    stack.push_async_callback(side.close)

    pool = BlockPool(settings.num_blocks, ledger)
    engine = _engine(settings, source, parts, pool, ranks, side, clock, _ends(loop, over))
    ranks.engine = engine
    stack.push_async_callback(asyncio.to_thread, engine.stop)
    cleanups, doors = Cleanups(), Doors()
    quarantines = GroupQuarantines(side.watch.standing if side.watch else tuple, clock)
    stack.push_async_callback(cleanups.drain)
    others = _channels(ranks, stack)
    intake = WorkIntake(
        source.namespace(settings.dtype, settings.weights),
        settings.block_size,
        engine.new_key,
    )

    door = GrpcDoor(settings.host, settings.port, (spec.service,))
    side.serve_ranks(door.server)
    front = Front(engine, intake, others, doors, cleanups, quarantines)
    side.serve_router(door.server, front)
    reports = _reports(side, others)
    admin = AdminServicer(
        identity, spec.role.value, engine, doors, reports, reading(ledger, others)
    )
    worker_pb2_grpc.add_WorkerAdminServicer_to_server(admin, door.server)
    names = BlockNamesServicer(NamedBlocks(engine))
    rank_pb2_grpc.add_BlockNamesServicer_to_server(names, door.server)
    await door.start()
    stack.push_async_callback(door.stop)
    ranks.say_where(door.address)
    engine.start()
    await warm_up(engine, source.vocab_size, settings.num_blocks * settings.block_size // 2)

    system = SystemServer(
        settings.host,
        settings.system_port,
        live=lambda: Probe(not over.done(), over.result() if over.done() else ""),
        ready=lambda: Probe(doors.open, "draining"),
        registry=worker_registry(engine, side.counts, settings.name, manifest.model, side.watch),
    )
    await system.start()
    stack.push_async_callback(system.stop)
    record = WorkerRecord(
        name=settings.name,
        role=spec.role,
        instance=identity.instance,
        epoch=epoch,
        address=door.address,
        system_address=system.address,
        rank_addresses=(door.address, *ranks.addresses),
        kv_intervals=tuple((heads.start, heads.stop) for heads in parts.head_map.kv),
        manifest=manifest,
        load=_load(front),
    )
    announcer = Announcer(
        index,
        record,
        source=lambda: (_load(front), index_events(engine.drain_events())),
        resident=lambda: index_events(engine.resident_blocks()),
        clock=clock,
        heartbeat_s=settings.heartbeat_s,
        lease_s=settings.lease_s,
    )
    return _Life(
        settings, clock, engine, ranks, record, announcer, doors, others, quarantines, over
    )


def _engine(
    settings: WorkerSettings,
    source: ModelSource,
    parts: RankParts,
    pool: BlockPool,
    ranks: WorkerRanks,
    side: RankSide,
    clock: Clock,
    on_death: Callable[[Exception], None],
) -> Engine:
    config = EngineConfig(
        max_tokens_per_step=settings.max_tokens_per_step,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        vocab_size=source.vocab_size,
        max_context=source.max_context,
        recheck_share=settings.recheck_share,
    )
    return Engine(
        config,
        parts.model,
        parts.store,
        pool,
        ranks.comm,
        source.namespace(settings.dtype, settings.weights),
        clock,
        tokenizer=source.tokenizer(),
        observer=side.observer,
        lost_rank=ranks.lost,
        on_death=on_death,
    )


def _ends(
    loop: asyncio.AbstractEventLoop, over: "asyncio.Future[str]"
) -> Callable[[Exception], None]:
    """What the engine calls, from its own thread, when it dies."""

    def end(error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        log.error("engine_over", reason=reason)
        loop.call_soon_threadsafe(_set, over, reason)

    return end


def _set(over: "asyncio.Future[str]", reason: str) -> None:
    if not over.done():
        over.set_result(reason)


def _channels(ranks: WorkerRanks, stack: AsyncExitStack) -> Sequence[grpc.aio.Channel]:
    channels = [
        grpc.aio.insecure_channel(address, options=channel_options()) for address in ranks.addresses
    ]
    for channel in channels:
        stack.push_async_callback(channel.close, None)
    return channels


def _reports(side: RankSide, others: Sequence[grpc.aio.Channel]) -> RankReports:
    async def reports() -> list[rank_pb2.RankReport]:
        asked = [
            rank_pb2_grpc.RankLifeStub(channel).Report(
                rank_pb2.RankReportRequest(), timeout=REPORT_TIMEOUT_S
            )
            for channel in others
        ]
        return [rank_report(side.open_transfers), *await asyncio.gather(*asked)]

    return reports


def _load(front: Front) -> Load:
    load = front.engine.load()
    return Load(
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        prefill_ms_per_token=load.prefill_ms_per_token,
        decode_step_ms=load.decode_step_ms,
        step_sequences=load.step_sequences,
        step_context_tokens=load.step_context_tokens,
        context_tokens=load.context_tokens,
        computed_prompts=load.computed_prompts,
        draining=not front.doors.open,
        quarantines=front.quarantines.standing(),
    )
