"""Mistakes planted on purpose are found, each within a few histories that are well without it.

Those of the two state machines are looked for in `any_history`, those of what drives them in
`random_transfers`: by the bytes, by what free blocks bear, or by the audit of the ledgers.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from decode_worker.decoding import Decoding
from engine.sampling_params import SamplingParams
from kvcache.kv_store import KvStore
from kvferry.audit.audit import audit
from model.source import open_model
from prefill_worker.prefilling import Prefilling
from protos.transfer_pb2 import ChunkAck, Frame
from tests.system.in_process import decode_worker, open_legs, prefill_worker
from tests.transport.any_history import seeded_history
from tests.transport.broken import NUM_TOKENS, SOURCE, TARGET, with_fault
from tests.transport.harness import QUICK, cluster, network, soon
from tests.transport.random_transfers import random_transfers
from tests.transport.test_pull import carry, damaging, serving
from transport.arrivals import Arrivals
from transport.books import ReceivingBook
from transport.cells_servicer import CellsServicer
from transport.departures import Departures
from transport.fault_wire import FaultConnector, Item
from transport.from_prefill import PrefillFrames
from transport.incoming import Incoming, Verdict
from transport.loopback_wire import LoopbackWire
from transport.orders import Code, ShipmentKey, TransferFailed
from transport.outgoing import Outgoing
from transport.outgoing_pair import OutgoingPair
from transport.readers import Readers
from transport.repairs import Repairs
from transport.sealed_runs import Part
from transport.shipment import Receiving, Sending

NUM_HISTORIES = 120  # of 120 events each
NUM_TRANSFERS = 12  # histories of 6 transfers each, that are well
MOST_TRANSFERS = 100  # such histories until a mistake is found: threads have their own order

Plant = Callable[[pytest.MonkeyPatch], None]


def plant(owner: type, name: str, wrong: Callable[..., Any]) -> Plant:
    """`wrong` gets what is right as its first argument."""
    right = getattr(owner, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        return wrong(right, *args, **named)

    return lambda patch: patch.setattr(owner, name, wrapped)


# of the state machines


def skip_the_fence(right: Any, self: Incoming, num_scattering: int) -> None:
    right(self, 0)


def free_before_the_commit(right: Any, self: Outgoing) -> None:
    right(self)
    if self.state is Sending.AWAIT_COMMIT:
        self._move(Sending.RELEASED)


def one_commit_counts_for_all(right: Any, self: Outgoing, rank: int) -> bool:
    for pair in self.pairs.values():
        pair.committed = True
    return bool(right(self, rank))


def ignore_credit(right: Any, self: OutgoingPair, first_block: int, window_bytes: int) -> bool:
    return bool(right(self, first_block, 1 << 40))


def use_a_number_twice(right: Any, self: OutgoingPair) -> Part | None:
    part: Part | None = right(self)
    if part is not None and part.seq == 2 and self.num_chunks == 3:
        self.num_chunks = 2
    return part


def keep_what_was_not_verified(right: Any, self: Incoming) -> int:
    claimed_B = self._claimed_LBH.all(axis=(0, 2))
    return self.first_block + int(np.cumprod(claimed_B).sum())


def write_what_is_there_already(right: Any, self: Incoming, rank: int, chunk: Any) -> Verdict:
    if chunk.seq in self.pairs[rank].landed and not self.over:
        self.pairs[rank].landed.remove(chunk.seq)
        self.pairs[rank].busy.add(chunk.seq)
        return Verdict.TAKE
    verdict: Verdict = right(self, rank, chunk)
    return verdict


def forget_damaged_cells(
    right: Any, self: Incoming, rank: int, chunk: Any, bad: Any = None
) -> None:
    right(self, rank, chunk)


def forget_whose_call_it_was(right: Any, self: Repairs, cells: Any, failure: str = "") -> None:
    """A call that brought nothing is never over."""


MACHINES: Mapping[str, Plant] = {
    "skips the fence": plant(Incoming, "settle", skip_the_fence),
    "frees before the commit": plant(Outgoing, "advance", free_before_the_commit),
    "takes one commit for all": plant(Outgoing, "commit", one_commit_counts_for_all),
    "ignores credit": plant(OutgoingPair, "grant", ignore_credit),
    "uses a number twice": plant(OutgoingPair, "take", use_a_number_twice),
    "keeps what was not verified": lambda patch: patch.setattr(
        Incoming, "num_whole_blocks", property(partial(keep_what_was_not_verified, None))
    ),
    "writes what is there already": plant(Incoming, "offer", write_what_is_there_already),
    "forgets damaged cells": plant(Incoming, "landed", forget_damaged_cells),
    "trusts a late success": lambda patch: patch.setattr(
        Incoming, "over", property(lambda self: self.state is Receiving.COMMITTED)
    ),
    "waits for a call that is over": plant(Repairs, "end_call", forget_whose_call_it_was),
}


def look_through_histories() -> None:
    for seed in range(NUM_HISTORIES):
        seeded_history(seed)


@pytest.mark.parametrize("mistake", MACHINES)
def test_a_transfer_that_makes_a_mistake_is_found(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MACHINES[mistake](monkeypatch)
    with pytest.raises(AssertionError):
        look_through_histories()


def test_without_a_mistake_no_history_is_found_fault_with() -> None:
    look_through_histories()


# of what drives them


async def return_before_the_fence(
    right: Any, self: Arrivals, key: Any, reason: str, code: Code = Code.CANCELLED
) -> int:
    landing = self.live.get(key)
    if landing is None:
        return int(await right(self, key, reason, code))
    self.fail(landing, code, reason)
    return 0


async def let_go_under_a_reader(right: Any, self: Departures, departure: Any) -> None:
    departure.readers = Readers()
    await right(self, departure)


def skip_verification(
    right: Any, self: KvStore, layer: int, ids: Any, heads: Any, cells: Any, digests: Any = None
) -> Any:
    yield from right(self, layer, ids, heads, cells)
    return np.arange(0)


def catch_without_proof(right: Any, self: KvStore, *what: Any) -> Any:
    made = right(self, *what)
    if made is not None:
        made.proved = False
    return made


def write_to_the_next_head(
    right: Any, self: KvStore, layer: int, ids: Any, heads: Any, cells: Any, digests: Any
) -> Any:
    """The digests are of the right bytes, as they are when it is the offset that is wrong."""
    shape = (len(ids), len(heads), -1)
    moved, proofs = (np.roll(each.reshape(shape), 1, axis=1) for each in (cells, digests))
    return right(self, layer, ids, heads, moved.reshape(-1), proofs.reshape(-1))


async def acknowledge_before_writing(
    right: Any, self: PrefillFrames, landing: Any, port: Any, frame: Any, payload: Any
) -> None:
    port.post(Frame(key=landing.order.key.to_proto(), chunk_ack=ChunkAck(seq=frame.chunk.seq)))
    await right(self, landing, port, frame, payload)


TCP = "over tcp: "
DRIVERS: Mapping[str, tuple[Plant, str]] = {
    "returns before the fence": (plant(Arrivals, "abort", return_before_the_fence), "drop=0"),
    "lets go under a reader": (plant(Departures, "_drain", let_go_under_a_reader), "drop=0"),
    "skips verification": (plant(KvStore, "scattering", skip_verification), "flip=0.2"),
    f"{TCP}skips verification": (plant(KvStore, "catcher", catch_without_proof), "flip=0.2"),
    "writes to the next head": (plant(KvStore, "scattering", write_to_the_next_head), "drop=0"),
    "acknowledges before writing": (
        plant(PrefillFrames, "_take", acknowledge_before_writing),
        "cut:chunk@30",
    ),
}


@pytest.mark.parametrize("mistake", DRIVERS)
async def test_a_driver_that_makes_a_mistake_is_found(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, words = DRIVERS[mistake]
    put(monkeypatch)
    wire = "tcp" if mistake.startswith(TCP) else "loopback"
    with pytest.raises((AssertionError, ExceptionGroup)) as found:
        for seed in range(MOST_TRANSFERS):
            await random_transfers(seed, words, wire=wire)
    if isinstance(found.value, ExceptionGroup):
        assert found.group_contains(AssertionError)


@pytest.mark.parametrize("words", sorted({words for _, words in DRIVERS.values()}))
async def test_without_a_mistake_no_transfer_is_found_fault_with(words: str) -> None:
    for seed in range(NUM_TRANSFERS):
        await random_transfers(seed, words)


async def retry_past_a_late_abort() -> None:
    """The first attempt's Abort reaches prefill in the middle of the second."""
    late: list[Item] = []

    async def hold_the_first_abort(frame: Frame, payload: memoryview | None) -> list[Item]:
        if frame.HasField("abort") and frame.key.attempt == 1:
            late.append((frame, payload))
            return []
        if frame.HasField("credit") and frame.key.attempt == 2:
            return [(frame, payload), *late]
        return [(frame, payload)]

    wrap = with_fault(incoming=hold_the_first_abort)
    async with network("loopback") as net, cluster(net, wrap=wrap) as group:
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        first = group.key()
        legs = [*group.expect(first, NUM_TOKENS, TARGET), *group.ship(first, NUM_TOKENS)]
        await soon(lambda: receiver.open_transfers == 1)
        await receiver.abort(first, "the first attempt has failed")
        await shipper.abort(first, "the first attempt has failed")
        await asyncio.gather(*legs, return_exceptions=True)
        second = replace(first, attempt=2)
        expected, shipped = group.expect(second, NUM_TOKENS, TARGET), group.ship(second, NUM_TOKENS)
        group.seal_all(second, NUM_TOKENS, SOURCE)
        await asyncio.gather(*expected)
        group.check_blocks(NUM_TOKENS, SOURCE, TARGET)
        await group.commit(second)
        await asyncio.gather(*shipped)
        assert late


