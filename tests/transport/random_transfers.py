"""Random transfers between two real groups over a faulty wire, one history for each number.

Blocks belong to one transfer at a time, at either end. A block that is free at decode bears a mark,
which nobody may overwrite; one that prefill lets go is filled with something else at once. Whoever
writes late, reads late or lets go early is found by the bytes, and else by the audit of the
ledgers, with which `cluster` ends.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.clock import ManualClock
from kernels.crew import Steps
from kvcache.cell_catcher import CellCatcher
from kvcache.kv_store import KvStore
from kvcache.mapped_pool import MappedCells
from kvcache.spec import CacheSpec
from tests.transport.harness import QUICK, SPEC, Cluster, Side, cluster, network
from transport.fault_wire import FaultWire
from transport.faults import Faults
from transport.orders import ShipmentKey, TransferFailed

NUM_BLOCKS = 16
FREE = -77  # what every number in a free block is
WORDS = [
    "duplicate=0.1",
    "reorder=0.1",
    "delay=0.05",
    "drop=0.02",
    "flip=0.1",
    "swap=0.1",
    "stale=0.1 foreign=0.1",
    "truncate=0.1",
    "stall=0.01",
    "cut:chunk@9",
    "cut:chunk_ack@5",
    "refuse:chunk@7",
    "half_close:chunk@20",
]


@dataclass
class Ends:
    """What became of the transfers of some histories."""

    whole: int = 0
    failed: int = 0
    num_frames: int = 0
    faults: int = 0


class SlowSink:
    """A store that takes its time now and then, so that much can happen meanwhile."""

    def __init__(self, store: KvStore, random: Random) -> None:
        self.spec: CacheSpec = store.spec
        self._store = store
        self._random = random

    def scattering(
        self,
        layer: int,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: NDArray[np.uint8],
        digests: NDArray[np.uint64] | None = None,
    ) -> Steps[NDArray[np.intp]]:
        yield [self._wait]
        return (yield from self._store.scattering(layer, block_ids, heads, cells, digests))

    def cut(self, block_size: int) -> KvStore:
        raise AssertionError("both ends have blocks of one size")

    def streams(self, heads: Sequence[int]) -> bool:
        return self._store.streams(heads)

    def catcher(self, *what: Any) -> CellCatcher | None:
        made = self._store.catcher(*what)
        if made is None:
            return None
        turn = made.turn

        def take_its_time(fd: int, room: NDArray[np.uint8]) -> bool:
            if self._random.random() < 0.2:
                time.sleep(0.004)
            return turn(fd, room)

        made.turn = take_its_time  # type: ignore[method-assign]
        return made

    def taking(
        self,
        layers: range,
        block_ids: Sequence[int],
        heads: Sequence[int],
        cells: MappedCells,
        digests: NDArray[np.uint64],
    ) -> Steps[NDArray[np.intp]]:
        yield [self._wait]
        return (yield from self._store.taking(layers, block_ids, heads, cells, digests))

    def _wait(self) -> None:
        if self._random.random() < 0.2:
            time.sleep(0.004)


class SlowSource:
    """The same at prefill, where it is read."""

    def __init__(self, store: KvStore, random: Random) -> None:
        self._store = store
        self._random = random

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def gather_cells(self, *where: Any, **named: Any) -> NDArray[np.uint8]:
        self._wait()
        return self._store.gather_cells(*where, **named)

    def digesting(self, *where: Any) -> Steps[NDArray[np.uint64]]:
        yield [self._wait]
        return (yield from self._store.digesting(*where))

    def _wait(self) -> None:
        if self._random.random() < 0.2:
            time.sleep(0.004)


@dataclass
class Blocks:
    """Which blocks of a group nobody owns."""

    side: Side
    random: Random
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))

    def take(self, count: int) -> list[int]:
        self.random.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def fill(self, blocks: Sequence[int], value: int | None = None) -> None:
        """With one number, or with what no other block has; alike in every replica of a head."""
        self._say_written(blocks)
        for layer in range(SPEC.num_layers):
            for block in blocks:
                seed = self.random.getrandbits(40)
                for interval, store in zip(self.side.intervals, self.side.stores, strict=True):
                    ours_PHSD = store.layer(layer)[block]
                    for head in interval:
                        cell_PSD = ours_PHSD[:, head - interval.start]
                        numbers = torch.arange(cell_PSD.numel()).reshape(cell_PSD.shape)
                        first = seed * 1000 + head * 100_000
                        cell_PSD.copy_(numbers + first if value is None else numbers * 0 + value)
        self._say_written(blocks)

    def _say_written(self, blocks: Sequence[int]) -> None:
        for store in self.side.stores:
            store.kept.forget(blocks)

    def kept(self, blocks: Sequence[int]) -> list[list[torch.Tensor]]:
        """What they hold now, by rank and layer."""
        layers = range(SPEC.num_layers)
        return [[store.layer(i)[blocks].clone() for i in layers] for store in self.side.stores]

    def put_back(self, blocks: Sequence[int]) -> None:
        self.fill(blocks, FREE)
        self.free += blocks

    def check_free(self, blocks: Sequence[int]) -> None:
        for store in self.side.stores:
            for layer in range(SPEC.num_layers):
                assert (store.layer(layer)[blocks] == FREE).all(), "a free block was written"


class History:
    """Several transfers of one number."""

    def __init__(self, group: Cluster, random: Random) -> None:
        self.group = group
        self.random = random
        self.sources = Blocks(group.prefill, random)
        self.targets = Blocks(group.decode, random)
        self.targets.fill(range(NUM_BLOCKS), FREE)
        self.ends = Ends()

    async def run(self, num_transfers: int = 6) -> None:
        """At most three at a time, so that blocks are used again and again."""
        places = asyncio.Semaphore(3)

        async def one() -> None:
            async with places:
                await self.transfer()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_transfers):
                tasks.create_task(one())
        self.targets.check_free(self.targets.free)

    async def transfer(self) -> None:
        random, num_tokens = self.random, self.random.randint(1, 20)
        num_blocks = SPEC.blocks_needed(num_tokens)
        source, target = self.sources.take(num_blocks), self.targets.take(num_blocks)
        self.sources.fill(source)
        right = self.sources.kept(source)
        self.targets.check_free(target)
        first_block = random.choice([0, 0, random.randint(0, num_blocks)])
        key = self.group.key()
        expected = self.group.expect(key, num_tokens, target, first_block)
        shipping = asyncio.create_task(self._ship(key, num_tokens, source))
        leaving = asyncio.create_task(self._leave(key, expected))
        try:
            await asyncio.gather(*expected)
            self.check(right, target, num_tokens, first_block)
            await self.group.commit(key)
            self.ends.whole += 1
        except (TransferFailed, asyncio.CancelledError):
            self.ends.failed += 1
        finally:
            leaving.cancel()
            for receiver in self.group.decode.receivers:
                await receiver.abort(key, "over")
            self.targets.put_back(target)
            await asyncio.gather(*expected, shipping, return_exceptions=True)

    def check(
        self, right: list[list[torch.Tensor]], target: list[int], num_tokens: int, first_block: int
    ) -> None:
        """What was sent is there, past the prompt's end there are zeros; the rest is untouched."""
        got, prefill = self.targets.kept(target), self.group.prefill.intervals
        for rank, interval in enumerate(self.group.decode.intervals):
            for head in interval:
                owner = next(i for i, held in enumerate(prefill) if head in held)
                for layer in range(SPEC.num_layers):
                    want_BPSD = right[owner][layer][:, :, head - prefill[owner].start].clone()
                    want_BPSD[-1, :, (num_tokens - 1) % SPEC.block_size + 1 :] = 0
                    want_BPSD[:first_block] = FREE
                    got_BPSD = got[rank][layer][:, :, head - interval.start]
                    assert torch.equal(got_BPSD, want_BPSD), f"rank {rank} head {head} {layer=}"

    async def _ship(self, key: ShipmentKey, num_tokens: int, source: list[int]) -> None:
        shipped = self.group.ship(key, num_tokens)
        sealing = asyncio.create_task(self._seal(key, num_tokens, source))
        try:
            with suppress(TransferFailed, asyncio.CancelledError):
                await asyncio.gather(*shipped)
            for shipper in self.group.prefill.shippers:
                await shipper.abort(key, "over")
            await asyncio.gather(*shipped, return_exceptions=True)
        finally:
            sealing.cancel()
            self.sources.fill(source)  # somebody else's now
            self.sources.free += source

    async def _seal(self, key: ShipmentKey, num_tokens: int, source: Sequence[int]) -> None:
        """Some blocks at a time, layer by layer, each rank at its own pace."""
        for shipper in self.group.prefill.shippers:
            first = 0
            while first < len(source):
                count = self.random.randint(1, len(source) - first)
                for layer in range(SPEC.num_layers):
                    some = source[first : first + count]
                    self.group.seal(shipper, key, layer, first, some, num_tokens)
                    if self.random.random() < 0.2:
                        await asyncio.sleep(0.002)
                first += count
            self.group.finish(shipper, key)

    async def _leave(self, key: ShipmentKey, expected: "Sequence[asyncio.Task[Any]]") -> None:
        """Now and then somebody gives up, at any moment."""
        way = self.random.choice(["stays"] * 6 + ["decode aborts", "cancelled", "prefill aborts"])
        await asyncio.sleep(self.random.random() * 0.03)
        if way == "decode aborts":
            await self.random.choice(self.group.decode.receivers).abort(key, "the client left")
        elif way == "cancelled":
            self.random.choice(expected).cancel()
        elif way == "prefill aborts":
            await self.random.choice(self.group.prefill.shippers).abort(key, "the client left")


async def random_transfers(seed: int, *words: str, wire: str = "loopback") -> Ends:
    """One history. Raises when bytes are wrong, something never ends, or the audit finds fault."""
    random = Random(seed)
    words = words or tuple(random.sample(WORDS, random.randint(0, 5)))
    clock, ends = ManualClock(), Ends()

    async def tick() -> None:
        while True:
            await clock.run(0.1)
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    try:
        with Faults.of(f"seed={seed}", *words) as faults:
            async with (
                asyncio.timeout(20),
                network(wire) as net,
                cluster(
                    net,
                    random.randint(1, 3),
                    random.randint(1, 3),
                    num_blocks=NUM_BLOCKS,
                    clock=clock,
                    config=QUICK.__class__(chunk_bytes=random.choice([400, 1000, 3000])),
                    wrap=lambda inner: FaultWire(inner, faults, clock),
                    sink=lambda store: SlowSink(store, random),  # type: ignore[arg-type, return-value]
                    source=lambda store: SlowSource(store, random),  # type: ignore[arg-type, return-value]
                ) as group,
            ):
                history = History(group, random)
                await history.run()
                faults.on = False
                ends = history.ends
            ends.num_frames, ends.faults = faults.num_frames, faults.count()
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
    return ends
