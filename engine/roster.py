"""Every request an engine has, from acceptance to its one end. Single-threaded and without a model.

    queue, reserve, bind      a request comes in
    settle                    between steps: cancellations and adoptions take effect
    plan                      what to run; who cannot go on fails
    draws, first_tokens       after the run: what to draw, and of that what may be told at once
    commit                    tokens are counted, judged and put out
    release_held, abandon     blocks that somebody outside was using come back

Each of them returns what is to be told to whom; telling is the engine's part. Blocks of a step are
given back only by settle, plan and commit, so never while the step runs.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.request import (
    Admitted,
    Choice,
    DuplicateRequest,
    Failed,
    Output,
    QueueFull,
    Refused,
    Request,
    State,
    TokenOutput,
)
from engine.sampler import Draw, Drawn
from engine.scheduler import Scheduler, Slice, Step
from engine.stop_rules import StopRules
from kvcache.block_hash import BlockHash

Delivery = tuple[Request, Output]
MakeRules = Callable[[Request], StopRules]


@dataclass(slots=True)
class Stats:
    """Counts since the engine was made."""

    steps: int = 0
    preemptions: int = 0
    finished_requests: int = 0
    failed_requests: int = 0  # cancelled ones not included
    cancelled_requests: int = 0
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of those: found in the cache
    computed_tokens: int = 0
    computed_prompts: int = 0
    generated_tokens: int = 0
    nonfinite_requests: int = 0  # of the failed: the model's logits were no numbers
    nonfinite_in_a_row: int = 0  # of these, since a token was last drawn
    rechecked_blocks: int = 0  # held against their digests, before they were shared
    rotten_blocks: int = 0  # of them: changed since they were cached
    disowned_blocks: int = 0  # dropped with these, because they follow them


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks for a whole prompt, owned by whoever reserved until adopted or abandoned: promised
    at first, and of the pool once bound.
    """

    request: Request
    num_cached_blocks: int  # the first ones, whose KV is here already
    block_table: tuple[int, ...] = ()  # of the whole prompt, once bound


