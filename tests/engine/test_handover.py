"""A prompt computed by one engine and continued by another: hold, reserve, adopt, abandon."""

import random
from typing import Any

import pytest

from engine.request import Admitted, Failed, Refused, TokenOutput
from engine.runner import SliceObserver
from engine.step_plan import StepPlan
from kvcache.block_pool import OutOfBlocks
from model.checksum_reference import checksum_continuation
from protos.worker_pb2 import GeneratedToken
from tests.engine.handover import carry, prefill_request
from tests.engine.small_worker import CONFIG, Heard, SmallWorker

SAMPLED: dict[str, Any] = {"temperature": 2.0, "allowed_token_ids": tuple(range(64)), "logprobs": 1}


def hand_over(
    prefill: SmallWorker, decode: SmallWorker, prompt: list[int], max_tokens: int, **options: Any
) -> tuple[Heard, int]:
    """What the client of the pair hears, and how many blocks were carried."""
    held, held_heard = prefill.request(prompt, max_tokens, hold=True, **options)
    request, heard = decode.request(prompt, max_tokens, **options)
    reservation = decode.engine.reserve(request)
    decode.engine.check()
    decode.engine.bind(reservation)
    decode.engine.check()
    first_tokens = prefill_request(prefill, held, held_heard)
    carried = carry(prefill, held.choices[0].block_table, decode, reservation)
    decode.engine.adopt(reservation, first_tokens)
    assert prefill.engine.release_held(held.request_id)
    prefill.engine.check()
    return heard, carried


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 64, 100])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_pair_of_engines_says_what_one_would(
    num_tokens: int, n: int, options: dict[str, Any]
) -> None:
    prompt = [num_tokens % 7] * num_tokens
    prefill, decode = SmallWorker(), SmallWorker()
    for expected_blocks in ((num_tokens + 15) // 16, (num_tokens % 16 != 0) * 1):
        heard, carried = hand_over(prefill, decode, prompt, 20, n=n, **options)
        decode.drain()
        alone = SmallWorker().ask(prompt, 20, n=n, **options)
        assert heard.outputs == [out for out in alone.outputs if not isinstance(out, Admitted)]
        assert carried == expected_blocks  # the second time only the unnamed tail is not there
    assert prefill.is_empty() and decode.is_empty()


def test_many_handovers_into_a_small_pool_all_come_out_right() -> None:
    rng = random.Random(8)
    prefill = SmallWorker(200)
    decode = SmallWorker(14, growth_tokens=0, max_running=6)
    told: list[tuple[list[int], Heard]] = []
    for _ in range(40):
        prompt = [rng.randrange(3)] * rng.randrange(1, 60)
        while True:
            try:
                told.append((prompt, hand_over(prefill, decode, prompt, 30)[0]))
            except OutOfBlocks:
                assert decode.step(), "nothing moves, and no blocks"
            else:
                break
    decode.drain()
    for prompt, heard in told:
        assert heard.text == checksum_continuation(CONFIG, prompt, 30)
    assert decode.engine.stats().preemptions > 0
    assert decode.is_empty()


def test_a_prefill_that_ends_at_its_first_token_says_so_like_decode_would() -> None:
    prompt = [4] * 20
    (first,) = checksum_continuation(CONFIG, prompt, 1)
    cases: list[tuple[int, dict[str, Any], str]] = [
        (1, {}, "length"),
        (9, {"eos": (first,)}, "stop"),
        (9, {"stop_token_ids": (first,)}, "stop"),
    ]
    for max_tokens, options, reason in cases:
        prefill, decode = SmallWorker(), SmallWorker()
        held, held_heard = prefill.request(prompt, max_tokens, hold=True, **options)
        (token,) = prefill_request(prefill, held, held_heard)
        alone = SmallWorker().ask(prompt, max_tokens, **options)
        assert TokenOutput.from_proto(token) == alone.outputs[-1]
        assert token.finish_reason == reason
        heard, _ = hand_over(prefill, decode, prompt, max_tokens, name="x", **options)
        decode.drain()
        assert heard.outputs == alone.outputs[1:]
        assert decode.is_empty()


def test_a_choice_that_ends_at_its_first_token_leaves_its_siblings_running_on_decode() -> None:
    prompt = [6] * 20
    firsts = [tokens[0] for tokens in SmallWorker().ask(prompt, 1, n=3, **SAMPLED).tokens.values()]
    options = {**SAMPLED, "n": 3, "stop_token_ids": (firsts[1],)}
    alone = SmallWorker().ask(prompt, 10, **options)
    assert {choice: len(tokens) for choice, tokens in alone.tokens.items()} != {0: 10, 1: 10, 2: 10}
    decode = SmallWorker()
    heard, _ = hand_over(SmallWorker(), decode, prompt, 10, **options)
    decode.drain()
    assert heard.outputs == alone.outputs[1:]
    assert heard.tokens[1] == [firsts[1]]
    assert decode.is_empty()


def test_held_blocks_stay_until_released_however_the_request_ended() -> None:
    worker = SmallWorker(8)
    done, heard = worker.request([1] * 40, hold=True)
    prefill_request(worker, done, heard)
    cancelled, heard_cancelled = worker.request([2] * 40, hold=True, max_chunk_tokens=16)
    worker.engine.add(cancelled)
    worker.step()
    assert worker.engine.cancel(cancelled.request_id)
    worker.drain()
    assert heard_cancelled.failure == Failed("CANCELLED", "the request was cancelled")
    assert worker.engine.books().held_requests == 2
    assert worker.pool.num_used == 6
    waits = worker.add([3] * 40, 1)
    assert not worker.step()
    for request in (done, cancelled):
        assert not worker.engine.cancel(request.request_id)
        assert worker.engine.release_held(request.request_id)
        assert not worker.engine.release_held(request.request_id)
    worker.drain()
    assert waits.ended and worker.is_empty()


def test_releasing_a_running_prefill_ends_it_and_keeps_nothing() -> None:
    worker = SmallWorker()
    request, heard = worker.request([2] * 40, hold=True, max_chunk_tokens=16)
    worker.engine.add(request)
    worker.step()
    assert worker.engine.release_held(request.request_id)
    worker.drain()
    assert heard.failure is not None and heard.failure.code == "CANCELLED"
    assert worker.is_empty() and worker.engine.books().held_requests == 0


def test_an_abandoned_reservation_leaves_nothing_and_names_nothing() -> None:
    worker = SmallWorker(8)
    request, heard = worker.request([1] * 40, 20)
    reservation = worker.engine.reserve(request)
    assert worker.engine.books().promised_blocks == 4  # one to grow by
    assert worker.engine.books().reserved_blocks == 0
    worker.engine.bind(reservation)
    assert worker.engine.books().promised_blocks == 1
    assert worker.engine.books().reserved_blocks == 3
    assert not worker.engine.cancel(request.request_id)
    assert worker.engine.abandon(reservation)
    assert not worker.engine.abandon(reservation)
    worker.engine.check()
    assert worker.is_empty() and worker.engine.resident() == [] and heard.outputs == []
    with pytest.raises(Refused, match="is not reserved any more"):
        worker.engine.adopt(reservation, [GeneratedToken(token_id=1)])


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ([], "needs a first token for each of its 2 choices"),
        ([GeneratedToken(choice=0), GeneratedToken(choice=2)], "for each of its 2 choices"),
        ([GeneratedToken(choice=0), GeneratedToken(choice=1, index=3)], r"\(1, 3\)"),
        ([GeneratedToken(choice=0), GeneratedToken(choice=1, token_id=512)], "vocabulary of 512"),
    ],
)
def test_first_tokens_that_do_not_fit_are_refused_and_the_reservation_stands(
    tokens: list[GeneratedToken], sentence: str
) -> None:
    worker = SmallWorker(vocab_size=512)
    reservation = worker.engine.reserve(worker.request([1] * 20, n=2)[0])
    worker.engine.bind(reservation)
    with pytest.raises(Refused, match=sentence):
        worker.engine.adopt(reservation, tokens)
    assert worker.engine.books().reserved_requests == 1
    assert worker.engine.abandon(reservation)


