import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.load import share
from engine.request import (
    Admitted,
    Choice,
    DuplicateRequest,
    EngineStopped,
    Failed,
    Output,
    QueueFull,
    Refused,
    Request,
    TokenOutput,
    TooLarge,
)
from engine.sampling_params import SamplingParams, choice_seed
from engine.scheduler import Slice, Step
from engine.stop_rules import StopRules
from kvcache.block_hash import tenant_key
from kvcache.block_pool import Removed, Stored
from kvcache.kv_store import KvStore
from model.batch import Batch
from model.checksum_reference import checksum_continuation
from model.model import OnLayer
from tests.engine.small_worker import CONFIG, Heard, SmallWorker


def truth(prompt: list[int], max_tokens: int) -> list[int]:
    return checksum_continuation(CONFIG, prompt, max_tokens)


# Sampling that really samples: the checksum's winner is out of most draws.
SAMPLED: dict[str, Any] = {"temperature": 2.0, "allowed_token_ids": tuple(range(64))}


def words(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(CONFIG.vocab_size) for _ in range(length)]


@pytest.mark.parametrize("chunk", [16, 64, 0])
@pytest.mark.parametrize("num_blocks", [12, 200])
def test_many_requests_get_the_tokens_they_would_get_alone(chunk: int, num_blocks: int) -> None:
    rng = random.Random(chunk + num_blocks)
    worker = SmallWorker(num_blocks, max_tokens_per_step=96, max_running=12, growth_tokens=0)
    shared = words(rng, 48)
    asked = []
    for _ in range(30):
        prompt = shared[: rng.choice([0, 0, 16, 31, 48])] + words(rng, rng.randrange(1, 70))
        max_tokens = rng.randrange(1, 40)
        n = rng.choice([1, 1, 1, 2, 3])
        options = {"n": n, "max_chunk_tokens": chunk}
        asked.append((prompt, max_tokens, worker.add(prompt, max_tokens, **options)))
    worker.drain()
    for prompt, max_tokens, heard in asked:
        expected = truth(prompt, max_tokens)
        assert heard.tokens == {choice: expected for choice in range(heard.num_choices)}
        assert set(heard.finishes.values()) == {"length"}
    assert worker.is_empty()
    assert worker.engine.stats().finished_requests == 30
    assert (worker.engine.stats().preemptions > 0) == (num_blocks == 12)


def test_the_books_balance_when_a_third_is_cancelled_at_random_moments() -> None:
    rng = random.Random(3)
    worker = SmallWorker(30, max_tokens_per_step=64, max_running=8)
    asked: list[tuple[list[int], int, Heard]] = []
    cancelled = set()
    while len(asked) < 90 or not worker.is_empty():
        if len(asked) < 90 and rng.random() < 0.4:
            prompt, max_tokens = words(rng, rng.randrange(1, 80)), rng.randrange(1, 30)
            heard = worker.add(prompt, max_tokens, n=rng.choice([1, 2]))
            asked.append((prompt, max_tokens, heard))
        if asked and rng.random() < 0.3:
            victim = rng.choice(asked[-12:])[2]
            found = worker.engine.cancel(victim.request_id)
            assert found != victim.ended
            cancelled |= {victim.request_id} if found else set()
        worker.step()
    for prompt, max_tokens, heard in asked:
        expected = truth(prompt, max_tokens)
        assert heard.ended
        if heard.request_id in cancelled:
            assert heard.failure == Failed("CANCELLED", "the request was cancelled")
        else:
            assert heard.failure is None
            assert all(len(tokens) == max_tokens for tokens in heard.tokens.values())
        assert all(tokens == expected[: len(tokens)] for tokens in heard.tokens.values())
    assert 25 < len(cancelled) == worker.engine.stats().cancelled_requests


