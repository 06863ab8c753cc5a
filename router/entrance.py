"""How a request gets to its first choice of workers: at once, after a time in line, or not at all.

    asked     the policy says what every way would cost, `admission` whether to take one
    in line   where every worker is over its bar: first come the tenants who had least
    waiting   where no worker can serve at all: a little, for one that starts or comes back
    through   a way is chosen, and charged to the tenant's share
    refused   RequestFailed, with the reason, and after how long to ask again

Nobody waits without an end: places in line, the time there, and the request's own deadline are all
bounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from engine.clock import Clock
from prefix_index.index import Role
from router import policy
from router.admission import Action, LineView, Verdict, admit
from router.doubts import Party
from router.errors import (
    InvalidRequest,
    Overloaded,
    RequestFailed,
    TimedOut,
    Unavailable,
    shown,
)
from router.fleet import BlockNames, Fleet
from router.line import Line, Place
from router.metrics import Metrics
from router.register import Ticket
from router.request import AcceptedRequest
from router.sessions import Home, Sessions
from router.snapshot import Asked, Snapshot
from router.ways import Decision, Pins, Weights

POLL_S = 0.05
MOST_NAMED = 8  # workers, in a refusal
TURN_S = 0.25  # after which one who stands in line looks whether it was cancelled


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long, and how often."""

    request_timeout_s: float = 600.0  # where the client sets no deadline, and at most
    admission_wait_s: float = 2.0  # for a first replica to appear
    max_pair_attempts: int = 3  # then decode computes the prompt itself, once
    max_queue_s: float = 10.0  # of work ahead of a worker; beyond, requests wait here
    max_wait_s: float = 120.0  # for the first token, while waiting here
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Entrant:
    """One accepted request, and how long it has. Times are the clock's, in seconds."""

    request: AcceptedRequest
    ticket: Ticket
    names: BlockNames
    entered_at: float
    deadline: float
    first_token_by: float  # by whatever its client has said of it

    @classmethod
    def of(cls, request: AcceptedRequest, ticket: Ticket, now: float, seconds: float) -> "Entrant":
        """Of a request that may take so many seconds in all."""
        targets, first_s = request.targets, seconds
        if targets.deadline_ms:
            first_s = min(first_s, targets.deadline_ms / 1000)
        if targets.strict and targets.ttft_ms:
            first_s = min(first_s, targets.ttft_ms / 1000)
        return cls(request, ticket, request.block_names(), now, now + seconds, now + first_s)

    @property
    def tenant(self) -> str:
        return self.request.tenant.label

    def asked(self, home: Home | None, left_s: float = inf) -> Asked:
        """What the policy is told; `left_s` is what is left for the first token."""
        return Asked(
            num_tokens=len(self.request.prompt),
            key=self.request.digest(),
            max_tokens=self.request.params.max_tokens,
            targets=self.request.targets,
            session=(home.prefill, home.decode) if home else None,
            left_ms=1000 * left_s,
        )


@dataclass(frozen=True, slots=True)
class Judged:
    """What was decided, and from what."""

    snapshot: Snapshot
    decision: Decision
    line: LineView
    verdict: Verdict

    @property
    def tokens(self) -> int:
        """The least that somebody has to compute."""
        return self.snapshot.prompt.num_tokens - self.snapshot.available_tokens

    @property
    def compute_ms(self) -> float:
        """The least that it takes anybody."""
        prompt = self.snapshot.prompt
        return min((prompt.compute_ms(each) for each in self.snapshot.computers), default=0.0)