class Roster:
    def __init__(self, scheduler: Scheduler, make_rules: MakeRules, max_waiting: int) -> None:
        self._scheduler = scheduler
        self._make_rules = make_rules
        self._max_waiting = max_waiting
        self._requests: dict[str, Request] = {}  # queued, running or held
        self._reservations: dict[str, Reservation] = {}
        self._adoptions: deque[tuple[Request, Sequence[TokenOutput]]] = deque()
        self._cancelled: set[str] = set()
        self._released: set[str] = set()  # of requests with hold that have not ended yet
        self._num_arrivals = 0
        self._stats = Stats()

    @property
    def stats(self) -> Stats:
        return replace(self._stats, preemptions=self._scheduler.num_preemptions)

    def count(self, state: State) -> int:
        if state is State.RESERVED:
            return len(self._reservations)
        return sum(request.state is state for request in self._requests.values())

    def queue(self, request: Request, retry_after_ms: int) -> None:
        """Raises Refused."""
        num_waiting = len(self._scheduler.waiting)
        if num_waiting >= self._max_waiting:
            raise QueueFull(
                f"{num_waiting} requests are waiting, at most {self._max_waiting} may",
                retry_after_ms,
            )
        choice = self._accept(request)
        self._requests[request.request_id] = request
        self._scheduler.queue(choice)

    def reserve(self, request: Request) -> Reservation:
        """Raises Refused and OutOfBlocks."""
        choice = self._accept(request)
        self._scheduler.reserve(choice)
        request.state = State.RESERVED
        reservation = Reservation(request, choice.num_named)
        self._reservations[request.request_id] = reservation
        return reservation

    def bind(self, reservation: Reservation) -> None:
        """Raises Refused."""
        request = reservation.request
        if self._reservations.get(request.request_id) is not reservation:
            raise Refused(f"request {request.request_id} is not reserved any more")
        (choice,) = request.choices
        if not reservation.block_table:
            self._scheduler.bind(choice)
        reservation.num_cached_blocks = choice.num_named
        reservation.block_table = tuple(choice.block_table)

    def adopt(self, reservation: Reservation, first_tokens: Sequence[TokenOutput]) -> None:
        """Takes effect when settled. Raises Refused."""
        request = reservation.request
        places = [(token.choice, token.index) for token in first_tokens]
        if places != [(number, 0) for number in range(request.params.n)]:
            raise Refused(
                f"request {request.request_id} needs a first token for each of its"
                f" {request.params.n} choices, got (choice, index) {places}"
            )
        if self._reservations.get(request.request_id) is not reservation:
            raise Refused(f"request {request.request_id} is not reserved any more")
        assert reservation.block_table, f"request {request.request_id} is adopted unbound"
        del self._reservations[request.request_id]
        self._requests[request.request_id] = request
        self._adoptions.append((request, first_tokens))

    def abandon(self, reservation: Reservation, num_whole_blocks: int = 0) -> bool:
        request = reservation.request
        if self._reservations.get(request.request_id) is not reservation:
            return False
        del self._reservations[request.request_id]
        if reservation.block_table:
            self._scheduler.keep(request.choices[0], num_whole_blocks)
        self._drop(request)
        return True

    def cancel(self, which: Request | str) -> bool:
        """Takes effect when settled; False if there is nothing to end."""
        request = self._find(which)
        if request is None or request.state is State.HELD:
            return False
        self._cancelled.add(request.request_id)
        return True

    def release_held(self, which: Request | str) -> bool:
        """Free the blocks of a request with hold, or let them be freed at its end, which comes
        with the next settling. False if there is none.
        """
        request = self._find(which)
        if request is None or not request.hold:
            return False
        if request.state is State.HELD:
            self._drop(request)
        else:
            self._released.add(request.request_id)
            self._cancelled.add(request.request_id)
        return True

    def settle(self) -> list[Delivery]:
        out: list[Delivery] = []
        while self._adoptions:
            request, first_tokens = self._adoptions.popleft()
            request.state = State.RUNNING
            (choice,) = request.choices
            self._scheduler.adopt(choice)
            self._append(self._all_choices(choice), first_tokens, out)
            if choice.tainted:
                for each in request.choices:
                    self._scheduler.send_back(each)
        for request_id in sorted(self._cancelled):
            cancelled = self._requests.get(request_id)
            if cancelled is not None and cancelled.state is not State.HELD:
                self._fail(cancelled, "CANCELLED", "the request was cancelled", out)
                self._stats.failed_requests -= 1
                self._stats.cancelled_requests += 1
        self._cancelled.clear()
        return out

    def plan(self) -> tuple[Step, list[Delivery]]:
        out: list[Delivery] = []
        step = self._scheduler.next_step()
        for request in step.admitted:
            self._stats.prompt_tokens += len(request.prompt)
            self._stats.cached_tokens += request.num_cached_tokens
            out.append((request, Admitted(request.num_cached_tokens)))
        for choice in step.outgrown:
            if choice in choice.request.choices:
                reason = (
                    f"request {choice.request.request_id} has outgrown the pool: it needs more than"
                    f" {len(choice.block_table)} blocks after {len(choice.output)} output tokens"
                )
                self._fail(choice.request, "RESOURCE_EXHAUSTED", reason, out)
        step.slices = [s for s in step.slices if s.choice in s.choice.request.choices]
        self._stats.steps += bool(step.slices)
        return step, out

    def unsampled(self) -> list[list[BlockHash]]:
        """What prompts are about to share, to draw a sample from."""
        return [self._scheduler.shareable(each) for each in self._scheduler.unsampled()]

    def taint(self, block_ids: Container[int], reason: str) -> list[Delivery]:
        """These blocks have changed: whoever runs on one goes back to the queue, or fails where
        somebody outside reads its blocks.
        """
        out: list[Delivery] = []
        scheduler = self._scheduler
        for choice in (*scheduler.running, *scheduler.reserved):
            choice.tainted |= any(block_id in block_ids for block_id in choice.block_table)
        for choice in [choice for choice in scheduler.running if choice.tainted]:
            if not choice.request.pinned:
                scheduler.send_back(choice)
            elif choice in choice.request.choices:
                self._fail(choice.request, "DATA_LOSS", reason, out)
        return out

    def rechecked(self, num_blocks: int) -> None:
        self._stats.rechecked_blocks += num_blocks

    def disowned(self, num_blocks: int) -> None:
        """A block has changed; with those that follow it so many lost their names."""
        self._stats.rotten_blocks += 1
        self._stats.disowned_blocks += num_blocks - 1

    def draws(self, step: Step) -> list[Draw]:
        """The tokens to be drawn after the step: one a slice that ends its choice's pending
        tokens, n for one that ends a prompt.
        """
        return [
            Draw(
                row,
                part.choice.request.params,
                number,
                part.choice.request.prompt,
                part.choice.output,
                part.choice.request.eos_token_ids,
            )
            for row, part in enumerate(_drawing(step))
            for number in _numbers(part.choice)
        ]

    def first_tokens(self, step: Step, drawn: Sequence[Drawn | None]) -> list[Delivery]:
        """The first tokens of prompts, to be told before anything is counted: naming the blocks of
        a long prompt takes a while, and the client waits. Not those that end one: who hears of an
        end may count on the books.
        """
        out: list[Delivery] = []
        for part, tokens in _with_tokens(step, drawn):
            request = part.choice.request
            if part.choice.output or len(tokens) < request.params.n:
                continue
            judged = [_judge(self._make_rules(request), token) for token in tokens]
            if not any(token.finish_reason for token in judged):
                out += [(request, token) for token in judged]
        return out

    def commit(
        self, step: Step, drawn: Sequence[Drawn | None], told: Sequence[Delivery] = ()
    ) -> list[Delivery]:
        """Count the step's tokens, and put out those that were drawn and are not `told`."""
        out: list[Delivery] = []
        early = {request.request_id for request, _ in told}
        for part in step.slices:
            self._scheduler.advance(part)
            self._stats.computed_tokens += part.stop - part.start
            prompt_ends = len(part.choice.request.prompt)
            self._stats.computed_prompts += part.start < prompt_ends <= part.stop
        for part, tokens in _with_tokens(step, drawn):
            request = part.choice.request
            if part.choice not in request.choices:
                continue  # a sibling's logits ended the request
            untold: list[Delivery] = [] if request.request_id in early else out
            if len(tokens) < len(_numbers(part.choice)):
                self._stats.nonfinite_requests += 1
                self._stats.nonfinite_in_a_row += 1
                reason = f"the model gave no finite logits for token {len(part.choice.output)}"
                self._fail(request, "INTERNAL", reason, out)
                continue
            self._stats.nonfinite_in_a_row = 0
            if request.hold:
                self._finish_held(part.choice, tokens, untold)
            elif part.choice.output:
                self._append([part.choice], tokens, untold)
            else:
                self._append(self._all_choices(part.choice), tokens, untold)
        return out

    def fail_all(self, code: str, reason: str) -> list[Delivery]:
        """End everything but reservations, which their owners abandon."""
        out: list[Delivery] = []
        for request in list(self._requests.values()):
            if request.state is not State.HELD:
                self._fail(request, code, reason, out)
        return out

    def check(self) -> None:
        """Raise AssertionError if requests, tables and pool disagree."""
        self._scheduler.check()
        scheduler = self._scheduler
        placed = (*scheduler.waiting, *scheduler.running, *scheduler.reserved, *scheduler.held)
        reserved = [reservation.request for reservation in self._reservations.values()]
        known = {id(c) for r in (*self._requests.values(), *reserved) for c in r.choices}
        assert len(placed) == len({id(choice) for choice in placed}), "a choice is in two places"
        assert known == {id(choice) for choice in placed}, "a choice is nowhere, or nobody's"
        for request in self._requests.values():
            assert request.choices, f"request {request.request_id} has nothing left to do"
        assert self._released <= self._cancelled | self._requests.keys(), "released, but unknown"

    def _find(self, which: Request | str) -> Request | None:
        """By id whoever has it; as an object only this very request, not its namesake."""
        if isinstance(which, str):
            return self._requests.get(which)
        found = self._requests.get(which.request_id)
        return found if found is which else None

    def _accept(self, request: Request) -> Choice:
        request_id = request.request_id
        if request_id in self._requests or request_id in self._reservations:
            raise DuplicateRequest(f"request {request_id} is here already")
        self._scheduler.refuse_impossible(request)
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        choice = Choice(request, 0, self._make_rules(request), names=list(request.names))
        request.choices = [choice]
        return choice

    def _all_choices(self, first: Choice) -> list[Choice]:
        """Choice 0, whose prompt is computed, and the others forked from it."""
        request = first.request
        for number in range(1, request.params.n):
            child = Choice(request, number, self._make_rules(request))
            self._scheduler.fork(first, child)
            request.choices.append(child)
        return list(request.choices)

    def _append(
        self, choices: Sequence[Choice], tokens: Sequence[TokenOutput], out: list[Delivery]
    ) -> None:
        for choice, token in zip(choices, tokens, strict=True):
            choice.output.append(token.token_id)
            judged = _judge(choice.rules, token)
            out.append((choice.request, judged))
            self._stats.generated_tokens += 1
            if judged.finish_reason:
                choice.request.choices.remove(choice)
                self._scheduler.drop(choice)
        request = choices[0].request
        if not request.choices:
            self._stats.finished_requests += 1
            self._forget(request)

    def _finish_held(
        self, choice: Choice, tokens: Sequence[TokenOutput], out: list[Delivery]
    ) -> None:
        """The prompt is computed and its first tokens are here: nothing more is to be done."""
        request = choice.request
        for token in tokens:
            out.append((request, _judge(self._make_rules(request), token)))
        self._stats.generated_tokens += len(tokens)
        self._stats.finished_requests += 1
        self._hold(request)

    def _fail(self, request: Request, code: str, reason: str, out: list[Delivery]) -> None:
        out.append((request, Failed(code, reason)))
        self._stats.failed_requests += 1
        if request.hold:
            self._hold(request)
        else:
            self._drop(request)

    def _hold(self, request: Request) -> None:
        if request.request_id in self._released:
            self._drop(request)
            return
        request.state = State.HELD
        for choice in request.choices:
            self._scheduler.hold(choice)

    def _drop(self, request: Request) -> None:
        for choice in request.choices:
            self._scheduler.drop(choice)
        request.choices = []
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.state = State.ENDED
        self._requests.pop(request.request_id, None)
        self._cancelled.discard(request.request_id)
        self._released.discard(request.request_id)


