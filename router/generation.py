"""The one handler behind both doors: from a request's bytes to the end of its stream.

    entered    there is a place for it in the register
    checked    `validation` has accepted it; no worker has heard of it before
    admitted   `admission` lets it through, now or after a time in line, or refuses it
    routed     `policy` has chosen who serves it
    attempted  `Started` is sent, and `attempt` streams from both legs. One that fails early is
               followed by another one, with a fresh transfer id and without whoever failed; the
               last one is decode's alone
    ended      exactly once: `Usage`, or a RequestFailed that says how many tokens were delivered

What a request holds (its place, its bookings, its legs) is given back in `finally`, here and in
`legs`, however its stream ends.
"""

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from engine.clock import Clock
from kvcache.block_hash import BlockHash, Namespace
from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.attempt import Attempt, AttemptFailed
from router.doubts import Party
from router.entrance import Bounds, Entrance, Entrant, Judged
from router.errors import Broken, RequestFailed, Unavailable
from router.explain import explanation
from router.fleet import Fleet
from router.forecast import Forecast, forecast
from router.journey import Journey
from router.legs import Work, holder_of
from router.line import Line
from router.metrics import Metrics
from router.record import Record
from router.register import Register, Ticket
from router.request import AcceptedRequest, Tenant
from router.retry import conclusion, may_try_again
from router.served_model import ServedModel
from router.snapshot import Snapshot
from router.transcript import Diverged, Transcript
from router.validation import Validator, checked_request_id
from router.walls import Walls
from router.ways import Candidate, Decision, Fetch, Replica, Weights
from router.worker import Worker

LEAST_FETCH_MS = 250.0  # that a fetch may take, however quick computing is


@dataclass(slots=True, eq=False)
class _Served:
    """What is known of one accepted request while it is served."""

    entrant: Entrant
    transcript: Transcript
    journey: Journey
    without: dict[Party, str] = field(default_factory=dict)  # who failed it, and why
    kept: dict[str, int] = field(default_factory=dict)  # by instance: tokens that attempts left it

    @property
    def request(self) -> AcceptedRequest:
        return self.entrant.request

    @property
    def ticket(self) -> Ticket:
        return self.entrant.ticket


