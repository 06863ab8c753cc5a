"""One attempt to serve a request: two legs merged into one stream, or the reason it failed.

waiting    both legs are open; prefill's first tokens pass on as soon as they come
adopted    decode has the prompt's KV; from here on prefill's fate changes nothing
finished   every choice has ended; the workers' last words are awaited for a moment
failed     a leg ended too early. Before adoption the other leg is heard for a moment more,
           since a dead worker usually ends both and only one of them is to blame
"""

from collections.abc import AsyncGenerator, Iterable

import grpc

from engine.clock import Clock
from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.doubts import Party
from router.errors import TimedOut
from router.journey import Journey
from router.legs import Ended, Legs, Role, Said, Work
from router.transcript import Diverged, Transcript, joined
from router.worker import Booking

GRACE_S = 0.25  # a killed process's peers notice within 20 ms on one host; leave room for load
LAST_WORDS_S = 0.5
MAX_AT_ONCE = 32  # events taken in one turn of the event loop; about a millisecond of it
NEARLY_S = 0.1  # a worker's clock may end a call this much before ours does

# Repeating the request elsewhere cannot change these.
FINAL = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
# What a worker says of itself, not of its peer or the way between them.
OWN_FAULT = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNKNOWN})


class AttemptFailed(Exception):
    """The attempt is over and its legs are closed; `ends` says how those that failed ended, and
    `kept_blocks` how much of the prompt decode has cached of what had come.
    """

    def __init__(
        self, work: Work, ends: Iterable[Ended], adopted: bool, kept_blocks: int = 0
    ) -> None:
        self.work = work
        self.ends = list(ends)
        self.adopted = adopted
        self.kept_blocks = kept_blocks
        super().__init__("; ".join(str(end) for end in self.ends))

    @property
    def final(self) -> Ended | None:
        return next((end for end in self.ends if end.code in FINAL), None)

    @property
    def shed(self) -> Ended | None:
        """The leg whose worker had no room, if that is what happened."""
        full = grpc.StatusCode.RESOURCE_EXHAUSTED
        return next((end for end in self.ends if end.code is full), None)

    def blamed(self) -> dict[Party, str]:
        """Whom to avoid, and why: a worker, or where nothing speaks against either, the pair."""
        prefill, decode = self.work.prefill, self.work.decode
        at_fault: dict[Party, str] = {
            end.worker.record.instance: end.details or end.code.name
            for end in self.ends
            if not end.connected
            or end.code in OWN_FAULT
            or (end.role is Role.DECODE and end.code is grpc.StatusCode.FAILED_PRECONDITION)
        }
        if at_fault:
            return at_fault
        if prefill is None or self.adopted:
            return {decode.record.instance: str(self)}
        return {(prefill.record.instance, decode.record.instance): str(self)}


