"""One life of one worker, as this router knows it, what this router has booked on it, and how fast
it turned out to be.

Prompts that are booked are computed in the order in which they came: the first of them is being
computed, the others wait. So a place in this order is a time, which is predicted from the curve,
and seen when the bookings before it have all been computed.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio

from engine.clock import Clock
from prefix_index.index import Role, WorkerRecord
from router.curves import (
    LEAST_TOKEN_MS,
    DecodeCurve,
    DecodeFit,
    DispatchFit,
    LinkCurve,
    LinkFit,
    PrefillCurve,
    PrefillFit,
)
from router.evenness import Recent

UNKNOWN = PrefillCurve()
UNTRIED = LinkCurve()
# What fetching blocks is taken for until some were: a call, and copies on both sides of it.
UNFETCHED = LinkCurve(shipment_ms=5.0, byte_ms=1 / 200_000)
TRUST_S = 10.0  # after a prompt was computed
WARM_UP_TOKENS = 128  # of the prompt that a worker's first report is about
MOST_APART = 4.0  # times as fast or slow as the others, until it was seen at work
MAX_DRAINED = 4096  # places of which is remembered when they came up


class Loses(Protocol):
    """Something that stands or falls with a worker's life."""

    def lose(self, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class Link:
    """The way between two workers' lives."""

    fit: LinkFit = field(default_factory=LinkFit)
    curve: LinkCurve = UNTRIED  # what it is taken for; see `kinds`
    in_flight_bytes: int = 0  # of our shipments, from their booking on


@dataclass(slots=True, eq=False)
class Worker:
    """`unfit` says why it can never serve our model; empty when it can."""

    record: WorkerRecord
    channel: grpc.aio.Channel
    unfit: str
    booked_tokens: int = 0  # ours, on their way or waiting there: to be computed, as we think
    booked_prompts: int = 0  # the tokens of those prompts in full, as the worker counts them
    booked_requests: int = 0
    booked_ms: float = 0.0  # that computing `booked_tokens` will take, as the curve says
    foreign_tokens: int = 0  # what it reported beyond ours: other routers' work
    own_prompts: int = 0  # of ours, computed there
    recent: Recent = field(default_factory=Recent)  # work, ours and others', as far as we know
    busier: int = 0  # see `evenness`
    _other_prompts: int = 0  # that it has computed in its life, ours aside
    legs: set[Loses] = field(default_factory=set)
    calls: dict[str, Any] = field(default_factory=dict)  # over `channel`, by name; see `legs`
    # The most prompt tokens booked at once, since the last report and between it and the last but
    # one: what a report counts has been booked at some time in these two spans, so whatever it
    # says beyond is foreign, however old it is when it arrives here.
    _peaks: tuple[int, int] = (0, 0)
    _prefill: PrefillFit | None = None
    _learned_at: float = float("-inf")
    _decode: DecodeFit | None = None
    dispatch: DispatchFit = field(default_factory=DispatchFit)
    curve: PrefillCurve = UNKNOWN  # what it is taken for; see `kinds`
    usual: PrefillCurve | None = None  # what prompts were seen to take others of its role
    steps: DecodeCurve | None = None
    dispatch_ms: float = 0.0
    _ahead: "dict[Booking, None]" = field(default_factory=dict)  # in order; the first is computed
    _head_since: float = 0.0
    _num_booked: int = 0
    _drained: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_DRAINED))

    def __post_init__(self) -> None:
        self._learn_steps(self.record)
        self._other_prompts = self.record.load.computed_prompts

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def standing(self) -> str:
        """Why it can take no request at all now; empty when it can."""
        return self.unfit or ("is draining" if self.record.load.draining else "")

    @property
    def connected(self) -> bool:
        """False once the peer has closed or refused the connection, as a dead process does."""
        return self.channel.get_state() is grpc.ChannelConnectivity.READY

    def renew(self, record: WorkerRecord) -> int:
        """How many prompts of other routers it was found to have computed."""
        others = record.load.computed_prompts - self.own_prompts
        found = max(0, others - self._other_prompts)  # fewer, where the report is older than ours
        self._other_prompts += found
        if record.load != self.record.load:
            self.foreign_tokens = max(0, record.load.queued_tokens - max(self._peaks))
            self._peaks = (self._peaks[1], self.booked_prompts)
            self._learn_steps(record)
        self.record = record
        return found

    def prefill_curve(self, usual: PrefillCurve) -> PrefillCurve:
        """Of a prompt: as fitted, else as reported, else as usual among the others."""
        if self._prefill is not None:
            return self._prefill.curve
        return self._expected() or usual

    def _expected(self) -> PrefillCurve | None:
        """As the others, and slower or faster by what it reports of its warm-up, if it does: a
        short prompt, of which one hiccup makes a long one. None where there is neither.
        """
        reported, usual = self.record.load.prefill_ms_per_token, self.usual
        if reported <= 0 or usual is None:
            return PrefillCurve(token_ms=reported) if reported > 0 else usual
        ratio = reported * WARM_UP_TOKENS / max(LEAST_TOKEN_MS, usual.ms(WARM_UP_TOKENS, 0))
        return usual.times(min(MOST_APART, max(1 / MOST_APART, ratio)))

    @property
    def fitted_curve(self) -> PrefillCurve | None:
        """None: no prompt was seen there."""
        return None if self._prefill is None else self._prefill.curve

    @property
    def measured_curve(self) -> PrefillCurve | None:
        """None: nobody has measured it."""
        known = self.prefill_curve(UNKNOWN)
        return None if known is UNKNOWN else known

    @property
    def decode_curve(self) -> DecodeCurve | None:
        return None if self._decode is None else self._decode.curve

    def trusted(self, now: float) -> bool:
        """Whether a request may be refused for what its curve says: it is known, and either what it
        is doing now will show whether it is right, or something did lately. An idle worker is
        asked again, however slow it once was.
        """
        if self._prefill is None and self.record.load.prefill_ms_per_token <= 0:
            return False
        at_work = bool(self._ahead) or self.foreign_tokens > 0
        return at_work or now - self._learned_at <= TRUST_S

    def learn_prefill(
        self, uncached_tokens: int, cached_tokens: int, ms: float, now: float
    ) -> None:
        """It computed a prompt by itself in `ms`."""
        self._learned_at = now
        if self._prefill is None:
            expected = self._expected()
            self._prefill = (
                PrefillFit.after_one(uncached_tokens, ms)
                if expected is None
                else PrefillFit(expected)
            )
        self._prefill.learn(uncached_tokens, cached_tokens, ms)

    def _learn_steps(self, record: WorkerRecord) -> None:
        load, before = record.load, self.record.load
        if record.role is not Role.DECODE or load.decode_step_ms <= 0:
            return
        means = (load.step_sequences or load.running, load.step_context_tokens)
        if self._decode is None:
            self._decode = DecodeFit(*means, load.decode_step_ms)
        elif load.decode_step_ms != before.decode_step_ms:
            self._decode.learn(*means, load.decode_step_ms)

    def ahead_ms(self, now: float, token_ms: float) -> float:
        """What a prompt that came now would wait for: what is booked, less what of the first is
        done, and others' work at `token_ms` a token.
        """
        done_ms = 0.0
        if self._ahead:
            done_ms = min(next(iter(self._ahead)).compute_ms, (now - self._head_since) * 1000)
        return max(0.0, self.booked_ms - done_ms) + self.foreign_tokens * token_ms

    @property
    def last_place(self) -> int:
        """The place of whoever was booked last."""
        return self._num_booked

    def drained_at(self, place: int) -> float | None:
        """When all bookings up to this place were computed; None: they are not, or it is long ago.
        0.0 where there were none.
        """
        if place == 0:
            return 0.0
        at = bisect_left(self._drained, (place, 0.0))
        return self._drained[at][1] if at < len(self._drained) else None

    def book(self, tokens: int, prompt_tokens: int) -> None:
        self.booked_tokens += tokens
        self.booked_prompts += prompt_tokens
        self._peaks = (self._peaks[0], max(self._peaks[1], self.booked_prompts))

    def join(self, booking: "Booking", now: float) -> None:
        self.book(booking.tokens, booking.prompt_tokens)
        self.booked_ms += booking.compute_ms
        self.recent.add(booking.compute_ms, now)
        self._num_booked += 1
        booking.place = self._num_booked
        if not self._ahead:
            self._head_since = now
        self._ahead[booking] = None

    def leave(self, booking: "Booking", now: float) -> None:
        """It is computed, or will not be; safe to say twice."""
        if booking not in self._ahead:
            return
        was_first = next(iter(self._ahead)) is booking
        del self._ahead[booking]
        self.book(-booking.tokens, -booking.prompt_tokens)
        self.booked_ms = self.booked_ms - booking.compute_ms if self._ahead else 0.0
        if was_first:
            self._head_since = now
            first = next(iter(self._ahead), None)
            self._drained.append(((first.place if first else self._num_booked + 1) - 1, now))


