"""Whatever callers do, in any order, the books balance and nobody hears a wrong token."""

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.request import Request, TooLarge
from engine.roster import Reservation
from engine.step_plan import StepPlan
from kvcache.block_pool import OutOfBlocks
from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from protos.worker_pb2 import GeneratedToken
from tests.engine.handover import carry
from tests.engine.small_worker import Heard, SmallWorker

CONFIG = ChecksumConfig(num_layers=2, vocab_size=64, max_context=256)
TRUTH = {
    (token, length): checksum_continuation(CONFIG, [token] * length, 24)
    for token in range(2)
    for length in range(1, 25)
}
prompts = st.tuples(st.integers(0, 1), st.integers(1, 24))
lengths = st.integers(1, 24)
choices = st.integers(1, 3)


class Midway:
    """Does things while a step runs: after the first layer, before the second."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], object]] = []

    def begin(self, plan: StepPlan) -> None:
        pass

    def layer_done(self, layer: int, plan: StepPlan) -> None:
        while layer == 0 and self.actions:
            self.actions.pop(0)()

    def end(self, plan: StepPlan) -> None:
        pass


class AnyHistory(RuleBasedStateMachine):
    """One engine with 8 blocks of 4 tokens, as decode and as prefill at once."""

    def __init__(self) -> None:
        super().__init__()
        self.midway = Midway()
        self.prompts: dict[str, tuple[int, int]] = {}
        self.reserved: list[Reservation] = []
        self.held: list[Request] = []

    @initialize(num_blocks=st.integers(4, 10), growth=st.sampled_from([0, 8]))
    def build(self, num_blocks: int, growth: int) -> None:
        options: dict[str, Any] = {"config": CONFIG, "block_size": 4, "growth_tokens": growth}
        options |= {"max_tokens_per_step": 12, "max_running": 5, "observer": self.midway}
        self.worker = SmallWorker(num_blocks, **options)
        self.source = SmallWorker(64, config=CONFIG, block_size=4)

    @rule(prompt=prompts, max_tokens=lengths, n=choices, chunk=st.sampled_from([0, 3, 4]))
    def add(self, prompt: tuple[int, int], max_tokens: int, n: int, chunk: int) -> None:
        options = {"n": n, "max_chunk_tokens": chunk}
        self._enter(prompt, max_tokens, self.worker.engine.add, **options)

    @rule(prompt=prompts, chunk=st.sampled_from([0, 3, 4]))
    def add_with_hold(self, prompt: tuple[int, int], chunk: int) -> None:
        options = {"hold": True, "max_chunk_tokens": chunk}
        entered = self._enter(prompt, 9, self.worker.engine.add, **options)
        self.held += [entered[0]] if entered else []

    @rule(prompt=prompts, max_tokens=lengths, n=choices, midway=st.booleans())
    def reserve(self, prompt: tuple[int, int], max_tokens: int, n: int, midway: bool) -> None:
        def enter(request: Request) -> None:
            self.reserved.append(self.worker.engine.reserve(request))

        self._do(midway, lambda: self._enter(prompt, max_tokens, enter, n=n))

    @precondition(lambda self: self.reserved)
    @rule(number=st.integers(0, 40), midway=st.booleans())
    def bind(self, number: int, midway: bool) -> None:
        reservation = self.reserved[number % len(self.reserved)]
        if not reservation.block_table:
            self._do(midway, lambda: self._bind(reservation))

    def _bind(self, reservation: Reservation) -> None:
        if reservation in self.reserved:
            self.worker.engine.bind(reservation)
            self._scribble(reservation.block_table[reservation.num_cached_blocks :])

    @precondition(lambda self: self.reserved)
    @rule(number=st.integers(0, 40), midway=st.booleans())
    def adopt(self, number: int, midway: bool) -> None:
        reservation = self.reserved.pop(number % len(self.reserved))
        request = reservation.request
        self.worker.engine.bind(reservation)
        held, heard = self.source.request(request.prompt, 1, hold=True)
        self.source.engine.add(held)
        self.source.drain()
        carry(self.source, held.choices[0].block_table, self.worker, reservation)
        self.source.engine.release_held(held.request_id)
        first = [GeneratedToken(choice=c, token_id=heard.text[0]) for c in range(request.params.n)]
        self._do(midway, lambda: self.worker.engine.adopt(reservation, first))

    @precondition(lambda self: self.reserved)
    @rule(number=st.integers(0, 40), midway=st.booleans(), num_whole=st.integers(0, 6))
    def abandon(self, number: int, midway: bool, num_whole: int) -> None:
        """As many blocks as have come stay as cache; the tokens of later hits tell if wrongly."""
        reservation = self.reserved.pop(number % len(self.reserved))
        if reservation.block_table:
            held, _ = self.source.request(reservation.request.prompt, 1, hold=True)
            self.source.engine.add(held)
            self.source.drain()
            carry(self.source, held.choices[0].block_table[:num_whole], self.worker, reservation)
            self.source.engine.release_held(held.request_id)
        self._do(midway, lambda: self.worker.engine.abandon(reservation, num_whole))

    @rule(number=st.integers(0, 40), midway=st.booleans())
    def cancel(self, number: int, midway: bool) -> None:
        self._do(midway, lambda: self.worker.engine.cancel(f"request {number}"))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 40), midway=st.booleans())
    def release(self, number: int, midway: bool) -> None:
        request = self.held.pop(number % len(self.held))
        self._do(midway, lambda: self.worker.engine.release_held(request.request_id))

    @rule()
    def flush(self) -> None:
        self.worker.engine.flush_cache()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.worker.step()

    @invariant()
    def books_balance_and_tokens_are_right(self) -> None:
        if not hasattr(self, "worker"):
            return
        self.worker.engine.check()
        for heard in self.worker.heard:
            if heard.request_id in self.prompts:
                expected = TRUTH[self.prompts[heard.request_id]]
                for tokens in heard.tokens.values():
                    assert tokens == expected[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "worker"):
            return
        for action in self.midway.actions:
            action()
        self.midway.actions.clear()
        for request in self.held:
            self.worker.engine.release_held(request.request_id)
        for reservation in self.reserved:
            self.worker.engine.abandon(reservation)
        self.worker.drain()
        assert self.worker.is_empty()
        for heard in self.worker.heard:
            assert heard.ended or not heard.outputs or not heard.num_choices

    def _do(self, midway: bool, action: Callable[[], object]) -> None:
        if midway:
            self.midway.actions.append(action)
        else:
            action()

    def _scribble(self, block_ids: Sequence[int]) -> None:
        """Write to blocks as a transfer does, whether or not a step is running."""
        self.worker.store.kept.forget(block_ids)
        for layer in range(self.worker.store.num_layers):
            self.worker.store.layer(layer)[list(block_ids)] = -1

    def _enter(
        self,
        prompt: tuple[int, int],
        max_tokens: int,
        enter: Callable[[Request], None],
        **options: Any,
    ) -> tuple[Request, Heard] | None:
        token, length = prompt
        request, heard = self.worker.request([token] * length, max_tokens, **options)
        try:
            enter(request)
        except (TooLarge, OutOfBlocks):
            return None
        self.prompts[heard.request_id] = prompt
        return request, heard


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
