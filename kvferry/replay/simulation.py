"""One trace through the real router and index, with simulated workers, in virtual time.

Each request takes the way that `router.generation` gives it: a snapshot of the fleet from the
mirror, the policy's choice, a booking; prefill computes, decode streams; a worker that dies is
doubted and the request tries again without it. What is simulated is the time workers take.
"""

import asyncio
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import grpc.aio

from kvcache.block_hash import BlockHash, Namespace, index_key
from kvferry.errors import CommandError
from kvferry.replay.crew import Crew, unit_tokens
from kvferry.replay.options import Options
from kvferry.replay.outcome import Decision, Outcome, Served
from kvferry.replay.prefill_replica import Computed, LifeOver
from kvferry.replay.rivals import picker
from kvferry.replay.speeds import at_load, zero_hit_ms
from kvferry.replay.trace import Arrival, Trace
from kvferry.replay.virtual_time import VirtualClock, run_virtual
from prefix_index.index import Role
from prefix_index.mirror import Mirror
from router import policy
from router.fleet import Fleet
from router.hit_rate import HitRate, account
from router.journal import journal
from router.sightings import Sightings
from router.snapshot import Snapshot

NOBODY_POLL_S = 0.05


def replay(trace: Trace, options: Options, progress: Callable[[], None] = lambda: None) -> Outcome:
    """Serve all of `trace`; `progress` is called after each request. Deterministic."""
    _refuse(trace, options)
    speeds = options.speeds
    if options.load is not None:
        trace = at_load(trace, speeds, options.num_replicas, options.load)
    load = zero_hit_ms(trace, speeds) / (options.num_replicas * 1000 * max(trace.duration_s, 1e-3))
    simulation = _Simulation(trace, options, progress)
    served = run_virtual(simulation.run())
    return Outcome(
        options.policy.value,
        served,
        tuple(simulation.decisions),
        simulation.crew.work_ms(),
        simulation.ended_at,
        load,
    )


def _refuse(trace: Trace, options: Options) -> None:
    longest = max(each.num_tokens for each in trace.arrivals)
    if longest > options.cache_tokens:
        raise CommandError(
            f"a cache of {options.cache_tokens} tokens cannot hold the longest prompt, {longest}"
        )
    most = max(each.num_tokens + each.output_tokens for each in trace.arrivals)
    if most + trace.block_tokens > options.decode_tokens:
        raise CommandError(
            f"decode's {options.decode_tokens} tokens cannot hold the longest request, {most}"
        )


class _Channel:
    """Nothing is called over it."""

    async def close(self, _grace: float | None) -> None:
        pass


@dataclass(slots=True)
class _Try:
    """One attempt, as it was chosen."""

    snapshot: Snapshot
    chosen: policy.Candidate
    rates: dict[str, int]
    gone: list[Any] = field(default_factory=list)


