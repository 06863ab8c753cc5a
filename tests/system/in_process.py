"""Prefill and decode workers of any TP in one process: real engines, real transport, threads for
ranks and queues for wires. What differs from a cluster is who starts them and how they are called.
"""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import grpc.aio

from decode_worker.decoding import Decoding
from decode_worker.settings import DecodeSettings
from decode_worker.side import DecodeSide
from engine import follower
from engine.clock import MonotonicClock
from engine.engine import Engine, EngineConfig
from engine.runner import SliceObserver
from engine.sampling_params import SamplingParams
from kvcache.block_pool import BlockPool
from kvcache.ledger import Ledger
from model.comm import Comm, SingleComm, ThreadComm
from model.source import ModelSource
from prefill_worker.prefilling import Prefilling
from prefill_worker.settings import PrefillSettings
from prefill_worker.side import PrefillSide
from protos import transfer_pb2_grpc
from protos import worker_pb2 as pb
from transport.grpc_options import server_options
from transport.link import Connector
from transport.loopback_wire import LoopbackWire
from transport.orders import Identity
from worker.admin import Doors
from worker.cleanups import Cleanups
from worker.ledgers import open_ledger
from worker.named_blocks import NamedBlocks
from worker.quarantines import GroupQuarantines
from worker.rank_parts import RankParts, build_rank, manifest_of
from worker.role import Front, RankContext
from worker.settings import WorkerSettings
from worker.work import WorkIntake

Event = TypeVar("Event")
_serial = itertools.count(1)


@dataclass(slots=True)
class Worker:
    """One worker's rank 0, with the sides of all its ranks."""

    identity: Identity
    parts: list[RankParts]
    engine: Engine
    cleanups: Cleanups
    ledgers: list[Ledger]  # of each rank
    addresses: list[str] = field(default_factory=list)
    sides: list[PrefillSide] | list[DecodeSide] = field(default_factory=list)

    async def settled(self) -> None:
        """Wait until nothing is let go any more, then balance the books."""
        await self.cleanups.drain()
        async with asyncio.timeout(10):
            while True:
                books = self.engine.books()
                blocks = books.used_blocks + books.promised_blocks
                if blocks == 0 and all(side.open_transfers == 0 for side in self.sides):
                    break
                await asyncio.sleep(0.005)
        self.engine.check()
        self.engine.take_stock()


@dataclass(slots=True)
class PrefillWorker(Worker):
    prefilling: Prefilling | None = None


@dataclass(slots=True)
class DecodeWorker(Worker):
    decoding: Decoding | None = None


@asynccontextmanager
async def prefill_worker(
    source: ModelSource, wire: Connector, tp: int = 1, **changes: object
) -> AsyncIterator[PrefillWorker]:
    settings = PrefillSettings.model_validate({"name": f"p{next(_serial)}", "tp": tp} | changes)
    async with _ranks(source, settings) as (parts, comms, stack):
        identity = Identity(settings.name, f"i{next(_serial)}", 1, 0)
        sides, ledgers = [], list[Ledger]()
        for part in parts:
            context = _context(settings, source, part, identity, {"loopback": wire}, "prefill")
            side = PrefillSide(context)
            ledgers.append(context.ledger)
            await side.start()
            stack.push_async_callback(side.close)
            sides.append(side)
        observers = [side.observer for side in sides]
        engine = _engine(source, settings, parts, comms, observers, ledgers[0], stack)
        worker = PrefillWorker(identity, parts, engine, Cleanups(), ledgers, sides=sides)
        front = _front(source, settings, worker)
        worker.prefilling = sides[0].prefilling(front, [side.rank for side in sides])
        for side in sides:
            side.names = NamedBlocks(engine)
        yield worker


@asynccontextmanager
async def calls_answered(worker: Worker) -> AsyncIterator[list[str]]:
    """Its ranks hand out cells by calls of their own, too, as they do in a process of theirs."""
    addresses = []
    async with AsyncExitStack() as stack:
        for side in worker.sides:
            server = grpc.aio.server(options=server_options())
            cells = side._cells(NamedBlocks(worker.engine))
            transfer_pb2_grpc.add_CellsServicer_to_server(cells, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, 0)
            addresses.append(f"127.0.0.1:{port}")
        if isinstance(worker, PrefillWorker):
            worker.addresses.extend(addresses)
        yield addresses


