"""The two ends of a measured load: all ranks of one side, in one process each."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import grpc.aio
import numpy as np
import torch

from engine.clock import MonotonicClock
from kvcache.head_map import HeadInterval, HeadMap
from kvcache.kv_store import KvStore
from kvferry.transfer_bench import alone
from kvferry.transfer_bench.case import NUM_KV_HEADS, NUM_LAYERS, NUM_QUERY_HEADS, Case, spec
from transport.config import TransportConfig
from transport.grpc_options import server_options
from transport.orders import Identity, ReceiptOrder, ShipmentKey, ShipmentOrder, Target
from transport.receiver import Receiver
from transport.servicer import TransferServicer
from transport.shipper import Shipper
from worker.settings import WorkerSettings
from worker.wires import acceptors, connectors

MANIFEST = b"transfer bench"
STEP_BLOCKS = 32  # that a step of 512 tokens fills
DEADLINE_S = 120.0


class DecodeEnd:
    """Receives, and commits what is whole."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._stack = AsyncExitStack()
        self._receivers: list[Receiver] = []
        self._receipts: list[asyncio.Task[None]] = []
        self._stores: list[KvStore] = []

    async def start(self) -> list[str]:
        """Returns the address of each rank."""
        torch.set_num_threads(1)
        self._stack.enter_context(_digests(self._case.digests))
        return [
            await self._start_rank(rank, interval)
            for rank, interval in enumerate(_heads(self._case.decode_tp))
        ]

    def expect(self, first: int) -> None:
        """Make ready for the transfers numbered `first` and up."""
        for number in range(first, first + self._case.concurrency):
            table = _blocks(self._case, number)
            self._receipts.append(asyncio.create_task(self._receive(number, table)))

    async def take_alone(self) -> tuple[str, "asyncio.Task[None]"]:
        """Where to push to, and what ends once all has come."""
        return await alone.serve(self._case, self._stores[0], _blocks(self._case, 0))

    async def settle(self) -> None:
        """Raises when a transfer failed."""
        receipts, self._receipts = self._receipts, []
        await asyncio.gather(*receipts)

    async def close(self) -> None:
        await self._stack.aclose()

    async def _start_rank(self, rank: int, interval: HeadInterval) -> str:
        case = self._case
        store = _store(interval, case.concurrency * case.num_blocks, seed=None)
        self._stores.append(store)
        identity = Identity("decode-0", "d1", 1, rank)
        receiver = Receiver(identity, interval, store, MANIFEST, MonotonicClock(), _config(case))
        self._receivers.append(await self._stack.enter_async_context(receiver))
        server = grpc.aio.server(options=server_options())
        offered = acceptors(_settings(case), store)
        TransferServicer(receiver, offered).add_to(server)
        port = server.add_insecure_port(f"{case.host}:0")
        await server.start()
        self._stack.push_async_callback(server.stop, 0)
        return f"{case.host}:{port}"

    async def _receive(self, number: int, table: tuple[int, ...]) -> None:
        case = self._case
        order = ReceiptOrder(
            _key(number),
            case.num_tokens,
            0,
            table,
            "p1",
            _heads(case.prefill_tp),
            DEADLINE_S,
        )
        await asyncio.gather(*(receiver.expect(order) for receiver in self._receivers))
        await asyncio.gather(*(receiver.commit(order.key) for receiver in self._receivers))


class PrefillEnd:
    """Ships prompts that are computed already."""

    def __init__(self, case: Case, addresses: Sequence[str]) -> None:
        self._case = case
        self._addresses = tuple(addresses)
        self._stack = AsyncExitStack()
        self._shippers: list[Shipper] = []
        self.sealing_s = 0.0  # of digesting before the last transfers, where they are sealed
        self._stores: list[KvStore] = []

    async def start(self) -> None:
        torch.set_num_threads(1)
        case = self._case
        self._stack.enter_context(_digests(case.digests))
        intervals = _heads(case.prefill_tp)
        for rank, interval in enumerate(intervals):
            num_blocks = case.concurrency * case.num_blocks
            store = _store(
                interval, num_blocks, seed=rank, share=case.wire == "shm" and case.show_pool
            )
            self._stores.append(store)
            shipper = Shipper(
                Identity("prefill-0", "p1", 1, rank),
                intervals,
                store,
                connectors(_settings(case), store.shown),
                MANIFEST,
                MonotonicClock(),
                _config(case),
            )
            self._shippers.append(await self._stack.enter_async_context(shipper))

    async def ship(self, first: int) -> float:
        """Seconds from the first word to the last commit of all transfers `first` and up."""
        case = self._case
        tables = {
            number: _blocks(case, number) for number in range(first, first + case.concurrency)
        }
        for store in () if case.known else self._stores:
            store.kept.forget_all()  # as if they had just been computed: nobody has their digests
        if case.sealed:
            self.sealing_s = self.compute(first)
        began = time.perf_counter()
        await asyncio.gather(
            *(
                self._ship_one(shipper, number, table)
                for number, table in tables.items()
                for shipper in self._shippers
            )
        )
        return time.perf_counter() - began

    async def push_alone(self, address: str) -> float:
        """Seconds until all had arrived, without the transport."""
        if not self._case.known:
            self._stores[0].kept.forget_all()
        table = _blocks(self._case, 0)
        return await alone.push(self._case, self._stores[0], table, address)

    def compute(self, first: int) -> float:
        """Write the blocks of the transfers `first` and up, as a prefill's steps do; returns the
        seconds of digesting them.
        """
        numbers = range(first, first + self._case.concurrency)
        return sum(self._compute(_blocks(self._case, number)) for number in numbers)

    def _compute(self, table: Sequence[int]) -> float:
        took = 0.0
        for start in range(0, len(table), STEP_BLOCKS):
            blocks = table[start : start + STEP_BLOCKS]
            for store in self._stores:
                store.kept.forget(blocks)
                ids_B = torch.tensor(blocks)
                for layer in range(NUM_LAYERS):
                    pool_NPHSD = store.layer(layer)
                    fresh_BPHSD = torch.rand(len(blocks), *pool_NPHSD.shape[1:])
                    pool_NPHSD.index_copy_(0, ids_B, fresh_BPHSD)
                    began = time.perf_counter()
                    store.note_cells(layer, blocks)
                    took += time.perf_counter() - began
        return took

    async def close(self) -> None:
        await self._stack.aclose()

    async def _ship_one(self, shipper: Shipper, number: int, table: tuple[int, ...]) -> None:
        case = self._case
        target = Target("decode-0", "d1", 1, self._addresses, _heads(case.decode_tp))
        order = ShipmentOrder(_key(number), number, case.num_tokens, target, case.wire)
        for layer in range(NUM_LAYERS):
            shipper.seal(number, layer, 0, table)
        shipper.finish(number)
        await shipper.ship(order)