class Entrance:
    """Belongs to one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        line: Line,
        metrics: Metrics,
        clock: Clock,
        bounds: Bounds,
        weights: Weights,
    ) -> None:
        self._fleet = fleet
        self._line = line
        self._metrics = metrics
        self._clock = clock
        self._bounds = bounds
        self._weights = weights
        self._sessions = Sessions(clock)

    async def first_choice(self, entrant: Entrant) -> Judged:
        """A way to serve it, charged to its tenant. Raises RequestFailed."""
        place: Place | None = None
        try:
            while True:
                entrant.ticket.check()
                if place is not None and not self._line.is_first(place):
                    await self._stand_in_line(entrant, place)
                    continue
                judged = self.judge(entrant, place)
                match judged.verdict.action:
                    case Action.SERVE:
                        self._line.shares.serve(entrant.tenant, judged.tokens)
                        return judged
                    case Action.REJECT:
                        raise self._rejection(judged.verdict)
                    case Action.WAIT:
                        place = place or self._join(entrant, judged)
                    case Action.NOBODY:
                        self._check_patience(entrant, judged.verdict)
                await self._clock.sleep(POLL_S)
        finally:
            if place is not None:
                self._line.leave(place)
                self._metrics.waited.observe(self._clock.now() - place.joined_at)

    def judge(self, entrant: Entrant, place: Place | None = None) -> Judged:
        """What would be decided now; nothing is changed by asking."""
        request, left_s = entrant.request, entrant.first_token_by - self._clock.now()
        bar_ms = 1000 * self._bounds.max_queue_s
        snapshot, decision = self.choose(entrant, left_s=left_s, bar_ms=bar_ms)
        tokens = snapshot.prompt.num_tokens - snapshot.available_tokens
        view = self._view(entrant, tokens, place)
        verdict = admit(snapshot.prompt, decision, view, request.pins)
        return Judged(snapshot, decision, view, verdict)

    def choose(
        self,
        entrant: Entrant,
        without: Mapping[Party, str] | None = None,
        pins: Pins | None = None,
        kept: Mapping[str, int] | None = None,
        left_s: float = inf,
        bar_ms: float = inf,
    ) -> tuple[Snapshot, Decision]:
        """Those in doubt are asked only where nobody else is left, or will be."""
        request, pins = entrant.request, pins or entrant.request.pins
        asked = entrant.asked(self._sessions.home(request.tenant.key, request.session), left_s)
        for trusting in (False, True):
            snapshot = self._fleet.snapshot(
                asked, entrant.names, without, kept=kept, trusting=trusting
            )
            decision = policy.choose(
                snapshot.prompt, snapshot.replicas, pins, self._weights, bar_ms
            )
            if decision.chosen is not None or decision.barred is not None or decision.late:
                break
        return snapshot, decision

    def ended(self, entrant: Entrant, output_tokens: int) -> None:
        """What its answer cost is charged, too."""
        self._line.shares.add(entrant.tenant, output_tokens)

    def went_to(self, entrant: Entrant, prefill: str, decode: str) -> None:
        """Its session is there now."""
        request = entrant.request
        self._sessions.note(request.tenant.key, request.session, prefill, decode)

    def _view(self, entrant: Entrant, tokens: int, place: Place | None) -> LineView:
        line, tenant = self._line, entrant.tenant
        waited_s = self._clock.now() - place.joined_at if place else 0.0
        return LineView(
            ahead_ms=line.ahead_ms(tenant, entrant.request.priority, tokens, place),
            patience_ms=1000 * (self._bounds.max_wait_s - waited_s),
            first=line.is_first(place) if place else len(line) == 0,
            full="" if place else line.why_full(tenant),
        )

    def _join(self, entrant: Entrant, judged: Judged) -> Place:
        priority = entrant.request.priority
        return self._line.join(entrant.tenant, priority, judged.tokens, judged.compute_ms)

    async def _stand_in_line(self, entrant: Entrant, place: Place) -> None:
        """Until it may be this one's turn. Raises Overloaded when that comes too late."""
        now, retry_after_s = self._clock.now(), self._bounds.retry_after_s
        if place.pushed:
            self._metrics.rejections.labels(reason="pushed out").inc()
            raise Overloaded(
                "the router's line is full, and others who come have had less",
                retry_after_s=retry_after_s,
            )
        until = min(entrant.first_token_by, place.joined_at + self._bounds.max_wait_s)
        if now >= until:
            self._metrics.rejections.labels(reason="waited").inc()
            waited_s = now - place.joined_at
            raise Overloaded(
                f"the request waited {waited_s:.1f} s at the router, and others are before it",
                retry_after_s=retry_after_s,
            )
        await self._line.turn(place, min(until - now, TURN_S))

    def _rejection(self, verdict: Verdict) -> RequestFailed:
        self._metrics.rejections.labels(reason="hopeless" if verdict.hopeless else "late").inc()
        if verdict.hopeless:
            return TimedOut(verdict.reason)
        return Overloaded(verdict.reason, retry_after_s=verdict.retry_after_ms / 1000)

    def _check_patience(self, entrant: Entrant, verdict: Verdict) -> None:
        now = self._clock.now()
        if now >= entrant.deadline:
            raise TimedOut(f"the deadline passed while waiting: {verdict.reason}")
        if now >= entrant.entered_at + self._bounds.admission_wait_s:
            self._check_pins(entrant.request.pins)
            raise Unavailable(verdict.reason, retry_after_s=self._bounds.retry_after_s)

    def _check_pins(self, pins: Pins) -> None:
        """Raises what is wrong with the workers that a request names, if it is that."""
        for role, name in ((Role.PREFILL, pins.prefill), (Role.DECODE, pins.decode)):
            field = f"pins.{role.value}"
            ours = {each.name: each for each in self._fleet.workers if each.record.role is role}
            if name and name not in ours:
                names = ", ".join(sorted(ours)[:MOST_NAMED]) or "none"
                more = f" and {len(ours) - MOST_NAMED} more" if len(ours) > MOST_NAMED else ""
                what = f"no {role.value} worker {shown(name)} is registered; there are: {names}"
                raise InvalidRequest(field, f"{what}{more}")
            if name and ours[name].standing:
                raise Unavailable(
                    f"{field}: {name} is registered but not ready: it {ours[name].standing}",
                    retry_after_s=self._bounds.retry_after_s,
                )