def holder(worker: Worker, addresses: Sequence[str]) -> pb.Holder:
    """As the router names who holds blocks."""
    heads = worker.parts[0].head_map.kv
    return pb.Holder(
        instance=worker.identity.instance,
        rank_addresses=addresses,
        kv_head_starts=[run.start for run in heads],
        kv_head_stops=[run.stop for run in heads],
    )


@asynccontextmanager
async def decode_worker(
    source: ModelSource, wire: LoopbackWire, tp: int = 1, **changes: object
) -> AsyncIterator[DecodeWorker]:
    usual = {"name": f"d{next(_serial)}", "tp": tp, "max_damage_share": 1.0}  # no quarantine
    settings = DecodeSettings.model_validate(usual | changes)
    async with _ranks(source, settings) as (parts, comms, stack):
        identity = Identity(settings.name, f"i{next(_serial)}", 1, 0)
        sides, addresses, ledgers = [], [], list[Ledger]()
        for part in parts:
            context = _context(settings, source, part, identity, {}, "decode")
            side = DecodeSide(context)
            ledgers.append(context.ledger)
            await side.start()
            stack.push_async_callback(side.close)
            addresses.append(f"{settings.name}/{part.rank}")
            wire.listen(addresses[-1], side.receiver)
            sides.append(side)
        engine = _engine(source, settings, parts, comms, [None] * tp, ledgers[0], stack)
        worker = DecodeWorker(identity, parts, engine, Cleanups(), ledgers, addresses, sides)
        front = _front(source, settings, worker)
        worker.decoding = sides[0].decoding(front, [side.receiver for side in sides])
        yield worker


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[list[int]]  # by choice
    finish_reasons: list[str]
    cached_tokens: int
    decode_cached_blocks: int
    shipped_blocks: int
    shipped_bytes: int
    fetched_tokens: int


async def disaggregated(
    prefill: PrefillWorker,
    decode: DecodeWorker,
    prompt: list[int],
    params: SamplingParams,
    max_chunk_tokens: int = 0,
    fetch: pb.Fetch | None = None,
) -> Answer:
    """What the router does when nothing goes wrong: both legs at once, decode's tokens."""
    legs = open_legs(prefill, decode, prompt, params, max_chunk_tokens, fetch)
    prefill_leg, decode_leg = legs
    try:
        sent, received = await asyncio.gather(prefill_leg, decode_leg)
    finally:
        for leg in (prefill_leg, decode_leg):
            leg.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await leg
    return _answer(params.n, sent, received)


def open_legs(
    prefill: PrefillWorker,
    decode: DecodeWorker,
    prompt: list[int],
    params: SamplingParams,
    max_chunk_tokens: int = 0,
    fetch: pb.Fetch | None = None,
) -> "tuple[asyncio.Future[list[pb.PrefillEvent]], asyncio.Future[list[pb.DecodeEvent]]]":
    """Both calls of one attempt, each for itself to be awaited or cancelled."""
    work = work_request(prompt, params)
    transfer_id = next(_serial).to_bytes(16, "big")
    prefill_call = prefill_request(work, transfer_id, decode, max_chunk_tokens)
    if fetch is not None:
        prefill_call.fetch.CopyFrom(fetch)
    decode_call = decode_request(work, transfer_id, prefill)
    assert prefill.prefilling is not None and decode.decoding is not None
    return (
        asyncio.ensure_future(_events(prefill.prefilling.run(prefill_call))),
        asyncio.ensure_future(_events(decode.decoding.run(decode_call))),
    )


def work_request(prompt: list[int], params: SamplingParams) -> pb.WorkRequest:
    return pb.WorkRequest(request_id=f"r{next(_serial)}", prompt=prompt, sampling=params.to_proto())


def prefill_request(
    work: pb.WorkRequest, transfer_id: bytes, decode: DecodeWorker, max_chunk_tokens: int = 0
) -> pb.PrefillRequest:
    heads = decode.parts[0].head_map.kv
    return pb.PrefillRequest(
        work=work,
        transfer_id=transfer_id,
        attempt=1,
        wire="loopback",
        max_chunk_tokens=max_chunk_tokens,
        target=pb.DecodeTarget(
            worker=decode.identity.worker,
            instance=decode.identity.instance,
            epoch=decode.identity.epoch,
            rank_addresses=decode.addresses,
            kv_head_starts=[run.start for run in heads],
            kv_head_stops=[run.stop for run in heads],
            block_size=decode.parts[0].spec.block_size,
        ),
    )