async def test_a_transfer_that_forgets_its_attempt_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await retry_past_a_late_abort()

    begun: list[ShipmentKey] = []

    def note(right: Any, self: Departures, order: Any) -> Any:
        begun.append(order.key)
        return right(self, order)

    def forget(right: Any, frame_key: Any) -> ShipmentKey:
        key: ShipmentKey = right(frame_key)
        return replace(key, attempt=max(each.attempt for each in [key, *begun]))

    plant(Departures, "begin", note)(monkeypatch)
    plant(ShipmentKey, "from_proto", forget)(monkeypatch)
    with pytest.raises(TransferFailed, match="the first attempt has failed"):
        await retry_past_a_late_abort()


async def never_seal(frame: Frame, payload: memoryview | None) -> list[Item]:
    """So that no transfer is over before it is cancelled, however slow we are."""
    return [] if frame.HasField("seal_all") else [(frame, payload)]


async def cancel_in_mid_transfer(prefill_tp: int = 1, decode_tp: int = 1) -> None:
    source, wire = open_model("checksum"), LoopbackWire()
    unsealed = FaultConnector(wire, outgoing=never_seal)
    async with (
        prefill_worker(source, unsealed, prefill_tp, num_blocks=16) as prefill,
        decode_worker(source, wire, decode_tp, num_blocks=16) as decode,
    ):
        params = SamplingParams(max_tokens=4, temperature=0.0)
        legs = open_legs(prefill, decode, list(range(100)), params, max_chunk_tokens=16)
        await soon(lambda: decode.engine.books().used_blocks > 0)
        await soon(lambda: prefill.engine.books().held_requests > 0)  # all is sent but the seal
        for leg in legs:
            leg.cancel()
        await asyncio.gather(*legs, return_exceptions=True)
        await asyncio.gather(prefill.cleanups.drain(), decode.cleanups.drain())
        await asyncio.sleep(0.05)  # the running step
        audit([each.extract() for each in prefill.ledgers + decode.ledgers], at_rest=True).check()