@pytest.mark.parametrize(
    ("num_tokens", "cached"),
    [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32), (49, 48)],
)
def test_a_repeat_computes_all_but_the_full_blocks_before_its_last_token(
    num_tokens: int, cached: int
) -> None:
    worker = SmallWorker()
    prompt = [num_tokens] * num_tokens
    assert worker.ask(prompt).num_cached == 0
    before = worker.engine.stats().computed_tokens
    for _ in range(3):
        again = worker.ask(prompt, max_tokens=1, max_chunk_tokens=16)
        assert again.num_cached == cached == (num_tokens - 1) // 16 * 16
        assert again.text == truth(prompt, 1)
    assert worker.engine.stats().computed_tokens - before == 3 * (num_tokens - cached)
    assert worker.engine.stats().cached_tokens == 3 * cached
    assert worker.engine.load().computed_prompts == 4, "chunks are no prompts of their own"
    assert worker.is_empty()


def test_a_shared_prefix_leaves_exactly_the_rest_to_compute() -> None:
    worker = SmallWorker()
    worker.ask([1] * 16)
    request, heard = worker.request([1] * 16 + [2] * 13, 1)
    worker.engine.add(request)
    worker.drain()
    assert (heard.num_cached, request.num_computed_tokens) == (16, 13)


def test_a_request_sent_back_to_the_queue_leaves_exactly_the_rest_to_compute_again() -> None:
    worker = SmallWorker(5, growth_tokens=0)
    worker.ask([1] * 16)
    older = worker.add([9] * 30, 30)  # of four blocks in the end
    worker.step()
    request, heard = worker.request([1] * 16 + [2] * 13, 6)
    worker.engine.add(request)
    worker.step()
    assert request.num_computed_tokens == 13
    worker.drain()
    assert worker.engine.stats().preemptions == 1
    assert request.num_computed_tokens == 13 + 13
    assert older.text == truth([9] * 30, 30)
    assert heard.text == truth([1] * 16 + [2] * 13, 6)


def test_a_prompt_whose_blocks_another_took_is_computed_anew() -> None:
    worker = SmallWorker(4)
    assert worker.ask([5] * 32, 1).text == truth([5] * 32, 1)
    assert worker.ask([6] * 64, 1).text == truth([6] * 64, 1)  # all four blocks
    again = worker.ask([5] * 32, 20)
    assert (again.num_cached, again.text) == (0, truth([5] * 32, 20))
    assert worker.is_empty()


def test_a_cached_prefix_evicted_while_its_request_waits_is_counted_anew() -> None:
    worker = SmallWorker(8, growth_tokens=0)
    worker.ask([3] * 32, 1)
    grows = worker.add([8] * 96, 20)  # six blocks now, the cached two when it needs them
    worker.step()
    prompt = [3] * 32 + [4] * 17
    request, waits = worker.request(prompt, 9)
    worker.engine.add(request)
    assert worker.engine.match(request.names) == 2
    worker.step()
    assert (worker.engine.match(request.names), waits.outputs) == (1, [])
    worker.drain()
    assert grows.text == truth([8] * 96, 20)
    assert (waits.num_cached, request.num_computed_tokens) == (0, 49)
    assert waits.text == truth(prompt, 9)


def test_output_blocks_are_cached_like_prompt_blocks() -> None:
    worker = SmallWorker()
    prompt = [3] * 20
    output = worker.ask(prompt, max_tokens=30).text
    follow_up = worker.ask([*prompt, *output, 5], max_tokens=2)
    assert follow_up.num_cached == 48  # of 20 + 29 computed tokens
    assert follow_up.text == truth([*prompt, *output, 5], 2)


def test_one_tenants_blocks_are_not_found_by_another() -> None:
    worker = SmallWorker()
    worker.ask([3] * 40, tenant=tenant_key("a"))
    assert worker.ask([3] * 40, tenant=tenant_key("b")).num_cached == 0
    assert worker.ask([3] * 40, tenant=tenant_key("a")).num_cached == 32


