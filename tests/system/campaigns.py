"""Thousands of transfers between whole workers, broken in every way; what became of them, counted.

Each campaign runs workers of the checksum model in this process, compares every answer with the
model's own definition, and balances all books at the end. `run_campaigns` runs them in full,
`test_campaigns` a share of each.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from random import Random
from typing import Any

import numpy as np
import pytest

from engine.clock import MonotonicClock
from engine.sampling_params import SamplingParams
from kernels.crew import Steps
from kvcache.kv_store import KvStore
from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from model.source import open_model
from protos.transfer_pb2 import Frame
from tests.system.in_process import (
    Answer,
    DecodeWorker,
    PrefillWorker,
    calls_answered,
    decode_worker,
    disaggregated,
    prefill_worker,
)
from tests.system.stages import STAGES, cancelled
from transport.counts import TransferCounts
from transport.fault_wire import FaultConnector, FaultWire, Item
from transport.faults import DAMAGES, Faults, Kind
from transport.loopback_wire import LoopbackWire
from worker.refusal import Refused

SOURCE = open_model("checksum")
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
AT_ONCE = 8  # requests
CHUNK_TOKENS = 16  # of prefill: a chunk of one block in each layer
FREED_S = 0.5

Step = Callable[[int], None]
"""Told how much more of a campaign is done."""


@dataclass
class Outcome:
    """One campaign. It holds when `broken` is empty."""

    name: str
    done: int = 0
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)


def prompt_of(number: int, num_tokens: int) -> list[int]:
    random = Random(number)
    return [random.randrange(256) for _ in range(num_tokens)]


@dataclass
class Asked:
    """Requests, and how they ended."""

    prefill: PrefillWorker
    decode: DecodeWorker
    right: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)

    async def ask(self, prompt: list[int]) -> Answer | None:
        try:
            answer = await disaggregated(self.prefill, self.decode, prompt, PARAMS, CHUNK_TOKENS)
        except Refused as refused:
            self.failed.append(refused.reason)
            return None
        right = checksum_continuation(ChecksumConfig(), prompt, PARAMS.max_tokens)
        self.right += answer.tokens == [right]
        self.wrong += answer.tokens != [right]
        return answer

    @property
    def num_asked(self) -> int:
        return self.right + self.wrong + len(self.failed)

    @property
    def received(self) -> TransferCounts:
        """Of all decode ranks together."""
        counts = TransferCounts()
        for side in self.decode.sides:
            for name in TransferCounts.__slots__:
                more = getattr(side.counts, name)
                setattr(counts, name, getattr(counts, name) + more)
        return counts

    async def settled(self) -> None:
        await self.decode.settled()
        await self.prefill.settled()


async def each(numbers: Iterator[int], work: Callable[[int], Awaitable[Any]]) -> None:
    """`work` on every number, `AT_ONCE` at a time."""

    async def some() -> None:
        for number in numbers:
            await work(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(some())


class Commits:
    """The transfers whose Commit has reached prefill."""

    def __init__(self) -> None:
        self.transfer_ids: set[bytes] = set()

    async def note(self, frame: Frame, payload: memoryview | None) -> list[Item]:
        if frame.HasField("commit"):
            self.transfer_ids.add(frame.key.transfer_id)
        return [(frame, payload)]


async def damaged_cells(kind: Kind, count: int, seed: int, step: Step) -> Outcome:
    """Until `count` cells have come damaged: all are caught, and fetched again, over the link or,
    where it damages one transfer too often, by a call.

    What was damaged in a transfer that had to be given up counts as not repaired, all of it.
    """
    assert kind in DAMAGES
    outcome, wire, commits, random = (
        Outcome(f"{kind} cells"),
        LoopbackWire(),
        Commits(),
        Random(seed),
    )
    began = time.monotonic()
    with Faults.of(f"seed={seed} {kind}=0.1") as faults:
        faulty = FaultWire(wire, faults, MonotonicClock())
        async with (
            prefill_worker(
                SOURCE, FaultConnector(faulty, incoming=commits.note), tp=2, num_blocks=128
            ) as prefill,
            calls_answered(prefill),
            decode_worker(SOURCE, wire, tp=3, num_blocks=128) as decode,
        ):
            asked, told = Asked(prefill, decode), 0

            async def ask(number: int) -> None:
                nonlocal told
                await asked.ask(prompt_of(number, random.randint(17, 80)))
                before, told = told, min(count, faults.num_damaged_cells)
                step(told - before)

            numbers = itertools.count(seed << 20)
            await each(takewhile(lambda _: faults.num_damaged_cells < count, numbers), ask)
            await asked.settled()
            caught = asked.received.damaged_chunks
    ended = commits.transfer_ids
    lost = sum(each.num_cells for each in faults.log if each.transfer_id not in ended)
    share = 1 - lost / faults.num_damaged_cells
    outcome.done, outcome.seconds = faults.num_damaged_cells, time.monotonic() - began
    outcome.figures = {
        "transfers": asked.num_asked,
        "wrong_answers": asked.wrong,
        "given_up": len(asked.failed),
        "damaged_chunks": faults.count(),
        "caught_chunks": caught,
        "repaired_share": share,
    }
    outcome.expect(asked.wrong == 0, f"{asked.wrong} wrong answers")
    # of a transfer that was given up, what was still under way is not looked at
    if not asked.failed:
        outcome.expect(caught == faults.count(), f"{caught} of {faults.count()} chunks caught")
    outcome.expect(share >= 0.99, f"{share:.2%} repaired without recompute")
    return outcome


async def clean_transfers(count: int, seed: int, step: Step) -> Outcome:
    """Nothing is damaged, and nobody says that anything was."""
    outcome, wire, random = Outcome("clean transfers"), LoopbackWire(), Random(seed)
    began = time.monotonic()
    async with (
        prefill_worker(SOURCE, wire, num_blocks=64) as prefill,
        decode_worker(SOURCE, wire, tp=2, num_blocks=64) as decode,
    ):
        asked = Asked(prefill, decode)

        async def ask(number: int) -> None:
            await asked.ask(prompt_of(number, random.randint(17, 64)))
            step(1)

        await each(iter(range(seed << 20, (seed << 20) + count)), ask)
        await asked.settled()
        counts = asked.received
    alarms = counts.damaged_chunks + counts.bad_chunks + counts.resent_chunks + counts.resent_cells
    outcome.done, outcome.seconds = asked.right, time.monotonic() - began
    outcome.figures = {
        "transfers": asked.num_asked,
        "wrong_answers": asked.wrong,
        "given_up": len(asked.failed),
        "false_alarms": alarms,
    }
    outcome.expect(asked.right == count, f"{asked.right} of {count} right; {asked.failed[:3]}")
    outcome.expect(alarms == 0, f"{alarms} false alarms")
    return outcome


async def cancels(count: int, seed: int, step: Step) -> Outcome:
    """At every stage in turn, and up to 10 ms later; each time both workers are free soon."""
    outcome, wire, random = Outcome("cancels"), LoopbackWire(), Random(seed)
    began, took = time.monotonic(), dict[str, list[float]]()
    async with (
        prefill_worker(SOURCE, wire, num_blocks=24) as prefill,
        decode_worker(SOURCE, wire, num_blocks=24) as decode,
    ):
        for number, stage in zip(range(count), itertools.cycle(STAGES), strict=False):
            after_s = random.random() * 0.01 if number % 2 else 0.0
            freed = await cancelled(prefill, decode, stage, (seed << 20) + number, after_s)
            took.setdefault(stage, []).append(freed)
            step(1)
        await decode.settled()
        await prefill.settled()
    every = np.array([freed for each in took.values() for freed in each])
    outcome.done, outcome.seconds = len(every), time.monotonic() - began
    outcome.figures = {
        "p50_freed_ms": float(np.quantile(every, 0.5)) * 1000,
        "p99_freed_ms": float(np.quantile(every, 0.99)) * 1000,
        "max_freed_ms": float(every.max()) * 1000,
    }
    p99 = float(np.quantile(every, 0.99))
    outcome.expect(p99 <= FREED_S, f"p99 of the time to free is {p99:.3f} s")
    return outcome


async def eight_at_once(count: int, seed: int, step: Step) -> Outcome:
    """Rounds of eight transfers at once through pools just large enough, some cells damaged."""
    outcome, wire, random = Outcome("8 at once"), LoopbackWire(), Random(seed)
    began = time.monotonic()
    words = "duplicate=0.05 reorder=0.02 flip=0.02 swap=0.02 stale=0.02 foreign=0.02 truncate=0.02"
    with Faults.of(f"seed={seed}", words) as faults:
        faulty = FaultWire(wire, faults, MonotonicClock())
        async with (
            prefill_worker(SOURCE, faulty, tp=3, num_blocks=64, transfer_lease_s=3.0) as prefill,
            decode_worker(SOURCE, wire, tp=2, num_blocks=64, transfer_lease_s=3.0) as decode,
        ):
            asked = Asked(prefill, decode)
            for first in range(0, count * AT_ONCE, AT_ONCE):
                prompts = [prompt_of(first + i, random.randint(17, 100)) for i in range(AT_ONCE)]
                await asyncio.gather(*(asked.ask(prompt) for prompt in prompts))
                step(1)
            await asked.settled()
    outcome.done, outcome.seconds = count, time.monotonic() - began
    outcome.figures = {
        "transfers": asked.num_asked,
        "wrong_answers": asked.wrong,
        "given_up": len(asked.failed),
        "faults": faults.count(),
    }
    outcome.expect(asked.wrong == 0, f"{asked.wrong} wrong answers")
    share = asked.right / asked.num_asked
    outcome.expect(share >= 0.98, f"{share:.2%} ended right; {asked.failed[:3]}")
    return outcome


async def delayed_writers(count: int, seed: int, step: Step) -> Outcome:
    """Given up while a write is under way; the next request wants the same blocks."""
    outcome, wire = Outcome("delayed writers"), LoopbackWire()
    began, late = time.monotonic(), 0
    with slow_first_writes() as slow:
        async with (
            prefill_worker(SOURCE, wire, num_blocks=16) as prefill,
            decode_worker(SOURCE, wire, num_blocks=3) as decode,
        ):
            asked = Asked(prefill, decode)
            for number in range(count):
                slow.arm()
                prompt = prompt_of((seed << 20) + 2 * number, 40)
                first = asyncio.create_task(asked.ask(prompt))
                while not slow.writing.is_set() and not first.done():
                    await asyncio.sleep(0.001)
                late += slow.writing.is_set()
                first.cancel()
                with suppress(asyncio.CancelledError):
                    await first
                second = prompt_of((seed << 20) + 2 * number + 1, 41)
                await asked.ask(second)
                step(1)
            await asked.settled()
    outcome.done, outcome.seconds = count, time.monotonic() - began
    outcome.figures = {
        "caught_writing": late,
        "right_answers": asked.right,
        "wrong_answers": asked.wrong,
        "given_up": len(asked.failed),
    }
    outcome.expect(late >= count * 0.9, f"only {late} of {count} were writing when given up")
    outcome.expect(asked.right >= count, f"{asked.right} of {count} right; {asked.failed[:3]}")
    outcome.expect(asked.wrong == 0, f"{asked.wrong} with foreign bytes")
    return outcome


class SlowWrites:
    """The first scatter after `arm` takes its time, and says that it has begun."""

    def __init__(self) -> None:
        self.writing = threading.Event()
        self._armed = threading.Event()

    def arm(self) -> None:
        self.writing.clear()
        self._armed.set()

    def wait(self) -> None:
        if self._armed.is_set():
            self._armed.clear()
            self.writing.set()
            time.sleep(0.005)


@contextmanager
def slow_first_writes() -> Iterator[SlowWrites]:
    slow, scattering = SlowWrites(), KvStore.scattering

    def scatter_slowly(store: KvStore, *cells: Any) -> Steps[Any]:
        yield [slow.wait]
        return (yield from scattering(store, *cells))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvStore, "scattering", scatter_slowly)
        yield slow


async def late_completions(count: int, seed: int, step: Step) -> Outcome:
    """Every frame that ends something comes twice or more, and out of order."""
    outcome, wire = Outcome("late completions"), LoopbackWire()
    began = time.monotonic()
    ends = "commit", "chunk_ack", "seal_all", "abort", "drain_ack"
    words = " ".join(f"duplicate:{frame}=0.6" for frame in ends)
    with Faults.of(f"seed={seed}", words) as faults:
        faulty = FaultWire(wire, faults, MonotonicClock())
        async with (
            prefill_worker(SOURCE, faulty, num_blocks=64) as prefill,
            decode_worker(SOURCE, wire, num_blocks=64) as decode,
        ):
            asked, random = Asked(prefill, decode), Random(seed)

            async def ask(number: int) -> None:
                with suppress(TimeoutError):
                    leaves_s = random.random() * 0.03 if number % 3 == 0 else None
                    async with asyncio.timeout(leaves_s):
                        await asked.ask(prompt_of(number, random.randint(17, 60)))
                step(1)

            await each(iter(range(seed << 20, (seed << 20) + count)), ask)
            await asked.settled()
            late = asked.received.late_frames + sum(
                side.counts.late_frames for side in prefill.sides
            )
    outcome.done, outcome.seconds = count, time.monotonic() - began
    outcome.figures = {
        "duplicates": faults.count(),
        "ignored_late": late,
        "right_answers": asked.right,
        "wrong_answers": asked.wrong,
        "given_up": len(asked.failed),
    }
    outcome.expect(asked.wrong == 0, f"{asked.wrong} wrong answers")
    outcome.expect(not asked.failed, f"{len(asked.failed)} failed; {asked.failed[:3]}")
    outcome.expect(late > 0, "no late frame was counted")
    return outcome


Campaign = Callable[[int, int, Step], Coroutine[Any, Any, Outcome]]

CAMPAIGNS: dict[str, tuple[Campaign, int]] = {
    **{f"{kind} cells": (partial(damaged_cells, kind), 2_000) for kind in sorted(DAMAGES)},
    "clean transfers": (clean_transfers, 10_000),
    "cancels": (cancels, 10_000),
    "8 at once": (eight_at_once, 50),
    "delayed writers": (delayed_writers, 1_000),
    "late completions": (late_completions, 1_000),
}
"""By name, with how much of each is the whole of it."""
