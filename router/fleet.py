"""The live workers: who they are, how to reach them, what we have sent them, whom we doubt.

    known      the mirror shows its lease; a channel is open
    refused    it cannot work with this router's model, or drains: shown with the reason
    doubted    a call failed; left out for a while that doubles with each failure
    gone       its lease lapsed or a later life replaced it: its legs end at once

Everything booked on a worker is booked and returned here, and `check()` proves the books.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import grpc.aio
import structlog

from engine.clock import Clock
from kvcache.block_hash import BlockHash, Namespace
from prefix_index.index import Manifest, Role, WorkerRecord
from router.doubts import Doubts, Party
from router.pace import Pace
from router.snapshot import Snapshot, take_snapshot
from router.worker import Booking, Worker


class Mirrors(Protocol):
    """The part of `prefix_index.mirror.Mirror` that the router reads."""

    def workers(self) -> Sequence[WorkerRecord]: ...

    def longest(self, names: Sequence[bytes]) -> Mapping[str, int]: ...


BlockNames = Callable[[Namespace, int], Sequence[BlockHash]]


class Fleet:
    """`unfit` says why a manifest can never serve this router's model; `connect` opens a channel.

    Who failed is left out for `doubt_s` at first: see `doubts`.
    """

    def __init__(
        self,
        mirror: Mirrors,
        unfit: Callable[[Manifest], str],
        connect: Callable[[str], grpc.aio.Channel],
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        doubt_s: float = 2.0,
    ) -> None:
        self._mirror = mirror
        self._unfit = unfit
        self._connect = connect
        self._clock = clock
        self._log = log
        self.doubts = Doubts(clock, doubt_s)
        self._pace = Pace(clock)
        self._workers: dict[str, Worker] = {}  # by instance
        self._leaving: list[grpc.aio.Channel] = []
        self._link_bytes_per_ms: dict[tuple[str, str], float] = {}  # by pair of instances

    async def run(self, every_s: float = 0.25) -> None:
        """Follow the mirror until cancelled."""
        while True:
            self.refresh()
            await self.close_leaving()
            await self._clock.sleep(every_s)

    async def close(self) -> None:
        for worker in self._workers.values():
            self._dismiss(worker, "the router stops")
        self._workers.clear()
        await self.close_leaving()

    async def close_leaving(self) -> None:
        leaving, self._leaving = self._leaving, []
        for channel in leaving:
            await channel.close(None)

    @property
    def workers(self) -> Collection[Worker]:
        return self._workers.values()

    def is_live(self, instance: str) -> bool:
        return instance in self._workers

    def num_live(self, role: Role) -> int:
        return sum(worker.record.role is role for worker in self._workers.values())

    def max_context(self, otherwise: int) -> int:
        """The shortest context among the workers that fit our model, so that all agree."""
        fit = [each.record.manifest for each in self._workers.values() if not each.unfit]
        return min([otherwise, *(manifest.max_context for manifest in fit)])

    def whats_missing(self) -> str:
        """Why no request could be served now; empty when one could."""
        self.refresh()
        decodes = [each for each in self._workers.values() if each.record.role is Role.DECODE]
        if not decodes:
            return "no decode replica is live"
        reasons = [worker.standing for worker in decodes]
        if not all(reasons):
            return ""
        return "; ".join(f"{each.name} {why}" for each, why in zip(decodes, reasons, strict=True))

    def refresh(self) -> None:
        """Take over what the mirror knows now."""
        records = {record.instance: record for record in self._mirror.workers()}
        names = {record.name: record for record in records.values()}
        for instance in [each for each in self._workers if each not in records]:
            worker = self._workers.pop(instance)
            later = names.get(worker.name)
            self._dismiss(
                worker,
                f"{worker.name} was replaced by its life of epoch {later.epoch}"
                if later
                else f"{worker.name} left or let its lease lapse",
            )
        for instance, record in records.items():
            if instance in self._workers:
                self._workers[instance].renew(record)
            else:
                self._welcome(record)

    def snapshot(
        self,
        num_tokens: int,
        key: bytes,
        names: BlockNames,
        without: Mapping[Party, str] | None = None,
        *,
        kept: Mapping[str, int] | None = None,
        trusting: bool = False,
    ) -> Snapshot:
        """What one decision is made from. `without` excludes parties; `trusting` forgets doubts.

        `kept` says how many of the prompt's tokens an instance holds that the index may not have
        heard of yet.
        """
        self.refresh()
        excluded = without or {}

        def refused(party: Party) -> str:
            return excluded.get(party, "") or ("" if trusting else self.doubts.why(party))

        workers = list(self._workers.values())
        matched = self._matches(names)
        for instance, kept_tokens in (kept or {}).items():
            if (worker := self._workers.get(instance)) is not None:
                matched[worker.name] = max(matched.get(worker.name, 0), kept_tokens)
        links = self._link_bytes_per_ms
        return take_snapshot(num_tokens, key, workers, matched, links, refused, self._pace)

    def book(
        self,
        computing: Worker,
        streaming: Worker,
        tokens: int,
        prompt_tokens: int = 0,
        compute_ms: float = 0.0,
    ) -> Booking:
        """`tokens` of a prompt's `prompt_tokens` are to be computed, in `compute_ms`."""
        prompt_tokens = max(tokens, prompt_tokens)
        computing.book(tokens, prompt_tokens)
        streaming.booked_requests += 1
        self._pace.note(compute_ms)
        return Booking(computing, streaming, tokens, prompt_tokens)

    def measure_link(self, pair: tuple[str, str], num_bytes: int, transfer_ms: float) -> None:
        """Learn a link's speed. Sending waits for compute, so a sample is a lower bound of it."""
        if num_bytes <= 0 or transfer_ms <= 0:
            return
        sample = num_bytes / transfer_ms
        known = self._link_bytes_per_ms.get(pair, sample)
        self._link_bytes_per_ms[pair] = max(sample, 0.95 * known + 0.05 * sample)

    def check(self) -> None:
        """Raise AssertionError unless everything booked was returned and no leg is left."""
        for worker in self._workers.values():
            assert worker.booked_tokens == 0, f"{worker.name}: {worker.booked_tokens} tokens booked"
            assert worker.booked_requests == 0, f"{worker.name}: {worker.booked_requests} booked"
            assert not worker.legs, f"{worker.name}: {len(worker.legs)} legs open"

    def _welcome(self, record: WorkerRecord) -> None:
        unfit = self._unfit(record.manifest)
        worker = Worker(record, self._connect(record.address), unfit)
        worker.foreign_tokens = record.load.queued_tokens
        self._workers[record.instance] = worker
        known = {"worker": record.name, "role": record.role.value, "epoch": record.epoch}
        if unfit:
            self._log.warning("worker.unfit", **known, reason=unfit)
        else:
            self._log.info("worker.found", **known, address=record.address)

    def _dismiss(self, worker: Worker, reason: str) -> None:
        instance = worker.record.instance
        for leg in list(worker.legs):
            leg.lose(reason)
        self._leaving.append(worker.channel)
        self.doubts.forget(instance)
        self._link_bytes_per_ms = {
            pair: speed for pair, speed in self._link_bytes_per_ms.items() if instance not in pair
        }
        self._log.info("worker.gone", worker=worker.name, reason=reason)

    def _matches(self, names: BlockNames) -> dict[str, int]:
        """Tokens of the prompt each worker holds, by worker name, from the root."""
        matched: dict[str, int] = {}
        shapes = {
            (each.record.manifest.namespace, each.record.manifest.block_size)
            for each in self._workers.values()
            if not each.unfit
        }
        for namespace, block_size in shapes:
            found = self._mirror.longest(names(Namespace(bytes.fromhex(namespace)), block_size))
            for name, num_blocks in found.items():
                matched[name] = max(matched.get(name, 0), num_blocks * block_size)
        return matched