async def test_a_worker_that_drops_its_finally_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    await cancel_in_mid_transfer()

    async def let_nothing_go(right: Any, self: Decoding, call: Any) -> None:
        """What the `finally` of a call is for."""

    plant(Decoding, "_let_go", let_nothing_go)(monkeypatch)
    with pytest.raises(AssertionError, match="HELD_AT_REST"):
        await cancel_in_mid_transfer()


async def wait_for_rank_0_alone(right: Any, self: Decoding, rank: int, key: Any) -> int:
    return int(await right(self, rank, key)) if rank == 0 else 0


async def ask_rank_0_alone(right: Any, self: Prefilling, prompt: Any) -> None:
    self._ranks = self._ranks[:1]
    await right(self, prompt)


@pytest.mark.parametrize(
    ("tps", "mistake"),
    [
        ((1, 3), plant(Decoding, "_abort", wait_for_rank_0_alone)),
        ((3, 1), plant(Prefilling, "_let_go", ask_rank_0_alone)),
    ],
    ids=["decode", "prefill"],
)
async def test_a_worker_that_does_not_wait_for_every_rank_is_found(
    tps: tuple[int, int], mistake: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cancel_in_mid_transfer(*tps)
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="FREED_UNCONFIRMED"):
        await cancel_in_mid_transfer(*tps)


async def fetch_by_a_call() -> None:
    wrap, config = with_fault(outgoing=damaging), replace(QUICK, max_link_asks=0)
    async with (
        network("loopback") as net,
        cluster(net, wrap=wrap, config=config) as group,
        serving(group) as address,
    ):
        await carry(group, {"source_addresses": (address,)})


def note_nothing(right: Any, self: CellsServicer, request: Any, answer: Any) -> None:
    """What is handed out is in nobody's books."""


def forget_who_lent_it(right: Any, self: ReceivingBook, key: Any, lender: Any, cells: Any) -> None:
    """What came by a call is as if it had come over the link."""


@pytest.mark.parametrize(
    ("mistake", "rule"),
    [
        (plant(CellsServicer, "_note", note_nothing), "NEVER_LENT"),
        (plant(ReceivingBook, "borrowed", forget_who_lent_it), "NEVER_FETCHED"),
    ],
    ids=["the lender's", "the borrower's"],
)
async def test_cells_that_come_by_a_call_past_the_books_are_found(
    mistake: Plant, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fetch_by_a_call()
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=rule):
        await fetch_by_a_call()
