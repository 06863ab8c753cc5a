"""What the tests of this folder share: wires to run over, small caches, whole little clusters."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc.aio
import numpy as np
import torch

from engine.clock import Clock, MonotonicClock
from kvcache.head_map import HeadInterval, HeadMap
from kvcache.kv_store import KvStore
from kvcache.layout import KvLayout
from kvcache.spec import CacheSpec
from kvferry.audit.audit import audit
from kvferry.audit.report import Report
from protos.transfer_pb2 import Hello
from protos.worker_pb2 import GeneratedToken
from transport.config import TransportConfig
from transport.dist_wire import DistAcceptor, DistConnector
from transport.grpc_options import server_options
from transport.grpc_wire import GrpcConnector
from transport.link import PROTOCOL, Acceptor, Connector, Listener
from transport.loopback_wire import LoopbackWire
from transport.orders import (
    Identity,
    Receipt,
    ReceiptOrder,
    ShipmentKey,
    ShipmentOrder,
    ShipmentReport,
    Target,
)
from transport.receiver import Receiver
from transport.servicer import TransferServicer
from transport.shipper import Shipper
from transport.shm_wire import ShmAcceptor, ShmConnector
from transport.tcp_wire import TcpAcceptor, TcpConnector

WIRES = ["loopback", "grpc", "tcp", "shm", "gloo"]
POOL = "pool"  # the shm wire, where decode reads cells out of prefill's pool
WAYS = [*WIRES, POOL]
MANIFEST = b"manifest"
SPEC = CacheSpec.full(num_layers=3, num_kv_heads=3, head_dim=4, block_size=4, dtype="int64")
# Two or three blocks of SPEC's heads a chunk; no damage is too much.
QUICK = TransportConfig(chunk_bytes=1000, max_damage_share=1.0)


class Network:
    """One wire, with whatever has to run for it; addresses are given out by `listen`."""

    def __init__(self, wire: str, stack: AsyncExitStack) -> None:
        self.wire = "shm" if wire == POOL else wire
        self.shows_pools = self.reads_pools = wire == POOL
        self.loopback = LoopbackWire()
        self._stack = stack
        self._servers: dict[str, grpc.aio.Server] = {}
        self._num_listeners = 0

    def connector(self, store: KvStore | None = None) -> Connector:
        """Of a rank with this store, which it shows where pools are shown."""
        if store is not None and self.shows_pools:
            return ShmConnector(GrpcConnector(timeout_s=5), timeout_s=5, shown=store.shown)
        return self.connector_of(self.wire)

    def connector_of(self, wire: str) -> Connector:
        """Of any wire that crosses a process; of the loopback one only where it is this one's."""
        if wire == "loopback":
            return self.loopback
        if wire == "grpc":
            return GrpcConnector(timeout_s=5)
        if wire == "tcp":
            return TcpConnector(GrpcConnector(timeout_s=5), timeout_s=5)
        if wire == "shm":
            return ShmConnector(GrpcConnector(timeout_s=5), timeout_s=5)
        connector = DistConnector(GrpcConnector(timeout_s=5), timeout_s=5)
        self._stack.callback(connector.close)
        return connector

    async def listen(
        self, listener: Listener, address: str = "", spec: CacheSpec | None = None
    ) -> str:
        if self.wire == "loopback":
            self._num_listeners += 1
            address = address or f"here:{self._num_listeners}"
            self.loopback.listen(address, listener)
            return address
        server = grpc.aio.server(options=server_options())
        acceptors: dict[str, Acceptor] = {
            "tcp": TcpAcceptor(timeout_s=5),
            "shm": ShmAcceptor(timeout_s=5, spec=spec if self.reads_pools else None),
            "gloo": DistAcceptor(timeout_s=5),
        }
        TransferServicer(listener, acceptors).add_to(server)
        port = server.add_insecure_port(address or "127.0.0.1:0")
        await server.start()
        address = f"127.0.0.1:{port}"
        self._servers[address] = server
        return address

    async def silence(self, address: str) -> None:
        if self.wire == "loopback":
            self.loopback.silence(address)
        else:
            await self._servers.pop(address).stop(0)

    async def close(self) -> None:
        await self.loopback.close()
        for address in list(self._servers):
            await self.silence(address)


@asynccontextmanager
async def network(wire: str) -> AsyncIterator[Network]:
    async with AsyncExitStack() as stack:
        made = Network(wire, stack)
        stack.push_async_callback(made.close)
        yield made