def test_two_long_requests_in_a_pool_for_one_and_a_half_both_come_out_right() -> None:
    worker = SmallWorker(7, growth_tokens=0)
    prompts = [[seed] * 34 for seed in (1, 2)]
    requests = [worker.request(prompt, 35) for prompt in prompts]
    for request, _ in requests:
        worker.engine.add(request)
    worker.drain()
    assert [heard.text for _, heard in requests] == [truth(prompt, 35) for prompt in prompts]
    assert worker.engine.stats().preemptions == 1
    # Sent back once, the second finds the two full blocks of its prompt again.
    assert [request.num_computed_tokens for request, _ in requests] == [34, 34 + 2]


@pytest.mark.parametrize(("max_tokens", "delivered"), [(1, 1), (2, 2), (17, 17), (18, 16)])
def test_a_prompt_that_ends_on_a_blocks_edge_may_fill_the_one_block_left(
    max_tokens: int, delivered: int
) -> None:
    worker = SmallWorker(2)
    heard = worker.ask([7] * 16, max_tokens)
    assert heard.text == truth([7] * 16, delivered)
    assert heard.failure is None or heard.failure.code == "RESOURCE_EXHAUSTED"
    assert (heard.failure is None) == (delivered == max_tokens)
    assert worker.is_empty()


@pytest.mark.parametrize(("max_tokens", "waits"), [(1, False), (2, True), (17, True)])
def test_a_prompt_that_fills_the_last_free_block_waits_for_its_next_one(
    max_tokens: int, waits: bool
) -> None:
    worker = SmallWorker(3, growth_tokens=0)
    neighbour = worker.add([6] * 17, 15)
    worker.step()
    assert worker.engine.books().free_blocks == 1
    heard = worker.add([7] * 16, max_tokens)
    worker.step()
    worker.step()
    assert (heard.ended, neighbour.ended) == (not waits, False)
    worker.drain()
    assert heard.text == truth([7] * 16, max_tokens)
    assert neighbour.text == truth([6] * 17, 15)
    assert worker.is_empty()


def test_one_request_that_outgrows_the_pool_ends_alone_and_the_next_is_served() -> None:
    worker = SmallWorker(8)
    heard = worker.ask([1] * 100, max_tokens=400)
    assert heard.text == truth([1] * 100, 28)
    assert heard.failure == Failed(
        "RESOURCE_EXHAUSTED",
        "request request 0 has outgrown the pool: it needs more than 8 blocks"
        " after 28 output tokens",
    )
    assert worker.ask([2] * 100, max_tokens=20).text == truth([2] * 100, 20)
    assert worker.is_empty()


def test_ten_long_requests_in_a_pool_for_three_all_end() -> None:
    worker = SmallWorker(30, max_tokens_per_step=128)
    heards = [worker.add([i] * 40, max_tokens=110) for i in range(10)]
    worker.drain()
    assert [heard.text for heard in heards] == [truth([i] * 40, 110) for i in range(10)]
    assert worker.is_empty()


def test_a_request_the_pool_can_never_hold_is_refused_at_once() -> None:
    worker = SmallWorker(4)
    with pytest.raises(TooLarge, match="needs 5 blocks for its 64 prompt tokens, the pool has 4"):
        worker.add([1] * 64, max_tokens=2)
    assert worker.ask([1] * 64, max_tokens=1).text == truth([1] * 64, 1)


def test_a_full_queue_refuses_with_a_hint_and_keeps_nothing() -> None:
    worker = SmallWorker(max_waiting=2)
    worker.add([1])
    worker.add([2])
    with pytest.raises(QueueFull, match="2 requests are waiting, at most 2 may") as raised:
        worker.add([3], name="late")
    assert raised.value.code == "RESOURCE_EXHAUSTED"
    assert raised.value.retry_after_ms == 100
    worker.drain()
    assert worker.ask([3], name="late").ended


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sentence"),
    [
        ([], 1, "has an empty prompt"),
        ([5, 512], 1, "outside the vocabulary of 512"),
        ([-1], 1, "outside the vocabulary of 512"),
        ([1] * 60, 41, "has 60 prompt tokens and max_tokens 41, the context holds 100"),
    ],
)
def test_what_no_router_would_send_is_refused_and_a_neighbour_is_not_disturbed(
    prompt: list[int], max_tokens: int, sentence: str
) -> None:
    worker = SmallWorker(vocab_size=512, max_context=100)
    neighbour = worker.add([4] * 9, 3)
    with pytest.raises(Refused, match=sentence):
        worker.add(prompt, max_tokens)
    worker.drain()
    assert neighbour.text == truth([4] * 9, 3)


