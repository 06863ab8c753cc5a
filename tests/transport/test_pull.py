"""Cells fetched by a call of their own: by whom, by what right, how much, and what is missing."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import grpc.aio
import numpy as np
import pytest

from kvcache.head_map import HeadMap
from protos.transfer_pb2 import CellRun, FetchRequest, Frame
from protos.transfer_pb2_grpc import add_CellsServicer_to_server
from tests.transport.harness import QUICK, SPEC, Cluster, cluster, filled_store, network, soon
from transport.cells_servicer import CellsServicer
from transport.config import TransportConfig
from transport.fault_wire import FaultConnector, Item
from transport.mender import MAX_PULLS
from transport.orders import Holder, Lender, ReceiptOrder, ShipmentKey, TransferFailed
from transport.pull import (
    Asked,
    GrpcPuller,
    Names,
    Part,
    Pull,
    PullFailed,
    by_name,
    by_shipment,
)

SOURCE, TARGET = [5, 3, 9, 0, 11], [7, 20, 2, 15, 4]
NUM_TOKENS = 20
SOURCE_OF_MANY = list(range(23, -1, -1))
NAMES = [bytes([i]) * 32 for i in range(5)]
KEY = ShipmentKey(b"k" * 16, 1, 1, 1)  # of a shipment that nobody knows
SPEC_CELL_BYTES = SPEC.cell_bytes(SPEC.groups[0].planes[0])


class Pins:
    """Blocks by name, and how many of them are held."""

    def __init__(self, ids: Mapping[bytes, int]) -> None:
        self.ids = ids
        self.num_held = 0
        self.suspected: list[int] = []

    @asynccontextmanager
    async def pinned(self, names: Sequence[bytes]) -> AsyncIterator[Mapping[bytes, int]]:
        self.num_held += 1
        try:
            yield {name: self.ids[name] for name in names if name in self.ids}
        finally:
            self.num_held -= 1

    async def suspect(self, block_ids: Sequence[int]) -> None:
        self.suspected += block_ids


@asynccontextmanager
async def serving(
    group: Cluster, rank: int = 0, pins: Pins | None = None, config: TransportConfig = QUICK
) -> AsyncIterator[str]:
    """The Cells service of a prefill rank; gives its address."""
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        store, shipper = group.prefill.stores[rank], group.prefill.shippers[rank]
        server = grpc.aio.server()
        servicer = CellsServicer(store, threads, config, shipper.lend, pins, shipper.ledger)
        add_CellsServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        yield f"127.0.0.1:{port}"


async def fetched(pull: Pull) -> list[tuple[CellRun, bytes]]:
    return [(run, part.payload) async for run, part in GrpcPuller(5).fetch(pull)]


def at(address: str) -> Lender:
    return Lender("p1", 0, address)


def cells(group: Cluster, block: int, layer: int = 1, heads: Sequence[int] = (0, 2)) -> bytes:
    return group.prefill.stores[0].gather_cells(layer, [SOURCE[block]], heads).tobytes()


def run_of(first: int, count: int, layer: int = 1, heads: Sequence[int] = (0, 2)) -> CellRun:
    return CellRun(layer=layer, first_block=first, num_blocks=count, heads=heads)


async def damaging(frame: Frame, payload: memoryview | None) -> list[Item]:
    """Breaks one bit of every cell of layer 1, block 2, head 1, over and over."""
    chunk = frame.chunk
    if payload is None or chunk.layer != 1 or not 0 <= 2 - chunk.first_block < chunk.num_blocks:
        return [(frame, payload)]
    heads = list(chunk.heads) or [0, 1, 2]
    if 1 not in heads:
        return [(frame, payload)]
    raw = bytearray(payload)
    width = len(raw) // (chunk.num_blocks * len(heads))
    raw[((2 - chunk.first_block) * len(heads) + heads.index(1)) * width] ^= 4
    return [(frame, memoryview(raw))]


def damaging_before(num_blocks: int) -> Callable[..., Awaitable[list[Item]]]:
    """Every cell, but for those from this block on: a prompt's tail, which has no name."""

    async def damaging_all(frame: Frame, payload: memoryview | None) -> list[Item]:
        if payload is None:
            return [(frame, payload)]
        chunk, raw = frame.chunk, bytearray(payload)
        width = len(raw) // chunk.num_blocks
        for block in range(chunk.num_blocks):
            if chunk.first_block + block < num_blocks:
                cells = range(block * width, (block + 1) * width, SPEC_CELL_BYTES)
                for start in cells:
                    raw[start] ^= 1
        return [(frame, memoryview(raw))]

    return damaging_all


