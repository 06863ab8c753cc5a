import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.engine import ModelBroken
from engine.load import share
from engine.request import (
    Admitted,
    Choice,
    DuplicateRequest,
    EngineStopped,
    Failed,
    Output,
    Refused,
    Request,
    TokenOutput,
)
from engine.sampling_params import SamplingParams
from engine.scheduler import Slice, Step
from engine.stop_rules import StopRules
from kvcache.kv_store import KvStore
from model.batch import Batch
from model.model import OnLayer
from tests.engine.small_worker import CONFIG, Heard, SmallWorker, truth, words


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


def test_a_stop_string_ends_a_choice_across_token_borders() -> None:
    text = b"the quick brown fox"
    worker = SmallWorker(model=Recites(text))
    outputs = worker.ask([1], 40, stop=("own fox",)).outputs
    assert outputs[-1] == TokenOutput(0, 18, ord("x"), finish_reason="stop", stop="own fox")
    held = worker.ask([1], 18, stop=("quick",), min_tokens=9).outputs
    assert isinstance(held[-1], TokenOutput)
    assert held[-1].finish_reason == "length"  # the text of the first 9 tokens is not searched


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


def test_a_model_that_gives_no_numbers_any_more_ends_its_engine() -> None:
    worker = SmallWorker(model=Recites(b"abcdefgh", spoil=lambda position: position >= 20))
    for _ in range(3):
        sick = [worker.add([1] * 18, 8) for _ in range(3)]
        worker.drain()
        assert {heard.failure.code for heard in sick if heard.failure is not None} == {"INTERNAL"}
        assert len(worker.ask([1] * 2, 8).text) == 8  # the others' tokens tell that it is well
    for _ in range(8):
        worker.add([1] * 20, 8)
    with pytest.raises(ModelBroken, match="gave 8 requests in a row no finite logits"):
        worker.drain()


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
