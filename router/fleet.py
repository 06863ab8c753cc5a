"""The live workers: who they are, how to reach them, what we have sent them, whom we doubt.

    known      the mirror shows its lease; a channel is open
    refused    it cannot work with this router's model, or drains: shown with the reason
    doubted    a call failed; left out for a while that doubles with each failure
    gone       its lease lapsed or a later life replaced it: its legs end at once

Everything booked on a worker is booked and returned here, and `check()` proves the books.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
import structlog

from engine.clock import Clock
from kvcache.block_hash import BlockHash, Namespace
from prefix_index.index import Load, Manifest, Role, WorkerRecord
from router import policy
from router.doubts import Doubts, Party
from router.worker import Booking, Worker

NO_SPEED_YET_MS = 1.0  # per prompt token, until a worker has measured its own
BYTES_PER_VALUE = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
PLANES = 2  # K and V


class Mirrors(Protocol):
    """The part of `prefix_index.mirror.Mirror` that the router reads."""

    def workers(self) -> Sequence[WorkerRecord]: ...

    def longest(self, names: Sequence[bytes]) -> Mapping[str, int]: ...


BlockNames = Callable[[Namespace, int], Sequence[BlockHash]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet as one decision sees it, and the workers its names stand for."""

    prompt: policy.Prompt
    replicas: policy.Replicas
    prefills: Mapping[str, Worker]
    decodes: Mapping[str, Worker]
    best_match: int  # blocks that some usable worker holds


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
        reasons = [_standing(worker) for worker in decodes]
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
        trusting: bool = False,
    ) -> Snapshot:
        """What `policy.choose` needs. `without` excludes parties, each with a reason."""
        self.refresh()
        without = without or {}
        prefills = {each.name: each for each in self._of(Role.PREFILL)}
        decodes = {each.name: each for each in self._of(Role.DECODE)}
        shape = _shape([*decodes.values(), *prefills.values()])
        matched = self._matches(names)
        seen = {
            worker.record.instance: self._replica(worker, shape, matched, without)
            for worker in self._workers.values()
        }
        replicas = policy.Replicas(
            prefills=[seen[each.record.instance] for each in prefills.values()],
            decodes=[seen[each.record.instance] for each in decodes.values()],
            refused_pairs=self._refused_pairs(prefills, decodes, without),
            link_bytes_per_ms={
                (p.name, d.name): self._link_bytes_per_ms[pair]
                for p in prefills.values()
                for d in decodes.values()
                if (pair := (p.record.instance, d.record.instance)) in self._link_bytes_per_ms
            },
        )
        usable = [each.matched_blocks for each in seen.values() if not each.refused]
        return Snapshot(
            prompt=_prompt(num_tokens, key, shape),
            replicas=replicas,
            prefills=prefills,
            decodes=decodes,
            best_match=max(usable, default=0),
        )

    def book(self, computing: Worker, streaming: Worker, tokens: int) -> Booking:
        computing.booked_tokens += tokens
        streaming.booked_requests += 1
        return Booking(computing, streaming, tokens)

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

    def _of(self, role: Role) -> list[Worker]:
        """By name; of two lives seen at once, the later one."""
        workers = [each for each in self._workers.values() if each.record.role is role]
        return sorted(workers, key=lambda worker: (worker.name, worker.record.epoch))

    def _refusal(self, worker: Worker, without: Mapping[Party, str]) -> str:
        instance = worker.record.instance
        if worker.unfit:
            return worker.unfit
        if worker.record.load.draining:
            return "is draining"
        return without.get(instance, "") or self.doubts.why(instance)

    def _refused_pairs(
        self,
        prefills: Mapping[str, Worker],
        decodes: Mapping[str, Worker],
        without: Mapping[Party, str],
    ) -> dict[tuple[str, str], str]:
        refused: dict[tuple[str, str], str] = {}
        for prefill in prefills.values():
            for decode in decodes.values():
                pair = (prefill.record.instance, decode.record.instance)
                why = (
                    prefill.record.manifest.mismatch(decode.record.manifest)
                    or without.get(pair)
                    or self.doubts.why(pair)
                )
                if why:
                    both = f"{prefill.name} and {decode.name}"
                    refused[prefill.name, decode.name] = f"{both}: {why}"
        return refused

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

    def _replica(
        self,
        worker: Worker,
        shape: Manifest | None,
        matched: Mapping[str, int],
        without: Mapping[Party, str],
    ) -> policy.Replica:
        assert shape is not None
        load: Load = worker.record.load
        return policy.Replica(
            name=worker.name,
            ms_per_token=load.prefill_ms_per_token or NO_SPEED_YET_MS,
            queued_tokens=worker.foreign_tokens + worker.booked_tokens,
            matched_blocks=matched.get(worker.name, 0) // shape.block_size,
            running=max(load.running, worker.booked_requests),
            waiting=load.waiting,
            step_ms=load.decode_step_ms,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            wires=worker.record.manifest.wires,
            refused=self._refusal(worker, without),
        )


def _shape(workers: Iterable[Worker]) -> Manifest | None:
    """The geometry that blocks are counted in: that of the first worker that fits, decode first."""
    ordered = sorted(workers, key=lambda worker: bool(worker.unfit))
    return ordered[0].record.manifest if ordered else None


def _prompt(num_tokens: int, key: bytes, shape: Manifest | None) -> policy.Prompt:
    if shape is None:
        return policy.Prompt(num_tokens, block_size=16, block_bytes=0, num_layers=1, key=key)
    cells = shape.num_layers * shape.num_kv_heads * PLANES
    value_bytes = BYTES_PER_VALUE.get(shape.dtype, 4)
    return policy.Prompt(
        num_tokens=num_tokens,
        block_size=shape.block_size,
        block_bytes=cells * shape.block_size * shape.head_dim * value_bytes,
        num_layers=shape.num_layers,
        key=key,
    )