class Handler:
    """Belongs to one event loop.

    `walls` are watched where there is more than one tenant. `transfer_id` gives 16 bytes never
    given before, `request_id` an id for who brings none. `afterwards` is given what need not be
    done before the client is told that its request has ended.
    """

    def __init__(
        self,
        model: ServedModel,
        validator: Validator,
        fleet: Fleet,
        register: Register,
        metrics: Metrics,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        bounds: Bounds | None = None,
        line: Line | None = None,
        weights: Weights | None = None,
        walls: Walls | None = None,
        transfer_id: Callable[[], bytes] = lambda: secrets.token_bytes(16),
        request_id: Callable[[], str] = lambda: secrets.token_hex(12),
        afterwards: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        self.model = model
        self.validator = validator
        self._fleet = fleet
        self._register = register
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self._bounds = bounds or Bounds()
        self._entrance = Entrance(
            fleet,
            Line(clock) if line is None else line,
            metrics,
            clock,
            self._bounds,
            weights or Weights(),
        )
        self._sightings = fleet.sightings
        self._walls = walls
        self._transfer_id = transfer_id
        self._request_id = request_id
        self._afterwards = afterwards

    async def generate(
        self, request: pb.GenerateRequest, tenant: Tenant, door: str, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Serve one request. Raises RequestFailed. Closing the generator cancels the request.

        Close it with `aclosing`: what it holds is free when that returns.
        """
        record = Record(door=door, tenant=tenant.label)
        started_at = self._clock.now()
        ticket: Ticket | None = None
        try:
            record.request_id = checked_request_id(request.request_id) or self._request_id()
            ticket = self._register.admit(tenant, record.request_id)
            accepted = await self.validator.accept(request, record.request_id, tenant, door)
            served = self._served(accepted, ticket, started_at, timeout_s)
            record.journey, record.transcript = served.journey, served.transcript
            async with aclosing(self._serve(served)) as events:
                async for event in events:
                    yield event
            record.status = "ok"
        except RequestFailed as failure:
            record.status, record.message = failure.reason, failure.message
            raise
        except Exception as error:
            record.status = "internal"
            self._log.exception("request.broken", request_id=record.request_id)
            raise Broken(f"the router failed: {type(error).__name__}; its log says more") from error
        finally:
            if ticket is not None:
                self._register.leave(ticket)
            self._afterwards(partial(self._report, record, self._clock.now() - started_at))

    async def explain(
        self, request: pb.GenerateRequest, tenant: Tenant, door: str
    ) -> pb.Explanation:
        """Where the request would go now. Raises InvalidRequest."""
        request_id = checked_request_id(request.request_id) or self._request_id()
        accepted = await self.validator.accept(request, request_id, tenant, door)
        ticket = Ticket(tenant, request_id)
        judged = self._entrance.judge(self._entrant(accepted, ticket, self._clock.now(), None))
        return _explanation(judged)

    def cancel(self, tenant: Tenant, request_id: str) -> bool:
        return self._register.cancel(tenant, request_id)

    def _served(
        self, accepted: AcceptedRequest, ticket: Ticket, now: float, timeout_s: float | None
    ) -> _Served:
        return _Served(
            entrant=self._entrant(accepted, ticket, now, timeout_s),
            transcript=Transcript(
                accepted.params, lambda: self.model.detokenizer(chat=accepted.chat)
            ),
            journey=Journey(self._clock, len(accepted.prompt), accepted_at=now),
        )

    def _entrant(
        self, accepted: AcceptedRequest, ticket: Ticket, now: float, timeout_s: float | None
    ) -> Entrant:
        most_s = self._bounds.request_timeout_s
        seconds = min(most_s, most_s if timeout_s is None else timeout_s)
        return Entrant.of(accepted, ticket, now, seconds)

    async def _serve(self, served: _Served) -> AsyncGenerator[pb.GenerateResponse, None]:
        judged = await self._entrance.first_choice(served.entrant)
        snapshot, decision = judged.snapshot, judged.decision
        assert decision.chosen is not None
        self._note_matches(served, snapshot, decision.chosen)
        opening = [pb.GenerateResponse(started=self._started(served, judged))]
        while True:
            try:
                async with aclosing(self._attempt(served, snapshot, decision, opening)) as events:
                    async for event in events:
                        yield event
                break
            except AttemptFailed as failure:
                opening = []
                snapshot, decision = self._next_choice(served, failure)
            except Diverged as error:
                count = served.transcript.num_tokens
                raise Unavailable(
                    f"the next attempt gave another text: {error}; tokens delivered: {count}"
                ) from error
        transcript = served.transcript
        yield pb.GenerateResponse(
            usage=served.journey.usage(transcript.num_tokens, transcript.tokens_per_choice)
        )

    async def _attempt(
        self,
        served: _Served,
        snapshot: Snapshot,
        decision: Decision,
        opening: Sequence[pb.GenerateResponse],
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        served.ticket.check()
        chosen = decision.chosen
        assert chosen is not None
        work = self._work(served, snapshot, chosen)
        served.journey.set_out(work, self._forecast(served, snapshot, decision))
        computing = snapshot.computing(chosen)
        names, instance = _names(served, computing), computing.record.instance
        self._sightings.note(names, instance, _num_held(chosen.computing))
        self._metrics.routed(by_prefill=work.prefill is not None)
        fetch = chosen.fetch
        uncached = snapshot.prompt.uncached_tokens(chosen.computing)
        booking = self._fleet.book(
            computing,
            work.decode,
            uncached - (fetch.num_tokens if fetch else 0),
            snapshot.prompt.num_tokens,
            chosen.terms.compute_ms,
            snapshot.prompt.shipped_bytes(chosen.prefill, chosen.decode) if chosen.prefill else 0,
            work.holder,
            fetch.num_bytes if fetch else 0,
        )
        attempt = Attempt(
            work, served.transcript, served.journey, booking, self._clock, served.entrant.deadline
        )
        served.ticket.legs = attempt.legs
        try:
            async with aclosing(attempt.events(opening)) as events:
                async for event in events:
                    if served.journey.computed:
                        self._sightings.settle(names, instance)
                    yield event
        finally:
            served.ticket.legs = None
            booking.close()
            if served.journey.computed:
                self._sightings.settle(names, instance)
            else:
                self._sightings.drop(names, instance)
        self._went_well(work, served)

    def _forecast(self, served: _Served, snapshot: Snapshot, decision: Decision) -> Forecast:
        pins = served.request.pins
        pinned = bool(pins.prefill or pins.decode)
        return forecast(self._clock.now(), snapshot, decision, pinned=pinned)

    def _work(self, served: _Served, snapshot: Snapshot, chosen: Candidate) -> Work:
        request = served.request
        transfer_id = self._transfer_id()
        prefill = snapshot.prefills[chosen.prefill.name] if chosen.prefill else None
        return Work(
            request=wpb.WorkRequest(
                # Each attempt is a request of its own to workers: the last one may still be ending.
                request_id=f"{request.request_id}.{transfer_id.hex()[:8]}",
                prompt=request.prompt,
                sampling=request.params.to_proto(),
                tenant_key=request.tenant.key,
                num_public_tokens=request.num_public_tokens,
                eos_token_ids=self.model.eos_token_ids,
            ),
            prefill=prefill,
            decode=snapshot.decodes[chosen.decode.name],
            wires=chosen.wires,
            transfer_id=transfer_id,
            attempt=served.journey.attempts + 1,
            max_chunk_tokens=request.max_chunk_tokens,
            holders=snapshot.holders(chosen.computing.name, chosen.decode.name),
            holder=snapshot.worker(chosen.fetch.holder) if chosen.fetch else None,
            fetch=_fetch(snapshot, chosen.fetch) if chosen.fetch else None,
        )

    def _next_choice(self, served: _Served, failure: AttemptFailed) -> tuple[Snapshot, Decision]:
        """Who tries next, or the RequestFailed that ends the request."""
        self._went_wrong(served, failure)
        served.ticket.check()
        transcript, bounds = served.transcript, self._bounds

        def end(remark: str = "") -> RequestFailed:
            return conclusion(failure, transcript.num_tokens, bounds.retry_after_s, remark)

        attempts = served.journey.attempts
        if not may_try_again(failure, transcript.only_first_tokens):
            raise end()
        if attempts > bounds.max_pair_attempts:
            raise end(f"{attempts} attempts were made")
        pins = served.request.pins
        if attempts == bounds.max_pair_attempts:
            if pins.prefill:
                raise end(f"{attempts} attempts were made")
            pins = replace(pins, no_prefill=True)
        snapshot, decision = self._entrance.choose(
            served.entrant, served.without, pins, served.kept
        )
        if decision.chosen is None:
            raise end(decision.reason)
        if failure.shed is not None and failure.work.prefill and decision.chosen.prefill is None:
            raise end("decode does not take over what prefill has no room for")
        transcript.start_over()
        self._metrics.retries.inc()
        return snapshot, decision

    def _went_well(self, work: Work, served: _Served) -> None:
        decode = work.decode.record.instance
        self._fleet.note_output(served.transcript.tokens_per_choice)
        prefill = work.prefill.name if work.prefill else ""
        self._entrance.went_to(served.entrant, prefill, work.decode.name)
        self._entrance.ended(served.entrant, served.transcript.num_tokens)
        self._fleet.doubts.clear(decode)
        if work.prefill is not None:
            pair = (work.prefill.record.instance, decode)
            self._fleet.doubts.clear(pair[0], pair)
            self._judge_fetch(work, work.prefill, served.journey)

    def _judge_fetch(self, work: Work, prefill: Worker, journey: Journey) -> None:
        """Over a way on which nothing came, nothing is fetched for a while."""
        if work.holder is not None and journey.fetch_ms:
            pair = (work.holder.record.instance, prefill.record.instance)
            if journey.last_fetched_tokens or journey.prefill_cached_tokens:
                self._fleet.doubts.clear(pair)
            else:
                self._fleet.doubts.add(pair, f"{prefill.name} got no blocks of {work.holder.name}")

    def _went_wrong(self, served: _Served, failure: AttemptFailed) -> None:
        blamed = failure.blamed()
        served.without.update(dict.fromkeys(blamed, "has just failed this request"))
        if failure.kept_blocks:
            decode = failure.work.decode.record
            served.kept[decode.instance] = failure.kept_blocks * decode.manifest.block_size
        for end in failure.ends:
            self._metrics.worker_failed(end.worker.name, end.code.name)
        if failure.final is None and failure.shed is None:
            for party, reason in blamed.items():
                self._fleet.doubts.add(party, reason)
        self._log.warning(
            "attempt.failed",
            request_id=served.request.request_id,
            attempt=served.journey.attempts,
            tokens=served.transcript.num_tokens,
            adopted=failure.adopted,
            kept_blocks=failure.kept_blocks,
            reason=str(failure),
            heard=[end.heard for end in failure.ends if end.heard],
        )

    def _started(self, served: _Served, judged: Judged) -> pb.Started:
        request = served.request
        started = pb.Started(
            request_id=request.request_id,
            model=request.model,
            prompt_tokens=len(request.prompt),
            seed=request.params.seed,
        )
        if request.explain:
            started.explanation.CopyFrom(_explanation(judged))
        return started

    def _note_matches(self, served: _Served, snapshot: Snapshot, chosen: Candidate) -> None:
        """What could be reused, before anything of the prompt has been computed."""
        journey, computing = served.journey, snapshot.computing(chosen)
        names, block_size = _names(served, computing), computing.record.manifest.block_size
        most = (journey.prompt_tokens - 1) // block_size
        oracle = min(most, self._sightings.depth(names))
        journey.oracle_tokens = oracle * block_size
        if self._walls is not None:
            namespace = Namespace(bytes.fromhex(computing.record.manifest.namespace))
            known = self._walls.note(namespace, served.request.prompt, block_size)
            journey.anybodys_tokens = min(most, known) * block_size
        journey.available_tokens = snapshot.available_tokens
        pair = [chosen.decode, *([chosen.prefill] if chosen.prefill else [])]
        journey.captured_tokens = max(snapshot.held_tokens(each) for each in pair)
        journey.promised_tokens = snapshot.held_tokens(chosen.computing)
        lost = names[journey.available_tokens // block_size : oracle]
        journey.gone = self._sightings.gone(lost, block_size, self._fleet.is_live)

    def _report(self, record: Record, seconds: float) -> None:
        self._metrics.request_ended(record.door, record.status)
        if record.status == "ok":
            assert record.journey is not None and record.transcript is not None
            self._metrics.finished(record.journey, record.transcript)
        self._log.info("request.ended", **record.fields(seconds))


def _explanation(judged: Judged) -> pb.Explanation:
    return explanation(judged.snapshot.prompt, judged.decision, judged.line, judged.verdict)


def _fetch(snapshot: Snapshot, fetch: Fetch) -> wpb.Fetch:
    """It may take twice as long as computing would: what has come by then was worth waiting for."""
    timeout_ms = max(LEAST_FETCH_MS, 2 * fetch.saved_ms)
    holder = holder_of(snapshot.worker(fetch.holder).record)
    return wpb.Fetch(holder=holder, num_blocks=fetch.num_blocks, timeout_ms=round(timeout_ms))


def _num_held(computing: Replica) -> int:
    """Blocks of the prompt that it has or will have without computing them for it."""
    return max(computing.matched_blocks, computing.expected_blocks)


def _names(served: _Served, computing: Worker) -> Sequence[BlockHash]:
    """The prompt's full blocks, as this worker and the index call them."""
    manifest = computing.record.manifest
    return served.entrant.names(Namespace(bytes.fromhex(manifest.namespace)), manifest.block_size)