@dataclass(slots=True, eq=False)
class Booking:
    """What one attempt adds to its workers' queues until it returns it."""

    computing: Worker
    streaming: Worker
    tokens: int
    prompt_tokens: int
    compute_ms: float
    clock: Clock
    link: Link | None = None
    link_bytes: int = 0
    beside_bytes: int = 0  # of others, on the link when it was booked
    fetch: Link | None = None  # over which blocks are fetched
    fetch_bytes: int = 0
    beside_fetch_bytes: int = 0
    place: int = 0
    opened_at: float = 0.0

    def open(self) -> None:
        self.opened_at = self.clock.now()
        self.computing.join(self, self.opened_at)
        self.streaming.booked_requests += 1
        if self.link is not None:
            self.beside_bytes = self.link.in_flight_bytes
            self.link.in_flight_bytes += self.link_bytes
        if self.fetch is not None:
            self.beside_fetch_bytes = self.fetch.in_flight_bytes
            self.fetch.in_flight_bytes += self.fetch_bytes

    def computed(self) -> None:
        """The prompt is computed; safe to say twice."""
        self.computing.leave(self, self.clock.now())

    def computed_in(
        self, queue_ms: float, compute_ms: float, cached_tokens: int, fetch_ms: float = 0.0
    ) -> None:
        """As the worker itself says; 0 where it does not know. `cached_tokens` were there, some of
        them because they were fetched.
        """
        self.computing.own_prompts += 1
        if self.learn(compute_ms, cached_tokens):
            since_ms = (self.clock.now() - self.opened_at) * 1000
            self.computing.dispatch.learn(max(0.0, since_ms - queue_ms - compute_ms - fetch_ms))
        self.computed()

    def fetched_in(self, num_bytes: int, fetch_ms: float) -> None:
        """Blocks have come, or did not."""
        if self.fetch is not None and num_bytes > 0 and fetch_ms > 0:
            self.fetch.fit.learn(num_bytes, self.beside_fetch_bytes, fetch_ms, 0.0)
        self.fetched()

    def fetched(self) -> None:
        """No more will come; safe to say twice."""
        if self.fetch is not None:
            self.fetch.in_flight_bytes -= self.fetch_bytes
            self.fetch = None

    def learn(self, compute_ms: float, cached_tokens: int) -> bool:
        """The prompt was computed in so long; whether that is known and teaches anything."""
        uncached_tokens = self.prompt_tokens - cached_tokens
        if compute_ms <= 0 or uncached_tokens <= 0:
            return False
        now = self.clock.now()
        self.computing.learn_prefill(uncached_tokens, cached_tokens, compute_ms, now)
        return True

    def shipped_in(self, num_bytes: int, transfer_ms: float, compute_ms: float) -> None:
        """While `compute_ms` passed computing what was shipped."""
        if self.link is not None and num_bytes > 0 and transfer_ms > 0:
            self.link.fit.learn(num_bytes, self.beside_bytes, transfer_ms, compute_ms)
        self.shipped()

    def shipped(self) -> None:
        """Its bytes have arrived, or never will; safe to say twice."""
        if self.link is not None:
            self.link.in_flight_bytes -= self.link_bytes
            self.link = None

    def close(self) -> None:
        self.computed()
        self.shipped()
        self.fetched()
        self.streaming.booked_requests -= 1