@asynccontextmanager
async def served(add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    """The address of a server with the services that `add` gives it."""
    server = grpc.aio.server()
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def hello(**fields: object) -> Hello:
    values = {
        "protocol": PROTOCOL,
        "prefill_worker": "prefill-0",
        "prefill_instance": "p1",
        "prefill_epoch": 1,
        "prefill_rank": 0,
        "decode_instance": "d1",
        "manifest_digest": MANIFEST,
    }
    return Hello(**(values | fields))  # type: ignore[arg-type]


async def soon(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `condition` holds, which it must before long."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def num_open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def settled_tasks() -> int:
    for _ in range(10):
        await asyncio.sleep(0)
    return len(asyncio.all_tasks())


def filled_store(
    spec: CacheSpec,
    kv_heads: HeadInterval,
    num_blocks: int,
    seed: int,
    layout: KvLayout = KvLayout.HEAD_MAJOR,
    *,
    share: bool = False,
) -> KvStore:
    """A store whose bytes depend on layer, block, plane, global head, slot and `seed` alone."""
    if share:
        store = KvStore(spec, kv_heads, num_blocks, layout=layout, share=True)
    else:
        store = KvStore(spec, kv_heads, num_blocks, layout=layout)
    for layer in range(store.num_layers):
        pool_NPHSD = store.layer(layer)
        for head in kv_heads:
            block_NPSD = pool_NPHSD[:, :, head - kv_heads.start]
            values = torch.arange(block_NPSD.numel()).reshape(block_NPSD.shape)
            block_NPSD.copy_(values + 1_000_000 * (head + 100 * (layer + 100 * seed)))
    return store


@dataclass
class Side:
    """One group of ranks, prefill or decode, in this process."""

    intervals: tuple[HeadInterval, ...]
    stores: list[KvStore]
    shippers: list[Shipper] = field(default_factory=list)
    receivers: list[Receiver] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)


@dataclass
class Cluster:
    """A prefill group and a decode group joined by one wire.

    `spec` is the prefill group's; the decode group's differs in nothing but its block size.
    """

    spec: CacheSpec
    wire: str
    prefill: Side
    decode: Side
    decode_block_size: int
    other_wires: tuple[str, ...] = ()
    num_transfers: int = 0

    def key(self) -> ShipmentKey:
        self.num_transfers += 1
        return ShipmentKey(self.num_transfers.to_bytes(16, "big"), 1, 1, 1)

    def target(self) -> Target:
        addresses = tuple(self.decode.addresses)
        intervals, size = self.decode.intervals, self.decode_block_size
        return Target("decode-0", "d1", 1, addresses, intervals, size)

    def ship_orders(self, key: ShipmentKey, num_tokens: int) -> ShipmentOrder:
        request_key = int.from_bytes(key.transfer_id, "big")
        target, others = self.target(), self.other_wires
        return ShipmentOrder(key, request_key, num_tokens, target, self.wire, others)

    def receipt_order(
        self,
        key: ShipmentKey,
        num_tokens: int,
        block_table: Sequence[int],
        first_block: int = 0,
        timeout_s: float = 20,
    ) -> ReceiptOrder:
        return ReceiptOrder(
            key,
            num_tokens,
            first_block,
            tuple(block_table),
            "p1",
            self.prefill.intervals,
            timeout_s,
            self.spec.block_size,
        )

    def ship(self, key: ShipmentKey, num_tokens: int) -> "list[asyncio.Task[ShipmentReport]]":
        order = self.ship_orders(key, num_tokens)
        return [asyncio.create_task(shipper.ship(order)) for shipper in self.prefill.shippers]

    def expect(
        self,
        key: ShipmentKey,
        num_tokens: int,
        block_table: Sequence[int],
        first_block: int = 0,
        timeout_s: float = 20,
    ) -> "list[asyncio.Task[Receipt]]":
        order = self.receipt_order(key, num_tokens, block_table, first_block, timeout_s)
        return [asyncio.create_task(receiver.expect(order)) for receiver in self.decode.receivers]

    def seal_all(self, key: ShipmentKey, num_tokens: int, blocks: Sequence[int]) -> None:
        """What all prefill engines do in the end: seal every layer, then say the first token."""
        for shipper in self.prefill.shippers:
            for layer in range(self.spec.num_layers):
                self.seal(shipper, key, layer, 0, blocks, num_tokens)
            self.finish(shipper, key)

    def seal(
        self,
        shipper: Shipper,
        key: ShipmentKey,
        layer: int,
        first_block: int,
        blocks: Sequence[int],
        num_tokens: int,
    ) -> None:
        tail = num_tokens % self.spec.block_size or None
        last = first_block + len(blocks) == self.spec.blocks_needed(num_tokens)
        request_key = int.from_bytes(key.transfer_id, "big")
        shipper.seal(request_key, layer, first_block, blocks, tail if last else None)

    def finish(self, shipper: Shipper, key: ShipmentKey) -> None:
        tokens = [GeneratedToken(token_id=7)] if shipper.identity.rank == 0 else []
        shipper.finish(int.from_bytes(key.transfer_id, "big"), tokens)

    async def commit(self, key: ShipmentKey) -> None:
        for receiver in self.decode.receivers:
            await receiver.commit(key)

    async def carry(
        self, num_tokens: int, source: Sequence[int], target: Sequence[int], first_block: int = 0
    ) -> "tuple[list[ShipmentReport], list[Receipt]]":
        """One whole transfer, from the first call to the last release."""
        key = self.key()
        expected = self.expect(key, num_tokens, target, first_block)
        shipped = self.ship(key, num_tokens)
        self.seal_all(key, num_tokens, source)
        receipts = await asyncio.gather(*expected)
        await self.commit(key)
        return await asyncio.gather(*shipped), receipts

    async def carry_acknowledged(
        self, num_tokens: int, source: Sequence[int], target: Sequence[int]
    ) -> None:
        """As `carry`, by one prefill rank to one decode rank: the commit waits until prefill has
        heard of every chunk.
        """
        key, (shipper,) = self.key(), self.prefill.shippers
        expected, shipped = self.expect(key, num_tokens, target), self.ship(key, num_tokens)
        self.seal_all(key, num_tokens, source)
        await asyncio.gather(*expected)
        departure = shipper.lend(key)
        assert departure is not None
        await soon(lambda: departure.outgoing.pairs[0].idle)
        await self.commit(key)
        await asyncio.gather(*shipped)

    def check_blocks(
        self, num_tokens: int, source: Sequence[int], target: Sequence[int], first_block: int = 0
    ) -> None:
        """Every written slot equals the prefill group's.

        Slots past the prompt are zero to the end of the last block sent, and untouched after it.
        """
        theirs_size, ours_size = self.spec.block_size, self.decode_block_size
        unit = min(theirs_size, ours_size)
        first_token = first_block * ours_size
        last_sent = -(-num_tokens // unit) * unit
        for rank, interval in enumerate(self.decode.intervals):
            for head in interval:
                owner = next(i for i, held in enumerate(self.prefill.intervals) if head in held)
                theirs = head - self.prefill.intervals[owner].start
                for layer in range(self.spec.num_layers):
                    sent_NPHSD = self.prefill.stores[owner].layer(layer)
                    got_NPHSD = self.decode.stores[rank].layer(layer)
                    for token in range(first_token, last_sent):
                        block, slot = divmod(token, theirs_size)
                        want_PD = sent_NPHSD[source[block], :, theirs, slot].clone()
                        want_PD[...] = want_PD if token < num_tokens else 0
                        block, slot = divmod(token, ours_size)
                        got_PD = got_NPHSD[target[block], :, head - interval.start, slot]
                        assert torch.equal(got_PD, want_PD), (rank, head, layer, token)

    def audit(self) -> Report:
        """What the ledgers of all ranks prove once both groups are closed."""
        ledgers = [shipper.ledger for shipper in self.prefill.shippers]
        ledgers += [receiver.ledger for receiver in self.decode.receivers]
        report = audit([ledger.extract() for ledger in ledgers], at_rest=True)
        report.check()
        return report

    def snapshot(self) -> list[np.ndarray]:
        return [
            store.layer(layer).numpy().copy()
            for store in self.decode.stores
            for layer in range(self.spec.num_layers)
        ]


@asynccontextmanager
async def cluster(
    net: Network,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    *,
    spec: CacheSpec = SPEC,
    decode_block_size: int = 0,
    layouts: tuple[KvLayout, KvLayout] = (KvLayout.HEAD_MAJOR, KvLayout.HEAD_MAJOR),
    num_query_heads: int = 9,
    num_blocks: int = 24,
    config: TransportConfig = QUICK,
    clock: Clock | None = None,
    wrap: Callable[[Connector], Connector] = lambda connector: connector,
    others: Mapping[str, Connector] | None = None,
    sink: Callable[[KvStore], KvStore] = lambda store: store,
    source: Callable[[KvStore], KvStore] = lambda store: store,
) -> AsyncIterator[Cluster]:
    clock = clock or MonotonicClock()
    prefill_map = HeadMap.even(num_query_heads, spec.num_kv_heads, prefill_tp).kv
    decode_map = HeadMap.even(num_query_heads, spec.num_kv_heads, decode_tp).kv
    sizes = (spec.block_size, decode_block_size or spec.block_size)
    sources, targets = (
        [
            filled_store(
                replace(spec, block_size=size),
                interval,
                num_blocks,
                seed,
                layout,
                share=net.shows_pools,
            )
            for interval in head_map
        ]
        for seed, (size, head_map, layout) in enumerate(
            zip(sizes, (prefill_map, decode_map), layouts, strict=True), start=1
        )
    )
    prefill, decode = Side(prefill_map, sources), Side(decode_map, targets)
    others = others or {}
    made = Cluster(spec, net.wire, prefill, decode, sizes[1], tuple(others))
    async with AsyncExitStack() as stack:
        for rank, (interval, store) in enumerate(zip(decode_map, targets, strict=True)):
            identity = Identity("decode-0", "d1", 1, rank)
            receiver = Receiver(identity, interval, sink(store), MANIFEST, clock, config)
            made.decode.receivers.append(await stack.enter_async_context(receiver))
            made.decode.addresses.append(await net.listen(receiver, spec=store.spec))
        for rank, store in enumerate(sources):
            connectors = {net.wire: wrap(net.connector(store)), **others}
            shipper = Shipper(
                Identity("prefill-0", "p1", 1, rank),
                prefill_map,
                source(store),
                connectors,
                MANIFEST,
                clock,
                config,
            )
            made.prefill.shippers.append(await stack.enter_async_context(shipper))
        yield made
    made.audit()


Release = Callable[[], Awaitable[None]]