def test_an_adopted_request_can_be_cancelled_before_it_runs() -> None:
    prefill, decode = SmallWorker(), SmallWorker()
    heard, _ = hand_over(prefill, decode, [3] * 20, 10, name="gone")
    assert decode.engine.cancel("gone")
    decode.drain()
    assert heard.failure is not None and heard.failure.code == "CANCELLED"
    assert decode.is_empty()


def test_a_reservation_takes_no_blocks_that_running_requests_are_about_to_need() -> None:
    worker = SmallWorker(4, growth_tokens=32)
    running = worker.add([1] * 16, 40)
    worker.step()
    with pytest.raises(OutOfBlocks):
        worker.engine.reserve(worker.request([2] * 32)[0])
    worker.drain()
    assert running.ended
    reservation = worker.engine.reserve(worker.request([2] * 32)[0])
    worker.engine.bind(reservation)
    assert len(reservation.block_table) == 2


def test_promised_blocks_are_cache_until_they_are_bound() -> None:
    worker = SmallWorker(4)
    worker.ask([1] * 48, 1)
    reservation = worker.engine.reserve(worker.request([2] * 32, 1)[0])
    books = worker.engine.books()
    assert (books.promised_blocks, books.free_blocks, books.cached_blocks) == (2, 1, 3)
    assert worker.engine.load().free_blocks == 2
    assert worker.ask([1] * 32, 1).num_cached == 16
    needs_more = worker.ask([1] * 48, 1)
    assert not needs_more.outputs  # there are two for it, and two hits would take both
    worker.engine.bind(reservation)
    assert len(reservation.block_table) == 2
    worker.engine.abandon(reservation)
    worker.drain()
    assert needs_more.ended and worker.is_empty()


