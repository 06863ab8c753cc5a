"""The live workers: who they are, how to reach them, what we have sent them, whom we doubt.

    known      the mirror shows its lease; a channel is open
    refused    it cannot work with this router's model, or drains: shown with the reason
    doubted    a call failed; left out for a while that doubles with each failure
    gone       its lease lapsed or a later life replaced it: its legs end at once

Everything booked on a worker is booked and returned here, and `check()` proves the books.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

import grpc.aio
import structlog

from engine.clock import Clock
from kvcache.block_hash import BlockHash, Namespace
from prefix_index.index import Manifest, Role, WorkerRecord
from prefix_index.prefix_table import Run
from router.curves import LinkCurve, least_of
from router.doubts import Doubts, Party
from router.evenness import compare_work
from router.kinds import compare, compare_links
from router.news import News
from router.pace import Pace
from router.sightings import Sightings
from router.snapshot import NO_MATCH, Asked, Match, Snapshot, State, take_snapshot
from router.worker import UNFETCHED, UNTRIED, Booking, Link, Worker

COMPARE_S = 1.0


class Mirrors(Protocol):
    """The part of `prefix_index.mirror.Mirror` that the router reads."""

    @property
    def version(self) -> int:
        """Another one whenever `workers` has changed."""

    def workers(self) -> Sequence[WorkerRecord]: ...

    def runs(self, names: Sequence[bytes]) -> Mapping[str, Run]: ...


NO_RUN = Run(0, 0)
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
        self.news = News(clock, self._tells)
        self.sightings = Sightings(clock, self.news)
        self._pace = Pace(clock)
        self._workers: dict[str, Worker] = {}  # by instance
        self._version = -1  # of the mirror, when it was last read
        self._leaving: list[grpc.aio.Channel] = []
        self._compared_at = clock.now()
        self._compared: set[str] = set()  # instances
        self._sides: tuple[dict[str, Worker], dict[str, Worker]] = ({}, {})  # prefill's, decode's
        self._shapes: Mapping[tuple[str, int], Sequence[Worker]] = {}
        self._untried = self._fastest = UNTRIED
        self._links: dict[tuple[str, str], Link] = {}  # by pair of instances
        self._unfetched = self._fastest_fetch = UNFETCHED
        self._fetches: dict[tuple[str, str], Link] = {}  # by instances: holder, who fetches

    async def run(self, every_s: float = 0.25) -> None:
        """Follow the mirror until cancelled."""
        while True:
            self.refresh()
            self.news.listen()
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
        if self._version == self._mirror.version:
            return
        self._version = self._mirror.version
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
                self._note_quarantines(self._workers[instance], record)
                others = self._workers[instance].renew(record)
                if others:
                    worker = self._workers[instance]
                    worker.recent.add(others * self._pace.prompt_ms, self._clock.now())
                    self._pace.note_others(others)
                    self.sightings.others_computed(instance, others)
            else:
                self._welcome(record)

    def snapshot(
        self,
        asked: Asked,
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
        refused = {} if trusting else self.doubts.reasons()
        refused.update(without or {})
        self._compare_workers()
        matched = self._matches(names)
        for instance, kept_tokens in (kept or {}).items():
            if (worker := self._workers.get(instance)) is not None:
                known = matched.get(worker.name, NO_MATCH)
                matched[worker.name] = replace(known, tokens=max(known.tokens, kept_tokens))
        state = State(
            self._links,
            self._untried,
            self._fastest,
            self._pace,
            self._clock.now(),
            self._fetches,
            self._unfetched,
            self._fastest_fetch,
        )
        return take_snapshot(asked, *self._sides, matched, state, refused)

    def book(
        self,
        computing: Worker,
        streaming: Worker,
        tokens: int,
        prompt_tokens: int = 0,
        compute_ms: float = 0.0,
        shipped_bytes: int = 0,
        holder: Worker | None = None,
        fetched_bytes: int = 0,
    ) -> Booking:
        """`tokens` of a prompt's `prompt_tokens` are to be computed, in `compute_ms`, and shipped
        where the two are not one; others are fetched from `holder` before.
        """
        link = None if computing is streaming else self._link(computing, streaming)
        booking = Booking(
            computing,
            streaming,
            tokens,
            max(tokens, prompt_tokens),
            compute_ms,
            self._clock,
            link,
            shipped_bytes,
        )
        if holder is not None:
            pair = (holder.record.instance, computing.record.instance)
            booking.fetch = self._fetches.setdefault(pair, Link(curve=self._unfetched))
            booking.fetch_bytes = fetched_bytes
        booking.open()
        self._pace.note(compute_ms)
        return booking

    def note_output(self, num_tokens: int) -> None:
        """A request has ended with so many tokens a choice."""
        self._pace.note_output(num_tokens)

    def _compare_workers(self) -> None:
        """Take over what their curves have learned, from time to time and for who is new."""
        now = self._clock.now()
        if now - self._compared_at >= COMPARE_S or self._compared != self._workers.keys():
            compare(self._workers.values())
            self._untried = compare_links(self._links)
            self._fastest = _least(self._untried, self._links)
            self._unfetched = compare_links(self._fetches, UNFETCHED)
            self._fastest_fetch = _least(self._unfetched, self._fetches)
            self._compared_at, self._compared = now, set(self._workers)
            self._sides = self._side(Role.PREFILL), self._side(Role.DECODE)
            compare_work(self._sides[0].values(), now)
            self._shapes = self._by_shape()

    def _side(self, role: Role) -> dict[str, Worker]:
        """By name, in order; of two lives seen at once, the later one."""
        chosen = sorted(self._workers.values(), key=lambda each: (each.name, each.record.epoch))
        return {each.name: each for each in chosen if each.record.role is role}

    def _by_shape(self) -> dict[tuple[str, int], list[Worker]]:
        """Those that fit, by how they name blocks and how large their blocks are."""
        found = defaultdict[tuple[str, int], list[Worker]](list)
        for worker in chain(*(side.values() for side in self._sides)):
            if not worker.unfit:
                manifest = worker.record.manifest
                found[manifest.namespace, manifest.block_size].append(worker)
        return found

    def _link(self, prefill: Worker, decode: Worker) -> Link:
        pair = (prefill.record.instance, decode.record.instance)
        return self._links.setdefault(pair, Link(curve=self._untried))

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
        self.sightings.opened(record.instance, record.load.total_blocks)
        known = {"worker": record.name, "role": record.role.value, "epoch": record.epoch}
        if unfit:
            self._log.warning("worker.unfit", **known, reason=unfit)
        else:
            self._log.info("worker.found", **known, address=record.address)

    def _note_quarantines(self, worker: Worker, record: WorkerRecord) -> None:
        """Say what is new in what a worker leaves alone, and what is over."""
        before = {each.subject: each for each in worker.record.load.quarantines}
        now = {each.subject: each for each in record.load.quarantines}
        for subject, each in now.items():
            if subject not in before:
                known = {"sender": each.prefill, "wire": each.wire, "reason": each.reason}
                self._log.warning("worker.quarantine", worker=worker.name, **known)
        for sender, _, wire in before.keys() - now.keys():
            self._log.info("worker.quarantine_over", worker=worker.name, sender=sender, wire=wire)

    def _dismiss(self, worker: Worker, reason: str) -> None:
        instance = worker.record.instance
        for leg in list(worker.legs):
            leg.lose(reason)
        self._leaving.append(worker.channel)
        self.doubts.forget(instance)
        self.sightings.closed(instance)
        self._links = _without(instance, self._links)
        self._fetches = _without(instance, self._fetches)
        self._log.info("worker.gone", worker=worker.name, reason=reason)

    def _tells(self, instance: str, name: bytes) -> bool | None:
        """What the mirror knows of one block; None where the instance is no more."""
        worker = self._workers.get(instance)
        return None if worker is None else worker.name in self._mirror.runs((name,))

    def _matches(self, names: BlockNames) -> dict[str, Match]:
        """How much of the prompt each worker holds, by worker name; of most that is nothing."""
        matched: dict[str, Match] = {}
        for (namespace, size), workers in self._shapes.items():
            named = names(Namespace(bytes.fromhex(namespace)), size)
            held = self._mirror.runs(named)
            sent = self.sightings.expected(named)
            for worker in workers:
                record = worker.record
                if record.name in held or record.instance in sent:
                    run = held.get(record.name, NO_RUN)
                    expected = max(run.num_blocks, sent.get(record.instance, 0))
                    tokens, host_tokens = run.num_blocks * size, run.num_in_host * size
                    matched[record.name] = Match(tokens, expected * size, host_tokens)
        return matched


def _least(usual: LinkCurve, links: Mapping[tuple[str, str], Link]) -> LinkCurve:
    return least_of([usual, *(each.curve for each in links.values())])


def _without(instance: str, links: Mapping[tuple[str, str], Link]) -> dict[tuple[str, str], Link]:
    return {pair: link for pair, link in links.items() if instance not in pair}