def test_an_id_in_use_is_refused() -> None:
    worker = SmallWorker()
    worker.add([1], name="same")
    with pytest.raises(DuplicateRequest, match="request same is here already"):
        worker.add([2], name="same")
    worker.drain()
    worker.ask([2], name="same")


def test_cleaning_up_after_a_refused_request_leaves_its_namesake_running() -> None:
    worker = SmallWorker()
    first = worker.add([1] * 5, name="same")
    second, _ = worker.request([2], name="same")
    with pytest.raises(DuplicateRequest):
        worker.engine.add(second)
    assert not worker.engine.cancel(second)
    assert not worker.engine.release_held(second)
    worker.drain()
    assert first.text == truth([1] * 5, 8)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_n_choices_share_the_prompt_and_equal_n_requests_with_their_seeds(n: int) -> None:
    prompt = [9] * 37
    options = {**SAMPLED, "top_k": 30, "logprobs": 2}
    together = SmallWorker()
    heard = together.add(prompt, 12, n=n, seed=5, **options)
    together.step()
    assert together.pool.num_used == 3  # shared: all the prompt's blocks
    together.drain()
    assert together.engine.stats().computed_tokens == 37 + n * 11
    for choice in range(n):
        alone = SmallWorker()
        single = alone.ask(prompt, 12, seed=choice_seed(5, choice), **options)
        assert heard.tokens[choice] == single.text
        logprobs = [
            [out.logprob for out in h.outputs if isinstance(out, TokenOutput) and out.choice == c]
            for h, c in ((heard, choice), (single, 0))
        ]
        assert logprobs[0] == logprobs[1]
    assert together.is_empty()


def test_the_choices_of_one_request_differ_when_sampled() -> None:
    heard = SmallWorker().ask([9] * 5, 12, n=4, seed=5, **SAMPLED)
    assert len({tuple(tokens) for tokens in heard.tokens.values()}) == 4


def test_choices_that_end_early_leave_the_others_alone() -> None:
    prompt = [9] * 20
    options = {"temperature": 2.0, "allowed_token_ids": tuple(range(16))}
    free = SmallWorker().ask(prompt, 20, n=4, seed=3, **options)
    stop = free.tokens[2][4]
    worker = SmallWorker()
    heard = worker.ask(prompt, 20, n=4, seed=3, stop_token_ids=(stop,), **options)
    for choice, tokens in free.tokens.items():
        end = tokens.index(stop) + 1 if stop in tokens else 20
        assert heard.tokens[choice] == tokens[:end]
        assert heard.finishes[choice] == ("stop" if stop in tokens else "length")
    assert worker.is_empty()


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_after_preemption() -> None:
    options = {**SAMPLED, "top_p": 0.9, "seed": 11}
    alone = SmallWorker().ask([5] * 30, 30, **options).text
    assert SmallWorker().ask([5] * 30, 30, **{**options, "seed": 12}).text != alone
    rng = random.Random(1)
    crowd = SmallWorker(10, growth_tokens=0, max_tokens_per_step=48)
    others = [crowd.add(words(rng, 20), 40) for _ in range(3)]
    heard = crowd.add([5] * 30, 30, **options)
    others += [crowd.add(words(rng, 20), 40) for _ in range(3)]
    crowd.drain()
    assert crowd.engine.stats().preemptions > 0
    assert heard.text == alone