class Attempt:
    """Reads one pair of legs into a transcript and a journey."""

    def __init__(
        self,
        work: Work,
        transcript: Transcript,
        journey: Journey,
        booking: Booking,
        clock: Clock,
        deadline: float,
    ) -> None:
        self.work = work
        self.legs = Legs(work, max(0.0, deadline - clock.now()))
        self.adopted = False
        self._transcript = transcript
        self._journey = journey
        self._booking = booking
        self._clock = clock
        self._deadline = deadline
        self._ends: dict[Role, Ended] = {}
        self._kept_blocks = 0
        self._give_up_at: float | None = None
        self._last_words = frozenset(Role) if work.prefill else frozenset({Role.DECODE})

    async def events(
        self, opening: Iterable[pb.GenerateResponse] = ()
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """What the client is told; `opening` first, while the workers are being asked.

        Raises AttemptFailed, Diverged, or RequestFailed.
        """
        async with self.legs:
            for response in opening:
                yield response
            while not self._transcript.finished:
                told, failure = self._take_all(await self._next())
                if self._transcript.finished:
                    self._let_go()
                for response in joined(told):
                    yield response
                if failure is not None:
                    raise failure
            await self._hear_last_words()

    def _let_go(self) -> None:
        """End the legs whose work nobody needs; the others have nothing left but their numbers."""
        if not self._transcript.ended_by_workers:
            self._last_words = frozenset()
            self.legs.cancel()
        elif not self.adopted:  # the first tokens were the last: there is nothing to transfer
            self._last_words = frozenset({Role.PREFILL})
            self.legs.cancel(Role.DECODE)

    async def _next(self) -> Said | None:
        now = self._clock.now()
        if now >= self._deadline:
            raise TimedOut(f"the deadline passed; {self._delivered()}")
        until = self._deadline
        if self._give_up_at is not None:
            until = min(until, self._give_up_at)
        said = await self.legs.next(max(0.0, until - now))
        if said is None and self._give_up_at is not None and until == self._give_up_at:
            raise self._failed()
        return said

    def _take_all(
        self, said: Said | None
    ) -> tuple[list[pb.GenerateResponse], AttemptFailed | Diverged | TimedOut | None]:
        """It, and what has come besides since the client was told the last time.

        Returns what ended this, too: what was heard before is told before.
        """
        told: list[pb.GenerateResponse] = []
        try:
            for _ in range(MAX_AT_ONCE):
                for response in self._take(said):
                    told.append(response)
                said = None if self._transcript.finished else self.legs.next_if_there()
                if said is None:
                    break
        except (AttemptFailed, Diverged, TimedOut) as failure:
            return told, failure
        return told, None

    def _take(self, said: Said | None) -> Iterable[pb.GenerateResponse]:
        match said:
            case wpb.PrefillEvent():
                yield from self._take_prefill(said)
            case wpb.DecodeEvent():
                yield from self._take_decode(said)
            case Ended():
                self._end(said)

    def _take_prefill(self, event: wpb.PrefillEvent) -> Iterable[pb.GenerateResponse]:
        match event.WhichOneof("event"):
            case "admitted":
                self._journey.prefill_cached(event.admitted.cached_tokens)
            case "first_tokens":
                first = event.first_tokens
                self._journey.first_tokens(first)
                self._booking.fetched_in(first.fetched_bytes, first.fetch_ms)
                self._booking.computed_in(
                    first.queue_ms, first.compute_ms, first.cached_tokens, first.fetch_ms
                )
                for token in event.first_tokens.tokens:
                    yield from self._add(token)
            case "done":
                done, compute_ms = event.done, self._journey.compute_ms
                self._journey.prefill_done(done)
                self._booking.shipped_in(done.shipped_bytes, done.transfer_ms, compute_ms)

    def _take_decode(self, event: wpb.DecodeEvent) -> Iterable[pb.GenerateResponse]:
        match event.WhichOneof("event"):
            case "reserved":
                self._journey.decode_reserved(event.reserved)
            case "adopted":
                self._journey.decode_adopted(event.adopted)
                self._adopt()
            case "token":
                self._adopt()
                yield from self._add(event.token)
            case "done":
                self._journey.decode_done(event.done)
                if self.work.prefill is None:
                    self._booking.learn(event.done.compute_ms, event.done.cached_tokens)
            case "kept":
                self._kept_blocks = event.kept.blocks

    def _add(self, token: wpb.GeneratedToken) -> Iterable[pb.GenerateResponse]:
        for response in self._transcript.add(token):
            if response.HasField("delta"):
                self._journey.token()
            yield response

    def _adopt(self) -> None:
        """Decode streams by itself from now on: a prefill leg that failed no longer matters."""
        if not self.adopted:
            self.adopted = True
            self._booking.computed()
            self._give_up_at = None

    def _end(self, end: Ended) -> None:
        self._ends[end.role] = end
        if end.code is grpc.StatusCode.DEADLINE_EXCEEDED and self._nearly_due():
            raise TimedOut(f"the deadline passed; {self._delivered()}")
        alone = self.work.prefill is None
        if end.role is Role.PREFILL and (end.ok or self.adopted):
            return
        if end.code in FINAL or alone or len(self._ends) == 2:
            raise self._failed()
        if end.role is Role.DECODE and self.adopted and not end.ok:
            raise self._failed()
        self._give_up_at = self._clock.now() + GRACE_S

    def _failed(self) -> AttemptFailed:
        ends = [end for end in self._ends.values() if not end.ok]
        early = self._ends.get(Role.DECODE)
        if not ends and early is not None:
            unknown = grpc.StatusCode.UNKNOWN
            ends = [Ended(Role.DECODE, early.worker, unknown, "ended before its last token")]
        return AttemptFailed(self.work, ends, self.adopted, self._kept_blocks)

    def _nearly_due(self) -> bool:
        return self._deadline - self._clock.now() < NEARLY_S

    def _delivered(self) -> str:
        return f"tokens delivered: {self._transcript.num_tokens}"

    async def _hear_last_words(self) -> None:
        """Workers report what they did as they end. Missing it costs numbers, not tokens."""
        until = self._clock.now() + LAST_WORDS_S
        while self._last_words - self._ends.keys() and (left_s := until - self._clock.now()) > 0:
            said = await self.legs.next(left_s)
            if isinstance(said, Ended):
                self._ends[said.role] = said
            elif not (isinstance(said, wpb.DecodeEvent) and said.HasField("token")):
                assert not list(self._take(said)), "a finished transcript passes nothing on"