class _Simulation:
    def __init__(self, trace: Trace, options: Options, progress: Callable[[], None]) -> None:
        self._trace = trace
        self._options = options
        self._progress = progress
        self._clock = VirtualClock()
        self._unit = unit_tokens(trace)
        self.crew: Crew
        self._pick = picker(options.policy, options.seed)
        self._sightings = Sightings(self._clock, lag_s=1.5 + options.index_lag_s)
        self.decisions: list[Decision] = []
        self.ended_at = 0.0

    async def run(self) -> tuple[Served, ...]:
        self.crew = Crew(self._trace, self._options, self._clock)
        mirror = Mirror(self.crew.index, self._clock)
        self._fleet = Fleet(
            mirror,
            lambda _manifest: "",
            lambda _address: cast(grpc.aio.Channel, _Channel()),
            self._clock,
            journal(io.StringIO()),
        )
        await self.crew.start()
        following = asyncio.create_task(mirror.run())
        while self._fleet.num_live(Role.PREFILL) < self._options.num_replicas:
            self._fleet.refresh()
            await self._clock.sleep(NOBODY_POLL_S)
        faults = [asyncio.create_task(self.crew.suffer(fault)) for fault in self._options.faults]
        try:
            return await self._serve_all()
        finally:
            self._fleet.check()
            for task in (*faults, following):
                task.cancel()
            await self.crew.stop()

    async def _serve_all(self) -> tuple[Served, ...]:
        start = self._clock.now()
        tasks = []
        for number, arrival in enumerate(self._trace.arrivals):
            await self._clock.sleep(max(0.0, start + arrival.at_s - self._clock.now()))
            tasks.append(asyncio.create_task(self._serve(number, arrival)))
        served = await asyncio.gather(*tasks)
        self.ended_at = self._clock.now() - start
        return tuple(served)

    async def _serve(self, number: int, arrival: Arrival) -> Served:
        started = self._clock.now()
        without: dict[Any, str] = {}
        names = [index_key(name) for name in arrival.names]
        attempts = 0
        while True:
            made = self._choose(number, arrival, names, attempts + 1, without)
            if made is None:
                await self._clock.sleep(NOBODY_POLL_S)
                without.clear()
                continue
            attempts += 1
            predicted_ms = (self._clock.now() - started) * 1000 + made.chosen.terms.ttft_ms
            try:
                ttft_at, rate = await self._attempt(arrival, names, made)
            except LifeOver as error:
                assert made.chosen.prefill is not None
                lost = made.snapshot.prefills[made.chosen.prefill.name].record.instance
                without[lost] = str(error)
                self._fleet.doubts.add(lost, str(error))
                continue
            self._progress()
            return Served(
                request=number,
                prefill=made.chosen.prefill.name if made.chosen.prefill else "",
                decode=made.chosen.decode.name,
                attempts=attempts,
                predicted_ms=predicted_ms,
                ttft_ms=(ttft_at - started) * 1000,
                total_ms=(self._clock.now() - started) * 1000,
                hit_rate=rate,
            )

    def _choose(
        self,
        number: int,
        arrival: Arrival,
        names: Sequence[BlockHash],
        attempt: int,
        without: dict[Any, str],
    ) -> _Try | None:
        """As the router's handler does: those in doubt are asked where nobody else is left."""
        key = names[-1] if names else number.to_bytes(16, "little")
        num_tokens = -(-arrival.num_tokens // self._unit)

        def named(_namespace: Namespace, _block_size: int) -> Sequence[BlockHash]:
            return names

        for trusting in (False, True):
            snapshot = self._fleet.snapshot(num_tokens, key, named, without, trusting=trusting)
            usable = [each for each in snapshot.replicas.prefills if not each.refused]
            if not usable:
                continue
            pins = policy.Pins(prefill=self._pick(usable, names))
            decision = policy.choose(snapshot.prompt, snapshot.replicas, pins)
            if decision.chosen is not None:
                break
        else:
            return None
        chosen = decision.chosen
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
        return self._observe(arrival, names, snapshot, chosen)

    def _observe(
        self,
        arrival: Arrival,
        names: Sequence[BlockHash],
        snapshot: Snapshot,
        chosen: policy.Candidate,
    ) -> _Try:
        """What is known of the prompt's blocks before anything of it has been computed."""
        block_tokens = self._trace.block_tokens
        reusable = (arrival.num_tokens - 1) // block_tokens

        def held(*replicas: policy.Replica) -> int:
            most = max((each.matched_blocks for each in replicas if not each.refused), default=0)
            return min(most, reusable)

        available = held(*snapshot.replicas.prefills, *snapshot.replicas.decodes)
        pair = [chosen.decode, *([chosen.prefill] if chosen.prefill else [])]
        oracle = min(self._sightings.depth(names), reusable)
        gone = self._sightings.gone(names[available:oracle], block_tokens, self._fleet.is_live)
        self._sightings.note(names, snapshot.computing(chosen).record.instance)
        rates = {
            "oracle": oracle * block_tokens,
            "available": available * block_tokens,
            "captured": held(*pair) * block_tokens,
            "promised": held(chosen.computing) * block_tokens,
        }
        return _Try(snapshot, chosen, rates, gone)

    async def _attempt(
        self, arrival: Arrival, names: Sequence[BlockHash], made: _Try
    ) -> tuple[float, HitRate]:
        """Until the last token; when the first one was out, and what became of the prompt's."""
        snapshot, chosen = made.snapshot, made.chosen
        decoding = snapshot.decodes[chosen.decode.name]
        computing = snapshot.computing(chosen)
        uncached = snapshot.prompt.uncached_tokens(chosen.computing)
        booking = self._fleet.book(
            computing, decoding, uncached, snapshot.prompt.num_tokens, chosen.terms.compute_ms
        )
        try:
            if chosen.prefill is None:
                await self.crew.decodes[decoding.record.instance].compute(arrival)
                cached_tokens = 0
            else:
                computed = await self._prefill(arrival, computing.record.instance)
                cached_tokens = computed.cached_tokens
            booking.computed()
            self._sightings.settle(names, computing.record.instance)
            first_token_at = self._clock.now()
            if chosen.prefill is not None:
                await self._ship(arrival, computed, computing.record.instance)
            await self.crew.decodes[decoding.record.instance].stream(arrival)
        finally:
            booking.close()
        self._fleet.doubts.clear(computing.record.instance)
        rate = account(
            prompt=arrival.num_tokens, delivered=cached_tokens, gone=made.gone, **made.rates
        )
        return first_token_at, rate

    async def _prefill(self, arrival: Arrival, instance: str) -> Computed:
        replica = self.crew.prefills[instance]
        if not replica.alive:
            raise LifeOver(f"{replica.name} does not answer")
        return await replica.compute(arrival)

    async def _ship(self, arrival: Arrival, computed: Computed, instance: str) -> None:
        """What the compute did not hide; prefill holds the blocks until then."""
        speeds = self._options.speeds
        link_ms = arrival.num_tokens * speeds.token_bytes / speeds.link_bytes_per_ms
        await self._clock.sleep(max(0.0, link_ms - computed.compute_ms) / 1000)
        self.crew.prefills[instance].release(computed)
