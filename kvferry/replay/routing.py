"""One router of a replay: its own mirror of the index, fleet, sightings and sessions.

Each request takes the way that `router.generation` gives it: a snapshot of the fleet from the
mirror, the policy's choice, a booking; decode makes room while prefill computes, blocks are
shipped, decode streams. A worker that dies is doubted, and the request tries again without it,
unless tokens had been streamed.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast

import grpc.aio

from engine.clock import Clock
from kvcache.block_hash import BlockHash, Namespace, index_key
from kvferry.replay.crew import Crew, unit_tokens
from kvferry.replay.decode_replica import DecodeReplica, Place
from kvferry.replay.gate import MAX_TOKENS, Gate
from kvferry.replay.life import LifeOver
from kvferry.replay.options import Options
from kvferry.replay.outcome import Decision, Failed, Served
from kvferry.replay.prefill_replica import Computed, Fetched, PrefillReplica
from kvferry.replay.rivals import Pick, Policy
from kvferry.replay.trace import Arrival, Trace
from prefix_index.index import Role
from prefix_index.mirror import Mirror
from router import policy, ways
from router.entrance import Bounds
from router.errors import RequestFailed
from router.fleet import Fleet
from router.forecast import forecast
from router.hit_rate import HitRate, account
from router.journal import journal
from router.sessions import Sessions
from router.sightings import Sightings
from router.snapshot import Asked, Snapshot

NOBODY_POLL_S = 0.05


class _Channel:
    """Nothing is called over it."""

    async def close(self, _grace: float | None) -> None:
        pass


@dataclass(slots=True)
class _Try:
    """One attempt, as it was chosen."""

    snapshot: Snapshot
    decision: ways.Decision
    rates: dict[str, int]
    gone: list[Any] = field(default_factory=list)

    @property
    def chosen(self) -> ways.Candidate:
        assert self.decision.chosen is not None
        return self.decision.chosen


@dataclass(frozen=True, slots=True)
class _Answer:
    """What became of an attempt that went well."""

    first_token_at: float
    hit_rate: HitRate
    regret_ms: float | None


class Routing:
    """`pick` names the prefill replica of each prompt, where the policy is not ours; `decisions` is
    the log of all routers.
    """

    def __init__(
        self,
        trace: Trace,
        options: Options,
        clock: Clock,
        crew: Crew,
        pick: Pick,
        decisions: list[Decision],
    ) -> None:
        self._trace = trace
        self._options = options
        self._clock = clock
        self._unit = unit_tokens(trace)
        self.crew = crew
        self._pick = pick
        self.decisions = decisions
        self._bounds = Bounds()
        ours = options.policy is Policy.OURS
        self._weights = ways.Weights(fetches=options.fetches and ours)
        self._sessions = Sessions(clock)
        self._mirror = Mirror(crew.index, clock)
        self._fleet = Fleet(
            self._mirror,
            lambda _manifest: "",
            lambda _address: cast(grpc.aio.Channel, _Channel()),
            clock,
            journal(io.StringIO()),
        )
        self._sightings = self._fleet.sightings
        self._walls = Sightings(clock) if trace.has_tenants else None
        self._gate: Gate | None = None
        if options.line and ours:
            self._gate = Gate(self._fleet, clock, self._bounds, self._weights)

    async def follow(self) -> None:
        """The index, until cancelled."""
        await asyncio.gather(self._mirror.run(), self._fleet.run())

    async def until_live(self, num_workers: int) -> None:
        while sum(map(self._fleet.num_live, Role)) < num_workers:
            self._fleet.refresh()
            await self._clock.sleep(NOBODY_POLL_S)

    def check(self) -> None:
        """Raise AssertionError unless everything booked was returned."""
        self._fleet.check()
        if self._gate is not None:
            self._gate.check()

    async def serve(self, number: int, arrival: Arrival) -> Served | Failed:
        """Until it is served, or the router would give up."""
        started = self._clock.now()
        without: dict[Any, str] = {}
        names = [index_key(name) for name in arrival.names]
        attempts = 0
        while True:
            try:
                made = await self._next(number, arrival, names, attempts + 1, without)
            except RequestFailed as refusal:
                return Failed(number, f"refused: {refusal.reason}")
            if made is None:
                waited_s = self._clock.now() - started
                if attempts or waited_s >= self._bounds.admission_wait_s:
                    return Failed(number, "nobody can serve it")
                await self._clock.sleep(NOBODY_POLL_S)
                continue
            attempts += 1
            predicted_ms = (self._clock.now() - started) * 1000 + made.chosen.terms.ttft_ms
            try:
                answer = await self._attempt(number, arrival, names, made)
            except LifeOver as error:
                self._went_wrong(made, error, without)
                if error.streaming or attempts > self._bounds.max_pair_attempts:
                    return Failed(number, str(error))
                continue
            total_s = self._clock.now() - started
            return Served(
                request=number,
                prefill=made.chosen.prefill.name if made.chosen.prefill else "",
                decode=made.chosen.decode.name,
                attempts=attempts,
                predicted_ms=predicted_ms,
                ttft_ms=(answer.first_token_at - started) * 1000,
                total_ms=total_s * 1000,
                output_tokens=arrival.output_tokens,
                hit_rate=answer.hit_rate,
                regret_ms=answer.regret_ms,
            )

    def _went_wrong(self, made: _Try, error: LifeOver, without: dict[Any, str]) -> None:
        workers = {**made.snapshot.prefills, **made.snapshot.decodes}
        lost = workers[error.worker].record.instance
        without[lost] = str(error)
        self._fleet.doubts.add(lost, str(error))

    async def _next(
        self,
        number: int,
        arrival: Arrival,
        names: Sequence[BlockHash],
        attempt: int,
        without: dict[Any, str],
    ) -> _Try | None:
        """At first the router's entrance may make it wait. Raises RequestFailed."""
        key = self._salted(names[-1] if names else number.to_bytes(16, "little"))
        num_tokens = -(-arrival.num_tokens // self._unit)
        if self._gate is None or attempt > 1:
            return self._choose(number, arrival, names, attempt, without, key)
        judged = await self._gate.let_in(number, arrival, num_tokens, names, key)
        return self._decided(number, arrival, names, attempt, judged.snapshot, judged.decision)

    def _choose(
        self,
        number: int,
        arrival: Arrival,
        names: Sequence[BlockHash],
        attempt: int,
        without: dict[Any, str],
        key: bytes,
    ) -> _Try | None:
        """As the router's handler does: those in doubt are asked where nobody else is left."""
        num_tokens = -(-arrival.num_tokens // self._unit)

        def named(_namespace: Namespace, _block_size: int) -> Sequence[BlockHash]:
            return names

        home = self._sessions.home(arrival.tenant.encode(), arrival.session)
        session = (home.prefill, home.decode) if home else None
        asked = Asked(num_tokens, key, MAX_TOKENS, session=session)
        for trusting in (False, True):
            snapshot = self._fleet.snapshot(asked, named, without, trusting=trusting)
            usable = [each for each in snapshot.replicas.prefills if not each.refused]
            pins = ways.Pins(prefill=self._pick(usable, names) if usable else "")
            decision = policy.choose(snapshot.prompt, snapshot.replicas, pins, self._weights)
            if decision.chosen is not None:
                break
        else:
            return None
        return self._decided(number, arrival, names, attempt, snapshot, decision)

    def _decided(
        self,
        number: int,
        arrival: Arrival,
        names: Sequence[BlockHash],
        attempt: int,
        snapshot: Snapshot,
        decision: ways.Decision,
    ) -> _Try:
        """Into the log."""
        chosen = decision.chosen
        assert chosen is not None
        self.decisions.append(
            Decision(
                number,
                attempt,
                self._clock.now(),
                str(chosen),
                chosen.terms.cost_ms,
                chosen.computing.matched_blocks,
            )
        )
        return self._observe(arrival, names, snapshot, decision)

    def _salted(self, key: bytes) -> bytes:
        """What ties go by: prompts of another seed are other prompts."""
        seed = str(self._options.seed).encode()[:64]
        return blake2b(key, digest_size=16, key=seed).digest()

    def _observe(
        self,
        arrival: Arrival,
        names: Sequence[BlockHash],
        snapshot: Snapshot,
        decision: ways.Decision,
    ) -> _Try:
        """What is known of the prompt's blocks before anything of it has been computed."""
        chosen = decision.chosen
        assert chosen is not None
        block_tokens = self._trace.block_tokens
        reusable = (arrival.num_tokens - 1) // block_tokens

        def held(*replicas: ways.Replica) -> int:
            most = max((each.matched_blocks for each in replicas if not each.refused), default=0)
            return min(most, reusable)

        available = held(*snapshot.replicas.prefills, *snapshot.replicas.decodes)
        pair = [chosen.decode, *([chosen.prefill] if chosen.prefill else [])]
        oracle = min(self._sightings.depth(names), reusable)
        gone = self._sightings.gone(names[available:oracle], block_tokens, self._fleet.is_live)
        computing = chosen.computing
        num_held = max(computing.matched_blocks, computing.expected_blocks)
        self._sightings.note(names, snapshot.computing(chosen).record.instance, num_held)
        anybodys = 0
        if self._walls is not None:
            anybodys = min(self._walls.depth(arrival.open_names), reusable)
            self._walls.note(arrival.open_names, "")
        rates = {
            "anybodys": anybodys * block_tokens,
            "oracle": oracle * block_tokens,
            "available": available * block_tokens,
            "captured": held(*pair) * block_tokens,
            "promised": held(chosen.computing) * block_tokens,
        }
        return _Try(snapshot, decision, rates, gone)

    async def _attempt(
        self, number: int, arrival: Arrival, names: Sequence[BlockHash], made: _Try
    ) -> _Answer:
        """Until the last token."""
        snapshot, chosen = made.snapshot, made.chosen
        decoding = snapshot.decodes[chosen.decode.name]
        computing = snapshot.computing(chosen)
        decode = self.crew.decodes[decoding.record.instance]
        fetch, fetched = chosen.fetch, Fetched()
        uncached = snapshot.prompt.uncached_tokens(chosen.computing)
        expected = forecast(self._clock.now(), snapshot, made.decision)
        booking = self._fleet.book(
            computing,
            decoding,
            uncached - (fetch.num_tokens if fetch else 0),
            snapshot.prompt.num_tokens,
            chosen.terms.compute_ms,
            snapshot.prompt.shipped_bytes(chosen.prefill, chosen.decode) if chosen.prefill else 0,
            snapshot.worker(fetch.holder) if fetch else None,
            fetch.num_bytes if fetch else 0,
        )

        def computed(compute_ms: float, cached_tokens: int) -> float:
            now = self._clock.now()
            queue_ms = (now - expected.made_at) * 1000 - compute_ms - fetched.ms
            cached = cached_tokens // self._unit
            booking.fetched_in(fetched.num_bytes, fetched.ms)
            booking.computed_in(queue_ms, compute_ms, cached, fetched.ms)
            self._sightings.settle(names, computing.record.instance)
            return now

        try:
            if chosen.prefill is None:
                place = await decode.reserve(number, arrival, alone=True)
                async with _left(decode, place):
                    cached_tokens = await decode.compute(place)
                    speeds = self._options.speeds
                    compute_ms = speeds.prefill_ms(arrival.num_tokens, cached_tokens)
                    first_token_at = computed(compute_ms, cached_tokens)
                    await decode.stream(place)
            else:
                prefill = self.crew.prefills[computing.record.instance]
                async with _reserving(decode, number, arrival) as reserving:
                    fetched = await self._fetch(prefill, arrival, made)
                    done = await prefill.compute(arrival)
                    cached_tokens = done.cached_tokens
                    first_token_at = computed(done.compute_ms, cached_tokens)
                    place = await self._take_over(arrival, prefill, done, decode, reserving)
                    booking.shipped_in(*self._shipment(arrival, place, done))
                    await decode.stream(place)
        finally:
            booking.close()
        self._fleet.note_output(arrival.output_tokens)
        prefill_name = chosen.prefill.name if chosen.prefill else ""
        tenant = arrival.tenant.encode()
        self._sessions.note(tenant, arrival.session, prefill_name, chosen.decode.name)
        if self._gate is not None:
            self._gate.ended(number, arrival.output_tokens, prefill_name, chosen.decode.name)
        self._fleet.doubts.clear(computing.record.instance)
        had_tokens = fetched.had_blocks * self._trace.block_tokens
        came = fetched.num_blocks * self._trace.block_tokens
        came = max(0, min(came, cached_tokens - had_tokens))
        rate = account(
            prompt=arrival.num_tokens,
            delivered=cached_tokens - came,
            fetched=came,
            gone=made.gone,
            **made.rates,
        )
        ttft_ms = (first_token_at - expected.made_at) * 1000
        return _Answer(first_token_at, rate, expected.regret_ms(ttft_ms))

    async def _fetch(self, prefill: PrefillReplica, arrival: Arrival, made: _Try) -> Fetched:
        """What another worker holds of the prompt, before it is queued."""
        fetch = made.chosen.fetch
        names = arrival.names[: (arrival.num_tokens - 1) // self._trace.block_tokens]
        if fetch is None:
            return await prefill.fetch(names, lambda: 0)
        holder = self.crew.replica(made.snapshot.worker(fetch.holder).record.instance)
        names = names[: fetch.num_blocks]
        return await prefill.fetch(names, lambda: holder.pool.match(names) if holder.alive else 0)

    def _shipment(self, arrival: Arrival, place: Place, done: Computed) -> tuple[int, float, float]:
        """Its bytes, and the milliseconds that it and the compute before it took."""
        speeds = self._options.speeds
        lacking = arrival.num_tokens - place.cached_blocks * self._trace.block_tokens
        num_bytes = max(0, lacking) * speeds.token_bytes
        link_ms = num_bytes / speeds.link_bytes_per_ms
        return num_bytes, max(link_ms, done.compute_ms), done.compute_ms

    async def _take_over(
        self,
        arrival: Arrival,
        prefill: PrefillReplica,
        done: Computed,
        decode: DecodeReplica,
        reserving: "asyncio.Task[Place]",
    ) -> Place:
        """What the compute did not hide of the shipping; prefill holds its blocks until then."""
        speeds = self._options.speeds
        try:
            place = await reserving
            decode.bind(place)
            num_bytes, _, _ = self._shipment(arrival, place, done)
            link_ms = num_bytes / speeds.link_bytes_per_ms
            await self._clock.sleep(max(0.0, link_ms - done.compute_ms) / 1000)
            decode.adopt(place)
        finally:
            prefill.release(done)
        return place


@asynccontextmanager
async def _reserving(
    decode: DecodeReplica, number: int, arrival: Arrival
) -> AsyncIterator["asyncio.Task[Place]"]:
    """Room on decode, asked for now and given back at the end, whatever became of it."""
    task = asyncio.create_task(decode.reserve(number, arrival))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, LifeOver):
            decode.leave(await task, whole=False)


@asynccontextmanager
async def _left(decode: DecodeReplica, place: Place) -> AsyncIterator[None]:
    try:
        yield
    finally:
        decode.leave(place, whole=False)