async def carry(
    group: Cluster,
    order_of: "dict[str, object]",
    num_tokens: int = NUM_TOKENS,
    source: Sequence[int] = SOURCE,
    target: Sequence[int] = TARGET,
) -> None:
    """One transfer whose receivers may fetch cells from elsewhere, and its commit."""
    key = group.key()
    order = group.receipt_order(key, num_tokens, target)
    fields = {name: getattr(order, name) for name in ReceiptOrder.__slots__}
    order = ReceiptOrder(**(fields | order_of))
    expected = [asyncio.create_task(each.expect(order)) for each in group.decode.receivers]
    shipped = group.ship(key, num_tokens)
    group.seal_all(key, num_tokens, source)
    results = await asyncio.gather(*expected, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        await asyncio.gather(*shipped, return_exceptions=True)
        raise failed[0]
    await group.commit(key)
    await asyncio.gather(*shipped)


async def test_what_a_link_keeps_damaging_is_fetched_from_the_prefill_rank_by_a_call() -> None:
    async with (
        network("grpc") as net,
        cluster(net, wrap=lambda inner: FaultConnector(inner, damaging)) as group,
        serving(group) as address,
    ):
        await carry(group, {"source_addresses": (address,)})
        group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
        counts = group.decode.receivers[0].counts
        assert (counts.failed, counts.completed) == (0, 1)
        assert counts.pulled_cells == 1
        assert counts.repaired_cells == 1  # the good cells of its chunks never moved again


@asynccontextmanager
async def all_damaged(cells_each: int) -> AsyncIterator[tuple[Cluster, str]]:
    """Two ends, and where to call, where a call may bring so many cells. All 45 come damaged: three
    layers of five blocks of three heads.
    """
    config = replace(QUICK, max_call_bytes=cells_each * 2 * SPEC_CELL_BYTES)
    async with (
        network("loopback") as net,
        cluster(
            net, config=config, wrap=lambda inner: FaultConnector(inner, damaging_before(5))
        ) as group,
        serving(group, config=config) as address,
    ):
        yield group, address


@pytest.mark.parametrize("cells_each", [1, 4, 44])
async def test_what_is_more_than_a_call_may_bring_is_asked_for_by_several(cells_each: int) -> None:
    async with all_damaged(cells_each) as (group, address):
        await carry(group, {"source_addresses": (address,)})
        group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
        assert group.decode.receivers[0].counts.pulled_cells == 45


def test_parts_of_an_answer_are_placed_in_any_order_and_nothing_else_is() -> None:
    """As many runs as a call may have: each part was once looked for among all of them."""
    runs = [run_of(3 * block, 2, layer) for block in range(1365) for layer in range(3)]
    pull = by_name(at("a"), KEY, Names([bytes(32)] * 4096), runs)
    asked = Asked(pull)
    for there, here in reversed(list(zip(pull.request.runs, runs, strict=True))):
        assert asked.place(there) == here
    there = pull.request.runs[7]
    last = run_of(there.first_block + 1, 1, there.layer)
    assert asked.place(last) == run_of(runs[7].first_block + 1, 1, runs[7].layer)
    strangers = [
        run_of(there.first_block + 1, 2, there.layer),
        run_of(there.first_block, 0, there.layer),
        run_of(there.first_block, 1, layer=3),
        run_of(there.first_block, 1, there.layer, heads=(0,)),
    ]
    assert [asked.place(each) for each in strangers] == [None] * 4


class Counting(GrpcPuller):
    """How many calls were under way at once."""

    num_now = num_most = 0

    async def fetch(self, pull: Pull) -> AsyncGenerator[Part, None]:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            async with aclosing(super().fetch(pull)) as parts:
                async for part in parts:
                    yield part
        finally:
            self.num_now -= 1


async def test_however_much_is_damaged_a_lender_gets_a_few_calls_at_once() -> None:
    async with all_damaged(1) as (group, address):
        group.decode.receivers[0]._mender._puller = counting = Counting(5)
        await carry(group, {"source_addresses": (address,)})
        group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
        assert 1 < counting.num_most <= MAX_PULLS
        assert group.decode.receivers[0].counts.pulled_cells == 45


async def test_when_prefill_cannot_be_called_another_holder_of_the_block_is() -> None:
    async with (
        network("grpc") as net,
        cluster(net, wrap=lambda inner: FaultConnector(inner, damaging)) as group,
    ):
        pins = Pins({NAMES[2]: SOURCE[2]})
        async with serving(group, pins=pins) as address:
            heads = group.prefill.intervals
            holders = [Holder("p1", (each,), heads) for each in ("127.0.0.1:9", address)]
            others: dict[str, object] = {"holders": tuple(holders)}
            others |= {"source_addresses": ("127.0.0.1:9",), "block_names": tuple(NAMES)}
            await carry(group, others)
        group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
        assert group.decode.receivers[0].counts.pulled_cells == 1
        assert pins.num_held == 0


@asynccontextmanager
async def holding_large(group: Cluster, pins: Pins, size: int) -> AsyncIterator[Holder]:
    """A worker of one rank that holds what the prefill group has, in blocks of `size` tokens: block
    n of the prompt is its own n.
    """
    (interval,), theirs = group.prefill.intervals, group.spec.block_size
    store = filled_store(replace(SPEC, block_size=size), interval, 24, seed=9)
    unit = min(theirs, size)
    ours, source = store.cut(unit), group.prefill.stores[0].cut(unit)
    heads, per_block = list(interval), theirs // unit
    for layer in range(SPEC.num_layers):
        for place, block in enumerate(SOURCE_OF_MANY):
            ids = [block * per_block + part for part in range(per_block)]
            cells = source.gather_cells(layer, ids, heads)
            at = range(place * per_block, (place + 1) * per_block)
            if at.stop <= 24 * (size // unit):
                ours.scatter_cells(layer, at, heads, cells)
    with ThreadPoolExecutor(1) as threads:
        server = grpc.aio.server()
        add_CellsServicer_to_server(CellsServicer(store, threads, QUICK, blocks=pins), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield Holder("h", (address,), (interval,), size, "holder-0", 1)
        finally:
            await server.stop(0)


@asynccontextmanager
async def holding(tp: int, pins: Pins) -> AsyncIterator[Holder]:
    """A worker of `tp` ranks that holds what the prefill group has, in blocks of its own."""
    heads = HeadMap.even(9, SPEC.num_kv_heads, tp).kv
    async with AsyncExitStack() as stack:
        threads, addresses = stack.enter_context(ThreadPoolExecutor(1)), []
        for interval in heads:
            server = grpc.aio.server()
            store = filled_store(SPEC, interval, 24, seed=1)
            servicer = CellsServicer(store, threads, QUICK, blocks=pins)
            add_CellsServicer_to_server(servicer, server)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            stack.push_async_callback(server.stop, 0)
        yield Holder("h", tuple(addresses), heads)


@pytest.mark.parametrize(
    ("tps", "holder_tp"), [((1, 1), 2), ((1, 3), 2), ((2, 2), 3), ((3, 1), 3), ((2, 3), 5)], ids=str
)
async def test_a_holder_of_any_tp_gives_every_head_from_the_rank_that_holds_it(
    tps: tuple[int, int], holder_tp: int
) -> None:
    pins = Pins(dict(zip(NAMES[:4], SOURCE, strict=False)))
    async with (
        network("grpc") as net,
        cluster(net, *tps, wrap=lambda inner: FaultConnector(inner, damaging_before(4))) as group,
        holding(holder_tp, pins) as holder,
    ):
        await carry(group, {"holders": (holder,), "block_names": tuple(NAMES)}, num_tokens=18)
        group.check_blocks(18, SOURCE, TARGET)
        pulled = sum(receiver.counts.pulled_cells for receiver in group.decode.receivers)
        heads = sum(len(interval) for interval in group.decode.intervals)
        assert pulled == 3 * 4 * heads
        assert pins.num_held == 0


@pytest.mark.parametrize(("theirs", "ours"), [(4, 16), (16, 4), (2, 16)])
async def test_a_holder_gives_the_parts_of_its_blocks_that_the_wire_speaks_of(
    theirs: int, ours: int
) -> None:
    """The holder names blocks as large as decode's; those of the wire are as the smaller ones."""
    unit, num_tokens = min(theirs, ours), 32 + 5 if theirs > 2 else 16 + 5
    num_named = num_tokens // ours
    names = [bytes([i]) * 32 for i in range(num_named)]
    pins = Pins({name: i for i, name in enumerate(names)})
    damage = damaging_before(num_named * ours // unit)
    async with (
        network("grpc") as net,
        cluster(
            net,
            spec=replace(SPEC, block_size=theirs),
            decode_block_size=ours,
            wrap=lambda inner: FaultConnector(inner, damage),
        ) as group,
        holding_large(group, pins, ours) as holder,
    ):
        source = SOURCE_OF_MANY[: -(-num_tokens // theirs)]
        target = list(range(24))[: -(-num_tokens // ours)]
        others: dict[str, object] = {"holders": (holder,), "block_names": tuple(names)}
        await carry(group, others, num_tokens, source, target)
        group.check_blocks(num_tokens, source, target)
        pulled = group.decode.receivers[0].counts.pulled_cells
        assert pulled == 3 * 3 * num_named * ours // unit
        assert pins.num_held == 0


async def test_a_holder_that_names_blocks_of_another_size_is_not_asked() -> None:
    async with (
        network("grpc") as net,
        cluster(net, wrap=lambda inner: FaultConnector(inner, damaging)) as group,
    ):
        pins = Pins(dict(zip(NAMES, SOURCE, strict=True)))
        async with serving(group, pins=pins) as address:
            heads = group.prefill.intervals
            large, same = (Holder("h", (address,), heads, size) for size in (16, 4))
            with pytest.raises(TransferFailed, match="h: names blocks of 16 tokens, not of 4"):
                await carry(group, {"holders": (large,), "block_names": tuple(NAMES)})
            await carry(group, {"holders": (large, same), "block_names": tuple(NAMES)})
        group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
        assert group.decode.receivers[0].counts.pulled_cells == 1


async def test_parts_of_a_block_that_has_changed_are_missing_and_it_is_suspected() -> None:
    spec = replace(SPEC, block_size=16)
    async with network("loopback") as net, cluster(net, spec=spec) as group:
        pins = Pins({NAMES[0]: SOURCE[0], NAMES[1]: SOURCE[1]})
        store = group.prefill.stores[0]
        assert store.recheck(SOURCE[:2]) == []
        store.layer(1)[SOURCE[1], 0, 2, 1, 1] ^= 1
        names = Names(NAMES, parts=4, block_size=16)
        async with serving(group, pins=pins) as address:
            parts = await fetched(by_name(at(address), KEY, names, [run_of(1, 3), run_of(6, 1)]))
        assert [run.first_block for run, _ in parts] == [1, 2, 3]
        want = store.cut(4).gather_cells(1, [SOURCE[0] * 4 + part for part in (1, 2, 3)], (0, 2))
        assert b"".join(payload for _, payload in parts) == want.tobytes()
        assert pins.suspected == [SOURCE[1]]


async def test_as_many_bytes_of_parts_as_of_whole_blocks_may_be_asked_for_by_name() -> None:
    spec = replace(SPEC, block_size=16)
    most = 2 * spec.bytes_per_block(3) // spec.num_layers
    config = replace(QUICK, max_call_bytes=most)
    async with network("loopback") as net, cluster(net, spec=spec, config=config) as group:
        pins = Pins(dict(zip(NAMES, SOURCE, strict=True)))
        names = Names(NAMES, parts=4, block_size=16)
        async with serving(group, pins=pins, config=config) as address:
            pull = by_name(at(address), KEY, names, [run_of(2, 8, heads=(0, 1, 2))])
            assert sum(run.num_blocks for run, _ in await fetched(pull)) == 8
            pull = by_name(at(address), KEY, names, [run_of(2, 9, heads=(0, 1, 2))])
            with pytest.raises(PullFailed, match=r"RESOURCE_EXHAUSTED: .* bytes are asked for"):
                await fetched(pull)


async def test_a_cell_that_nobody_has_whole_is_a_loss_of_data_that_names_it() -> None:
    async with (
        network("grpc") as net,
        cluster(net, wrap=lambda inner: FaultConnector(inner, damaging)) as group,
        serving(group, pins=Pins({})) as address,
    ):
        holder = Holder("h", (address,), group.prefill.intervals)
        with pytest.raises(TransferFailed, match=r"DATA_LOSS: layer 1, block 2, head 1.*attempts"):
            await carry(group, {"holders": (holder,), "block_names": tuple(NAMES)})
        receiver = group.decode.receivers[0]
        await soon(lambda: receiver.open_transfers == 0)


async def test_a_pull_by_name_brings_what_is_there_and_leaves_out_what_is_not() -> None:
    async with network("loopback") as net, cluster(net) as group:
        pins = Pins({NAMES[0]: SOURCE[0], NAMES[1]: SOURCE[1], NAMES[3]: SOURCE[3]})
        async with serving(group, pins=pins) as address:
            parts = await fetched(by_name(at(address), KEY, Names(NAMES), [run_of(0, 4)]))
        assert {(run.first_block, payload) for run, payload in parts} == {
            (block, cells(group, block)) for block in (0, 1, 3)
        }
        assert pins.num_held == 0


async def test_a_pull_of_a_live_shipment_brings_its_cells_and_of_an_ended_one_nothing() -> None:
    async with network("loopback") as net, cluster(net) as group, serving(group) as address:
        key = group.key()
        expected, shipped = group.expect(key, NUM_TOKENS, TARGET), group.ship(key, NUM_TOKENS)
        group.seal_all(key, NUM_TOKENS, SOURCE)
        await asyncio.gather(*expected)
        pull = by_shipment(at(address), key, [run_of(3, 1)])
        assert await fetched(pull) == [(run_of(3, 1), cells(group, 3))]
        await group.commit(key)
        await asyncio.gather(*shipped)
        with pytest.raises(PullFailed, match="PERMISSION_DENIED: no shipment"):
            await fetched(pull)


async def test_a_shipment_of_smaller_blocks_is_asked_for_by_their_own_size() -> None:
    """Four of ours are as many bytes as one call may bring; as many more are of the shipment's."""
    spec = replace(SPEC, block_size=16)
    most = 4 * spec.bytes_per_block(3) // spec.num_layers
    config = replace(QUICK, max_call_bytes=most)
    async with (
        network("loopback") as net,
        cluster(net, spec=spec, decode_block_size=4, config=config) as group,
        serving(group, config=config) as address,
    ):
        key, num_tokens = group.key(), 16 * 6
        table = list(range(24))
        expected, shipped = group.expect(key, num_tokens, table), group.ship(key, num_tokens)
        group.seal_all(key, num_tokens, [*SOURCE[:4], 1, 2])
        await asyncio.gather(*expected)
        parts = await fetched(by_shipment(at(address), key, [run_of(0, 16, heads=(0, 1, 2))]))
        assert sum(run.num_blocks for run, _ in parts) == 16
        with pytest.raises(PullFailed, match=r"RESOURCE_EXHAUSTED: .* bytes are asked for"):
            await fetched(by_shipment(at(address), key, [run_of(0, 17, heads=(0, 1, 2))]))
        await group.commit(key)
        await asyncio.gather(*shipped)


async def test_a_block_that_has_changed_is_missing_and_suspected() -> None:
    async with network("loopback") as net, cluster(net) as group:
        pins = Pins({NAMES[0]: SOURCE[0], NAMES[1]: SOURCE[1]})
        store = group.prefill.stores[0]
        assert store.recheck(SOURCE[:2]) == []
        store.layer(1)[SOURCE[1], 0, 2, 1, 1] ^= 1
        async with serving(group, pins=pins) as address:
            parts = await fetched(
                by_name(at(address), KEY, Names(NAMES), [run_of(0, 1), run_of(1, 1)])
            )
        assert [run.first_block for run, _ in parts] == [0]
        assert pins.suspected == [SOURCE[1]]


@pytest.mark.parametrize(
    ("request_", "refusal"),
    [
        (FetchRequest(runs=[run_of(0, 1)]), "INVALID_ARGUMENT: name either"),
        (FetchRequest(names=[b"x" * 16], runs=[run_of(0, 1)]), "PERMISSION_DENIED: .* 32 bytes"),
        (FetchRequest(names=NAMES), "INVALID_ARGUMENT: 0 runs"),
        (FetchRequest(names=NAMES, runs=[run_of(0, 6)]), "INVALID_ARGUMENT: block 5 has no name"),
        (FetchRequest(names=NAMES, runs=[run_of(0, 2**32 - 1)]), "RESOURCE_EXHAUSTED: .* bytes"),
        (FetchRequest(names=NAMES, runs=[run_of(0, 1, layer=3)]), "INVALID_ARGUMENT: layer 3"),
        (FetchRequest(names=NAMES, runs=[run_of(0, 1, heads=[1, 1])]), "INVALID_ARGUMENT"),
        (FetchRequest(names=NAMES, runs=[run_of(0, 1, heads=[7])]), "FAILED_PRECONDITION"),
        (
            FetchRequest(names=NAMES, runs=[run_of(0, 1)], block_size=16, parts=4),
            "FAILED_PRECONDITION: 4 parts of blocks of 16 tokens .* names blocks of 4",
        ),
        (FetchRequest(names=NAMES, runs=[run_of(0, 1)], parts=8), "FAILED_PRECONDITION: 8 parts"),
        (
            FetchRequest(names=NAMES, runs=[run_of(0, 11)], parts=2),
            "INVALID_ARGUMENT: block 10 has no name among 10",
        ),
    ],
)
async def test_a_pull_without_right_or_bounds_is_refused(
    request_: FetchRequest, refusal: str
) -> None:
    async with (
        network("loopback") as net,
        cluster(net) as group,
        serving(group, pins=Pins({})) as address,
    ):
        with pytest.raises(PullFailed, match=refusal):
            await fetched(Pull(at(address), request_, list(request_.runs)))


async def test_who_knows_no_names_says_so_and_so_does_nobody_at_all() -> None:
    async with network("loopback") as net, cluster(net) as group, serving(group) as address:
        with pytest.raises(PullFailed, match="FAILED_PRECONDITION: nobody here knows blocks"):
            await fetched(by_name(at(address), KEY, Names(NAMES), [run_of(0, 1)]))
    with pytest.raises(PullFailed, match="UNAVAILABLE"):
        await fetched(by_name(at(address), KEY, Names(NAMES), [run_of(0, 1)]))


async def test_each_kind_of_damaged_cell_is_repaired_and_nothing_is_ever_wrong() -> None:
    """Bits flipped, cells swapped, stale, foreign and cut off, at random, a thousand of them."""
    rng = np.random.default_rng(11)
    num_damaged = 0
    last = b""

    async def damage(frame: Frame, payload: memoryview | None) -> list[Item]:
        nonlocal num_damaged, last
        if payload is None or rng.random() > 0.3:
            last = bytes(payload) if payload is not None else last
            return [(frame, payload)]
        raw = np.frombuffer(payload, dtype=np.uint8).copy()
        cell_bytes = SPEC.cell_bytes(SPEC.groups[0].planes[0])
        rows = raw.reshape(-1, cell_bytes)
        first, second = rng.integers(len(rows), size=2)
        kind = rng.integers(5)
        if kind == 0:
            raw[rng.integers(raw.nbytes)] ^= 1 << rng.integers(8)
        elif kind == 1:
            rows[[first, second]] = rows[[second, first]]
        elif kind == 2:
            rows[first] = 0
        elif kind == 3 and len(last) >= cell_bytes:
            rows[first] = np.frombuffer(last[:cell_bytes], dtype=np.uint8)
        else:
            raw = raw[: rng.integers(raw.nbytes)]
        num_damaged += bytes(raw) != bytes(payload)
        return [(frame, memoryview(raw.tobytes()))]

    async with (
        network("loopback") as net,
        cluster(net, 2, 3, wrap=lambda inner: FaultConnector(inner, damage)) as group,
        AsyncExitStack() as stack,
    ):
        sides = [serving(group, rank) for rank in range(2)]
        addresses = [await stack.enter_async_context(side) for side in sides]
        while num_damaged < 1000:
            await carry(group, {"source_addresses": tuple(addresses)})
            group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
            for store in group.decode.stores:
                store.poison()
        assert sum(receiver.counts.failed for receiver in group.decode.receivers) == 0
        assert sum(each.counts.damaged_chunks for each in group.decode.receivers) == num_damaged
