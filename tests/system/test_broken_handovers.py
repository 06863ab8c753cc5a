"""Handovers that end early or cannot begin: whose the blocks are, and when they are free again."""

import asyncio
import itertools
import threading
import time
from typing import Any

import grpc
import pytest

from decode_worker.settings import DecodeSettings
from engine.sampling_params import SamplingParams
from kernels.crew import Steps
from kvcache.kv_store import KvStore
from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from model.source import open_model
from prefill_worker.settings import PrefillSettings
from protos.transfer_pb2 import Frame
from tests.system.in_process import (
    DecodeWorker,
    PrefillWorker,
    decode_worker,
    disaggregated,
    open_legs,
    prefill_request,
    prefill_worker,
    work_request,
)
from tests.transport.harness import soon
from transport.fault_wire import FaultConnector, Item
from transport.loopback_wire import LoopbackWire
from worker.rank_parts import manifest_of
from worker.refusal import Refused

SOURCE = open_model("checksum")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * i * 7 + i) % 256 for i in range(length)]


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return checksum_continuation(ChecksumConfig(), prompt, num_tokens)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("spare_blocks", [0, 3])
async def test_blocks_of_a_cancelled_transfer_are_nobodys_until_its_last_write_has_ended(
    monkeypatch: pytest.MonkeyPatch, spare_blocks: int
) -> None:
    """The next request waits for them, or takes others; either way it reads only its own KV."""
    writes, writing, may_write = itertools.count(), asyncio.Event(), threading.Event()
    loop, scattering = asyncio.get_running_loop(), KvStore.scattering

    def wait() -> None:
        loop.call_soon_threadsafe(writing.set)
        assert may_write.wait(10)

    def first_is_slow(store: KvStore, *cells: Any) -> Steps[Any]:
        if next(writes) == 0:
            yield [wait]
        return (yield from scattering(store, *cells))

    monkeypatch.setattr(KvStore, "scattering", first_is_slow)
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, num_blocks=32) as prefill,
        decode_worker(SOURCE, wire, num_blocks=3 + spare_blocks) as decode,
    ):
        first = asyncio.create_task(disaggregated(prefill, decode, prompt_of(40), greedy(5)))
        await writing.wait()
        first.cancel()
        await asyncio.wait([first], timeout=1)
        prompt = prompt_of(41, seed=1)
        second = asyncio.create_task(disaggregated(prefill, decode, prompt, greedy(5)))
        await asyncio.wait([second], timeout=5 if spare_blocks else 0.5)
        assert second.done() == (spare_blocks == 3)
        assert decode.engine.books().reserved_blocks == 3  # still the first one's
        may_write.set()
        assert (await second).tokens == [expected(prompt, 5)]
        await decode.settled()
        await prefill.settled()


async def test_50_cancelled_transfers_whose_ends_are_lost_leave_room_for_the_next() -> None:
    lossy = True

    async def lose_ends(frame: Frame, payload: memoryview | None) -> list[Item]:
        is_end = frame.WhichOneof("body") in ("seal_all", "commit", "abort", "drain_ack")
        return [] if lossy and is_end else [(frame, payload)]

    wire = LoopbackWire()
    changes: dict[str, Any] = {"num_blocks": 60, "max_running": 64, "transfer_lease_s": 1.0}
    async with (
        prefill_worker(SOURCE, FaultConnector(wire, lose_ends, lose_ends), **changes) as prefill,
        decode_worker(SOURCE, wire, **changes) as decode,
    ):
        legs = [open_legs(prefill, decode, prompt_of(12, seed), greedy(5)) for seed in range(50)]
        async with asyncio.timeout(5):
            while prefill.engine.books().held_requests < 50:
                await asyncio.sleep(0.005)
            while decode.engine.books().reserved_blocks < 50:  # whole but for their ends
                await asyncio.sleep(0.005)
        began = time.monotonic()
        for _, decode_leg in legs:
            decode_leg.cancel()
        await decode.settled()
        ends = await asyncio.gather(
            *(prefill_leg for prefill_leg, _ in legs), return_exceptions=True
        )
        await prefill.settled()
        assert time.monotonic() - began < 1.0 + 1.0 + 1.0  # the lease, the reaper, a slow machine
        assert {end.code for end in ends if isinstance(end, Refused)} == {
            grpc.StatusCode.UNAVAILABLE
        }
        lossy = False
        prompt = prompt_of(16 * 55, seed=51)
        answer = await disaggregated(prefill, decode, prompt, greedy(5))
        assert answer.tokens == [expected(prompt, 5)]


async def hand_in(prefill: PrefillWorker, decode: DecodeWorker, seed: int) -> "asyncio.Task[None]":
    """A prefill call without its decode call, as far as its first token."""
    assert prefill.prefilling is not None
    sampled = asyncio.Event()
    work = work_request(prompt_of(40, seed), greedy(5))
    events = prefill.prefilling.run(prefill_request(work, work.request_id.encode(), decode))

    async def read() -> None:
        async for event in events:
            if event.HasField("first_tokens"):
                sampled.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(sampled.wait(), 5)
    await soon(lambda: prefill.engine.books().held_requests == 1)  # the token came first
    return task


async def test_a_client_that_leaves_between_two_workers_frees_prefill_in_half_a_second() -> None:
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, num_blocks=16) as prefill,
        decode_worker(SOURCE, wire, num_blocks=16) as decode,
    ):
        took = []
        for seed in range(100):
            leg = await hand_in(prefill, decode, seed)
            began = time.monotonic()
            leg.cancel()
            async with asyncio.timeout(5):
                await asyncio.wait([leg])
                await prefill.settled()
            took.append(time.monotonic() - began)
        assert sorted(took)[98] < 0.5  # once the machine itself may have been away
        await decode.settled()
        prompt = prompt_of(40, seed=101)
        assert (await disaggregated(prefill, decode, prompt, greedy(5))).tokens == [
            expected(prompt, 5)
        ]


async def test_a_prompt_that_no_decode_worker_asks_for_is_freed_by_its_lease() -> None:
    wire = LoopbackWire()
    async with (
        prefill_worker(SOURCE, wire, num_blocks=16, transfer_lease_s=1.0) as prefill,
        decode_worker(SOURCE, wire, num_blocks=16) as decode,
    ):
        leg = await hand_in(prefill, decode, seed=0)
        async with asyncio.timeout(1.0 + 1.0 + 1.0):  # the lease, the reaper, a slow machine
            with pytest.raises(Refused, match=f"{decode.identity.worker} rank 0 fell silent"):
                await leg
            await prefill.settled()
        assert prefill.sides[0].counts.expired == 1


async def test_workers_of_other_weights_refuse_each_other_and_name_both_fingerprints() -> None:
    """Should a router ever bring them together."""
    wire = LoopbackWire()
    other = open_model("checksum:7")
    async with (
        prefill_worker(other, wire, num_blocks=16) as prefill,
        decode_worker(SOURCE, wire, num_blocks=16) as decode,
    ):
        prefill_leg, decode_leg = open_legs(prefill, decode, prompt_of(40), greedy(5))
        with pytest.raises(Refused) as refused:
            await prefill_leg
        assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        theirs, ours = (
            manifest_of(settings, source).digest().hex()
            for settings, source in (
                (PrefillSettings(name="p"), other),
                (DecodeSettings(name="d"), SOURCE),
            )
        )
        assert f"has a manifest with digest {theirs}, ours is {ours}" in refused.value.reason
        decode_leg.cancel()
        await asyncio.wait([decode_leg])
        await prefill.settled()
        await decode.settled()