def test_blocks_that_became_resident_after_the_promise_are_not_shipped() -> None:
    prefill, decode = SmallWorker(), SmallWorker(12)
    prompt = [3] * 40
    request, late = decode.request(prompt, 10)
    reservation = decode.engine.reserve(request)
    assert reservation.num_cached_blocks == 0
    hand_over(prefill, decode, prompt, 10)
    decode.drain()
    decode.engine.bind(reservation)
    decode.engine.check()
    assert reservation.num_cached_blocks == 2
    held, heard = prefill.request(prompt, 10, hold=True)
    first_tokens = prefill_request(prefill, held, heard)
    assert carry(prefill, held.choices[0].block_table, decode, reservation) == 1
    decode.engine.adopt(reservation, first_tokens)
    decode.drain()
    assert late.text == checksum_continuation(CONFIG, prompt, 10)
    assert decode.is_empty()


def test_running_requests_never_eat_what_a_transfer_was_promised() -> None:
    """They wait, or are sent back to the queue; the transfer ends, decodes, and so do they."""
    prefill, decode = SmallWorker(), SmallWorker(6, growth_tokens=16)
    running = [decode.add([token] * 16, 60) for token in (1, 2)]
    decode.step()
    prompt = [3] * 30
    request, heard = decode.request(prompt, 30)
    with pytest.raises(OutOfBlocks):
        decode.engine.reserve(request)  # the others are promised nothing, but come first
    decode.engine.cancel(running[1].request_id)
    decode.step()
    reservation = decode.engine.reserve(request)
    decode.drain()  # the first grows as far as it can beside the promise, and waits
    assert not running[0].ended
    assert decode.engine.books().promised_blocks == 3
    decode.engine.bind(reservation)
    held, held_heard = prefill.request(prompt, 30, hold=True)
    first_tokens = prefill_request(prefill, held, held_heard)
    carry(prefill, held.choices[0].block_table, decode, reservation)
    decode.engine.adopt(reservation, first_tokens)
    decode.drain()
    assert heard.text == checksum_continuation(CONFIG, prompt, 30)
    assert running[0].text == checksum_continuation(CONFIG, [1] * 16, 60)
    assert decode.is_empty()


@pytest.mark.parametrize("num_whole", range(4))
def test_whole_blocks_of_an_abandoned_reservation_stay_as_cache(num_whole: int) -> None:
    prefill, decode = SmallWorker(), SmallWorker(8)
    prompt = [5] * 40
    reservation = decode.engine.reserve(decode.request(prompt)[0])
    decode.engine.bind(reservation)
    held, heard = prefill.request(prompt, hold=True)
    prefill_request(prefill, held, heard)
    carry(prefill, held.choices[0].block_table, decode, reservation)
    assert decode.engine.abandon(reservation, num_whole)
    decode.engine.check()
    assert decode.is_empty() and decode.engine.books().cached_blocks == min(num_whole, 2)
    again = decode.ask(prompt, 10)
    assert again.num_cached == 16 * min(num_whole, 2)  # the tail of 8 tokens has no name
    assert again.text == checksum_continuation(CONFIG, prompt, 10)


class Watches(SliceObserver):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int, int]] = []

    def begin(self, plan: StepPlan) -> None:
        self._note("begin", -1, plan)

    def layer_done(self, layer: int, plan: StepPlan) -> None:
        self._note("layer", layer, plan)

    def end(self, plan: StepPlan) -> None:
        self._note("end", -1, plan)

    def _note(self, what: str, layer: int, plan: StepPlan) -> None:
        self.seen += [(what, layer, part.start, part.stop) for part in plan.slices]


def test_an_observer_sees_every_layer_of_every_chunk_in_order() -> None:
    watches = Watches()
    worker = SmallWorker(observer=watches)
    request, heard = worker.request([5] * 24, hold=True, max_chunk_tokens=16)
    prefill_request(worker, request, heard)
    chunks = [(0, 16), (16, 24)]
    assert watches.seen == [
        (what, layer, *chunk)
        for chunk in chunks
        for what, layer in [("begin", -1), *(("layer", i) for i in range(4)), ("end", -1)]
    ]