def _drawing(step: Step) -> list[Slice]:
    return [part for part in step.slices if part.wants_logits]


def _with_tokens(
    step: Step, drawn: Sequence[Drawn | None]
) -> Iterator[tuple[Slice, list[TokenOutput]]]:
    """Each slice that ends its choice's pending tokens, with what was drawn for it: less than it
    asked for where the logits were no numbers.
    """
    results = iter(drawn)
    for part in _drawing(step):
        index = len(part.choice.output)
        tokens: list[TokenOutput] = []
        for number, result in zip(_numbers(part.choice), results, strict=False):
            if result is not None:
                logprobs = (result.logprob, result.top)
                tokens.append(TokenOutput(number, index, result.token_id, *logprobs))
        yield part, tokens


def _numbers(choice: Choice) -> range:
    """The choices that a token is drawn for when this one has no pending tokens left."""
    if choice.output:
        return range(choice.number, choice.number + 1)
    return range(choice.request.params.n)


def _judge(rules: StopRules, token: TokenOutput) -> TokenOutput:
    """The token with the end it brings; what another worker said about that does not count."""
    finish = rules.judge(token.token_id, token.index)
    if finish is None:
        return replace(token, finish_reason="", stop="", stop_token_id=None)
    return replace(
        token,
        finish_reason=finish.reason,
        stop=finish.stop,
        stop_token_id=finish.stop_token_id,
    )