def _heads(tp: int) -> tuple[HeadInterval, ...]:
    return HeadMap.even(NUM_QUERY_HEADS, NUM_KV_HEADS, tp).kv


def _config(case: Case) -> TransportConfig:
    return TransportConfig(chunk_bytes=case.chunk_bytes, window_bytes=case.window_bytes)


def _settings(case: Case) -> WorkerSettings:
    return WorkerSettings(name="bench", host=case.host, wires=(case.wire,))  # type: ignore[arg-type]


def _key(number: int) -> ShipmentKey:
    return ShipmentKey(number.to_bytes(16, "big"), 1, 1, 1)


def _blocks(case: Case, number: int) -> tuple[int, ...]:
    """Scattered over the pool, as in a worker that has run for a while; each lane has its own."""
    all_blocks = np.random.default_rng(7).permutation(case.concurrency * case.num_blocks)
    lane = number % case.concurrency
    return tuple(all_blocks[lane :: case.concurrency].tolist())


def _store(
    interval: HeadInterval, num_blocks: int, seed: int | None, *, share: bool = False
) -> KvStore:
    store = KvStore(spec(), interval, num_blocks, share=share)
    for layer in range(NUM_LAYERS):
        pool = store.layer(layer).view(torch.uint8).numpy()
        pool[...] = 0 if seed is None else np.random.default_rng(seed).integers(0, 256, dtype="u1")
    return store


@contextmanager
def _digests(on: bool) -> Iterator[None]:
    """Without them nothing is verified; no setting of a worker can turn them off."""
    if on:
        yield
        return

    gather, scatter = KvStore.gather_cells, KvStore.scattering
    pourer: Any = KvStore.pourer
    catch: Any = KvStore.catcher
    take: Any = KvStore.taking

    def gather_only(
        store: KvStore,
        layer: int,
        block_ids: Any,
        heads: Any,
        tail_tokens: Any = None,
        out: Any = None,
        digests: Any = None,
    ) -> Any:
        if digests is not None:
            digests[:] = 0
        return gather(store, layer, block_ids, heads, tail_tokens, out)

    def pour_only(*arguments: Any, **named: Any) -> Any:
        made = pourer(*arguments, **named)
        if made is not None:
            made.proved = False
        return made

    def scatter_only(*arguments: Any) -> Any:
        return scatter(*arguments[:-1])

    def catch_only(*arguments: Any) -> Any:
        catcher = catch(*arguments)
        if catcher is not None:
            catcher.proved = False
        return catcher

    def take_only(*arguments: Any) -> Any:
        return take(*arguments[:-1])

    def no_digests(store: KvStore, layer: int, block_ids: Any, heads: Any, *_: Any) -> Any:
        return np.zeros(len(block_ids) * len(heads) * store.layer(layer).shape[1], np.uint64)

    def no_digesting(store: KvStore, layers: range, *where: Any) -> Any:
        yield from ()
        return np.concatenate([no_digests(store, layer, *where) for layer in layers])

    def no_note(*_: Any) -> None:
        pass

    with (
        patch.object(KvStore, "taking", take_only),
        patch.object(KvStore, "digesting", no_digesting),
        patch.object(KvStore, "known_digests", no_digests),
        patch.object(KvStore, "note_cells", no_note),
        patch.object(KvStore, "gather_cells", gather_only),
        patch.object(KvStore, "scattering", scatter_only),
        patch.object(KvStore, "pourer", pour_only),
        patch.object(KvStore, "catcher", catch_only),
    ):
        yield