def test_stop_tokens_eos_and_length_end_a_choice_with_their_reason() -> None:
    prompt = [8] * 10
    tokens = truth(prompt, 6)

    def last(**options: object) -> TokenOutput:
        output = SmallWorker().ask(prompt, 6, **options).outputs[-1]
        assert isinstance(output, TokenOutput)
        return output

    assert last() == TokenOutput(0, 5, tokens[5], finish_reason="length")
    eos = last(eos=(tokens[2],))
    assert eos == TokenOutput(0, 2, tokens[2], finish_reason="stop", stop_token_id=tokens[2])
    assert last(stop_token_ids=(tokens[1],)).index == 1
    assert last(eos=(tokens[2],), ignore_eos=True).index == 5
    assert last(eos=(tokens[0],), min_tokens=3).index >= 3


def test_a_stop_string_ends_a_choice_across_token_borders() -> None:
    text = b"the quick brown fox"
    worker = SmallWorker(model=Recites(text))
    outputs = worker.ask([1], 40, stop=("own fox",)).outputs
    assert outputs[-1] == TokenOutput(0, 18, ord("x"), finish_reason="stop", stop="own fox")
    held = worker.ask([1], 18, stop=("quick",), min_tokens=9).outputs
    assert isinstance(held[-1], TokenOutput)
    assert held[-1].finish_reason == "length"  # the text of the first 9 tokens is not searched


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(Refused, match="stop strings need a tokenizer"):
        SmallWorker(tokenizer=False).add([1], stop=("x",))


