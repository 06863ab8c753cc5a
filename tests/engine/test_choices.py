"""The choices of one request: shared prompts, seeds, and ends of their own."""

import random
from typing import Any

import pytest

from engine.request import (
    Refused,
    TokenOutput,
)
from engine.sampling_params import choice_seed
from tests.engine.small_worker import SmallWorker, truth, words

# Sampling that really samples: the checksum's winner is out of most draws.
SAMPLED: dict[str, Any] = {"temperature": 2.0, "allowed_token_ids": tuple(range(64))}


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


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(Refused, match="stop strings need a tokenizer"):
        SmallWorker(tokenizer=False).add([1], stop=("x",))