def decode_request(
    work: pb.WorkRequest, transfer_id: bytes, prefill: PrefillWorker | None
) -> pb.DecodeRequest:
    request = pb.DecodeRequest(work=work)
    if prefill is not None:
        heads = prefill.parts[0].head_map.kv
        request.transfer_id = transfer_id
        request.attempt = 1
        request.source.worker = prefill.identity.worker
        request.source.instance = prefill.identity.instance
        request.source.epoch = prefill.identity.epoch
        request.source.kv_head_starts.extend(run.start for run in heads)
        request.source.kv_head_stops.extend(run.stop for run in heads)
        request.source.block_size = prefill.parts[0].spec.block_size
        request.source.rank_addresses.extend(prefill.addresses)
        request.source.wires.append("loopback")
    return request


async def _events(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


def _answer(n: int, sent: list[pb.PrefillEvent], received: list[pb.DecodeEvent]) -> Answer:
    tokens: list[list[int]] = [[] for _ in range(n)]
    reasons = [""] * n
    for event in received:
        if event.HasField("token"):
            token = event.token
            assert token.index == len(tokens[token.choice])
            tokens[token.choice].append(token.token_id)
            reasons[token.choice] = token.finish_reason
    firsts = {t.choice: t.token_id for e in sent for t in e.first_tokens.tokens}
    assert firsts == {choice: output[0] for choice, output in enumerate(tokens)}
    adopted = next(event.adopted for event in received if event.HasField("adopted"))
    reserved = next(event.reserved for event in received if event.HasField("reserved"))
    first = next(event.first_tokens for event in sent if event.HasField("first_tokens"))
    return Answer(
        tokens,
        reasons,
        first.cached_tokens,
        reserved.cached_blocks,
        adopted.shipped_blocks,
        adopted.shipped_bytes,
        first.fetched_tokens,
    )


@asynccontextmanager
async def _ranks(
    source: ModelSource, settings: WorkerSettings
) -> AsyncIterator[tuple[list[RankParts], list[Comm], AsyncExitStack]]:
    comms: list[Comm] = [SingleComm()] if settings.tp == 1 else list(ThreadComm.group(settings.tp))
    async with AsyncExitStack() as stack:
        parts = [build_rank(settings, source, comm) for comm in comms]
        for part in parts:
            part.store.poison()
        yield parts, comms, stack


def _context(
    settings: WorkerSettings,
    source: ModelSource,
    parts: RankParts,
    identity: Identity,
    connectors: dict[str, Connector],
    role: str,
) -> RankContext:
    rank = Identity(identity.worker, identity.instance, identity.epoch, parts.rank)
    manifest = manifest_of(settings, source)
    ledger = open_ledger(settings, rank, role)
    return RankContext(settings, parts, rank, manifest, MonotonicClock(), connectors, ledger)


def _engine(
    source: ModelSource,
    settings: WorkerSettings,
    parts: list[RankParts],
    comms: list[Comm],
    observers: Sequence[SliceObserver | None],
    ledger: Ledger,
    stack: AsyncExitStack,
) -> Engine:
    config = EngineConfig(
        settings.max_tokens_per_step, settings.max_running, recheck_share=settings.recheck_share
    )
    engine = Engine(
        config,
        parts[0].model,
        parts[0].store,
        BlockPool(settings.num_blocks, ledger),
        comms[0],
        source.namespace(settings.dtype, settings.weights),
        MonotonicClock(),
        tokenizer=source.tokenizer(),
        observer=observers[0],
        random=Random(7),
    )
    threads = [
        threading.Thread(
            target=follower.run, args=(part.model, part.store, comm, observer), daemon=True
        )
        for part, comm, observer in zip(parts[1:], comms[1:], observers[1:], strict=True)
    ]
    for thread in threads:
        stack.push_async_callback(asyncio.to_thread, thread.join, 5)
        thread.start()
    engine.start()
    stack.push_async_callback(asyncio.to_thread, engine.stop)
    return engine


def _front(source: ModelSource, settings: WorkerSettings, worker: Worker) -> Front:
    intake = WorkIntake(
        source.namespace(settings.dtype, settings.weights),
        settings.block_size,
        worker.engine.new_key,
    )
    watch = worker.sides[0].watch
    quarantines = GroupQuarantines(watch.standing if watch else tuple, MonotonicClock())
    return Front(worker.engine, intake, [], Doors(), worker.cleanups, quarantines)