class Recites:
    """A checksum model's cache under logits that spell a text, one byte a token."""

    def __init__(self, text: bytes, spoil: Callable[[int], bool] = lambda position: False) -> None:
        self._model = SmallWorker().model
        self.spec = self._model.spec
        self._text = text
        self._spoil = spoil

    def forward(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> torch.Tensor | None:
        self._model.forward(batch, store, on_layer)
        positions = batch.positions_T[batch.logit_rows_R].tolist()
        logits_RV = torch.zeros(len(positions), CONFIG.vocab_size)
        for row, position in enumerate(positions):
            logits_RV[row, self._text[position % len(self._text)]] = 1.0
            if self._spoil(position):
                logits_RV[row, 3] = float("nan")
        return logits_RV


def test_logits_that_are_no_numbers_end_their_request_and_no_other() -> None:
    worker = SmallWorker(model=Recites(b"abcdefgh", spoil=lambda position: position == 20))
    sick, well = worker.add([1] * 18, 8, n=2), worker.add([1] * 2, 8)
    worker.drain()
    assert sick.failure == Failed("INTERNAL", "the model gave no finite logits for token 3")
    assert {choice: len(tokens) for choice, tokens in sick.tokens.items()} == {0: 3, 1: 3}
    assert bytes(well.text) == b"bcdefgha"
    assert worker.engine.stats().nonfinite_requests == 1
    assert worker.is_empty()


def test_a_listener_that_fails_loses_its_request_and_no_other() -> None:
    worker = SmallWorker()
    request, _ = worker.request([1], 5)

    def fail(output: object) -> None:
        raise OSError("nobody is listening")

    request.on_output = fail
    worker.engine.add(request)
    well = worker.ask([2] * 5, 5)
    assert well.text == truth([2] * 5, 5)
    assert worker.is_empty()


@pytest.mark.parametrize("hold", [True, False])
def test_a_first_token_is_told_before_the_step_is_booked(
    hold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has the pool named a block of the prompt, nor could the index hear of one."""
    worker, log = SmallWorker(), list[str]()
    name, commit = worker.pool.name, worker.engine._roster.commit

    def named(*arguments: Any) -> bool:
        log.append("named")
        return name(*arguments)

    def committed(*arguments: Any) -> object:
        log.append("booked")
        return commit(*arguments)

    monkeypatch.setattr(worker.pool, "name", named)
    monkeypatch.setattr(worker.engine._roster, "commit", committed)
    request, heard = worker.request([7] * 40, 3, hold=hold, n=2)

    def on_output(output: Output) -> None:
        if isinstance(output, TokenOutput):
            log.append(f"token {output.index} of {output.choice}")
        heard(output)

    request.on_output = on_output
    worker.engine.add(request)
    worker.engine.step()
    assert log == ["token 0 of 0", "token 0 of 1", "booked", "named", "named"]
    assert heard.text == truth([7] * 40, 1)
    worker.engine.check()


def test_a_first_token_that_ends_its_request_is_told_once_and_when_it_is_booked() -> None:
    worker = SmallWorker()
    heard = worker.ask([7] * 40, 1)
    assert (heard.text, heard.finishes) == (truth([7] * 40, 1), {0: "length"})
    assert worker.is_empty()


def test_what_becomes_cached_and_what_is_evicted_is_told() -> None:
    worker = SmallWorker(3)
    request, _ = worker.request([1] * 33, 1)
    worker.engine.add(request)
    worker.drain()
    first, second = request.names
    assert worker.engine.drain_events() == [Stored(first, None, 0), Stored(second, first, 1)]
    assert worker.engine.resident() == [first, second]
    assert worker.engine.match(request.names) == 2
    worker.ask([2] * 20, 1)
    assert worker.engine.drain_events()[0] == Removed(second)
    assert worker.engine.flush_cache() == 2
    assert worker.engine.resident() == []


def test_load_and_books_say_what_is_where() -> None:
    worker = SmallWorker(8, max_running=1)
    worker.add([1] * 20, 3)
    worker.add([2] * 30, 3)
    worker.step()
    load = worker.engine.load()
    assert (load.running, load.waiting, load.queued_tokens) == (1, 1, 31)
    assert (load.free_blocks, load.total_blocks) == (6, 8)
    assert load.prefill_ms_per_token > 0
    assert load.decode_step_ms == 0
    books = worker.engine.books()
    assert (books.running_requests, books.waiting_requests, books.used_blocks) == (1, 1, 2)
    worker.drain()
    load = worker.engine.load()
    assert load.decode_step_ms > 0 and load.step_sequences == 1 and load.context_tokens == 0
    assert 20 < load.step_context_tokens < 35
    assert worker.engine.books().cached_blocks == 3


def test_a_prompt_is_charged_for_its_share_of_the_steps_and_for_nothing_it_waited() -> None:
    worker = SmallWorker(16, max_running=1)
    requests = []
    for seed in (1, 2):
        request, _ = worker.request([seed] * 60, 3)
        worker.engine.add(request)
        requests.append(request)
    worker.drain()
    first, second = requests
    assert first.compute_ms > 0 and second.compute_ms > 0
    assert second.queue_ms > first.compute_ms > first.queue_ms / 100
    step = Step([Slice(choice(60), 0, 30, False), Slice(choice(10), 9, 11, True)])
    share(step, 100.0, 100.064)
    assert [part.choice.request.compute_ms for part in step.slices] == pytest.approx([60.0, 2.0])


def choice(num_tokens: int) -> Choice:
    request = Request("r", 1, [0] * num_tokens, SamplingParams(4), lambda _output: None)
    return Choice(request, 0, StopRules(request.params, (), None))


def test_an_accepted_request_hears_that_it_was_admitted_first_and_once() -> None:
    worker = SmallWorker(7, growth_tokens=0)
    heards = [worker.add([seed] * 34, 35) for seed in (1, 2)]
    worker.drain()
    for heard in heards:
        assert heard.outputs[0] == Admitted(0)
        assert sum(isinstance(output, Admitted) for output in heard.outputs) == 1


def test_a_stopped_engine_takes_no_more() -> None:
    worker = SmallWorker()
    worker.engine.stop()
    with pytest.raises(EngineStopped, match="takes no more requests"):
        worker.add([1])
