import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.sampler import Draw, Drawn, sample, uniform
from engine.sampling_params import SamplingParams, choice_seed

VOCAB = 40


def naive(logits: Sequence[float], draw: Draw) -> int | None:
    """One draw, with lists and loops: the truth the sampler is compared with."""
    p = draw.params
    scores = {i: float(x) for i, x in enumerate(logits)}
    if not all(math.isfinite(x) for x in scores.values()):
        return None
    for i in {*draw.prompt, *draw.output}:
        scores[i] = (
            scores[i] / p.repetition_penalty if scores[i] > 0 else scores[i] * p.repetition_penalty
        )
    for i, count in Counter(draw.output).items():
        scores[i] -= p.presence_penalty + p.frequency_penalty * count
    for i, bias in p.logit_bias:
        scores[i] += bias
    if p.allowed_token_ids:
        scores = {i: x for i, x in scores.items() if i in p.allowed_token_ids}
    if len(draw.output) < p.min_tokens:
        ending = {*p.stop_token_ids, *(() if p.ignore_eos else draw.eos_token_ids)}
        scores = {i: x for i, x in scores.items() if i not in ending}
    if not scores:
        return None
    order = sorted(scores, key=lambda i: (-scores[i], i))
    if p.temperature < 1e-5:
        return order[0]
    weights = {i: math.exp((scores[i] - scores[order[0]]) / p.temperature) for i in order}
    kept = [i for i in order if weights[i] >= p.min_p]
    kept = kept[: p.top_k] if p.top_k else kept
    total, nucleus, mass = sum(weights[i] for i in kept), [], 0.0
    for i in kept:
        if mass >= p.top_p * total and p.top_p < 1:
            break
        nucleus.append(i)
        mass += weights[i]
    walk = nucleus if p.top_k or p.top_p < 1 else sorted(nucleus)
    target = uniform(p.seed, draw.choice, len(draw.output)) * sum(weights[i] for i in walk)
    for i in walk:
        target -= weights[i]
        if target < 0:
            return i
    return walk[-1]


def params(max_tokens: int = 100, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens, **fields)


def one(logits: Sequence[float], sampling: SamplingParams, **fields: Any) -> Drawn | None:
    fields = {"prompt": [0], "output": [], **fields}
    (drawn,) = sample(torch.tensor([list(logits)]), [Draw(0, sampling, 0, **fields)])
    return drawn


def token(logits: Sequence[float], sampling: SamplingParams, **fields: Any) -> int:
    drawn = one(logits, sampling, **fields)
    assert drawn is not None
    return drawn.token_id


def random_draw(rng: np.random.Generator, row: int) -> Draw:
    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.4 else otherwise

    ids = [int(i) for i in rng.integers(0, VOCAB, 6)]
    sampling = params(
        temperature=float(maybe(0.0, rng.choice([1e-4, 0.3, 1.0, 2.0]))),
        top_k=int(maybe(rng.integers(1, 12), 0)),
        top_p=float(maybe(rng.uniform(0.05, 0.99), 1.0)),
        min_p=float(maybe(rng.uniform(0.0, 0.4), 0.0)),
        repetition_penalty=float(maybe(rng.uniform(0.5, 2.0), 1.0)),
        presence_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),
        frequency_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),
        logit_bias=maybe(((3, 2.0), (ids[0] + VOCAB, 0.0), (7, -50.0))[::2], ()),
        allowed_token_ids=maybe(tuple(sorted(set(ids))), ()),
        stop_token_ids=maybe((ids[1],), ()),
        min_tokens=int(maybe(8, 0)),
        ignore_eos=bool(maybe(True, False)),
        seed=int(rng.integers(0, 2**63)),
    )
    output = [int(i) for i in rng.integers(0, VOCAB, rng.integers(0, 12))]
    return Draw(row, sampling, int(rng.integers(0, 3)), ids, output, eos_token_ids=(2,))


def test_every_combination_of_rules_agrees_with_the_naive_sampler() -> None:
    rng = np.random.default_rng(5)
    for _ in range(150):
        logits_RV = torch.tensor(rng.normal(0, 2, (8, VOCAB)), dtype=torch.float32)
        draws = [random_draw(rng, row) for row in range(8)]
        drawn = sample(logits_RV, draws)
        expected = [naive(logits_RV[draw.row].tolist(), draw) for draw in draws]
        assert [result and result.token_id for result in drawn] == expected


@pytest.mark.parametrize("likeliest", [1, 2, 5, 39])
def test_looking_at_the_likeliest_first_changes_nothing(
    likeliest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(7)
    logits_RV = torch.tensor(rng.integers(0, 6, (200, VOCAB)), dtype=torch.float32)  # many ties
    draws = [random_draw(rng, row) for row in range(200)]
    full = sample(logits_RV, draws)
    monkeypatch.setattr("kernels.sample_tokens.LIKELIEST", likeliest)
    assert sample(logits_RV, draws) == full


def test_a_draw_does_not_depend_on_its_neighbours_or_on_its_row() -> None:
    rng = np.random.default_rng(6)
    logits_RV = torch.tensor(rng.normal(0, 2, (30, VOCAB)), dtype=torch.float32)
    draws = [random_draw(rng, row) for row in range(30)]
    together = sample(logits_RV, draws)
    alone = [sample(logits_RV[d.row : d.row + 1], [Draw(0, *_rest(d))])[0] for d in draws]
    assert alone == together
    backwards = sample(logits_RV.flip(0), [Draw(29 - d.row, *_rest(d)) for d in draws])
    assert backwards == together


def _rest(draw: Draw) -> tuple[Any, ...]:
    return draw.params, draw.choice, draw.prompt, draw.output, draw.eos_token_ids


def test_logits_stay_as_they_are() -> None:
    logits_RV = torch.arange(8.0).reshape(2, 4)
    sampling = params(temperature=0.5, top_k=2, repetition_penalty=1.5, logit_bias=((0, 5.0),))
    sample(logits_RV, [Draw(row, sampling, 0, [1], [2]) for row in range(2)])
    assert logits_RV.flatten().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        (params(temperature=1.0), [0.1, 0.2, 0.3, 0.4]),
        (params(temperature=0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        (params(temperature=1.0, top_k=2), [0, 0, 3 / 7, 4 / 7]),
        (params(temperature=1.0, top_p=0.75), [0, 2 / 9, 3 / 9, 4 / 9]),
        (params(temperature=1.0, min_p=0.6), [0, 0, 3 / 7, 4 / 7]),
        (params(temperature=1.0, allowed_token_ids=(0, 3)), [0.2, 0, 0, 0.8]),
    ],
)
def test_frequencies_fit_the_distribution(sampling: SamplingParams, weights: list[float]) -> None:
    logits_RV = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    count = 20_000
    draws = [Draw(0, sampling, 0, [0], range(index)) for index in range(count)]
    seen = Counter(drawn.token_id for drawn in sample(logits_RV, draws) if drawn)
    chi_square = sum(
        (seen[i] - count * weight) ** 2 / (count * weight)
        for i, weight in enumerate(weights)
        if weight
    )
    assert chi_square < 16.3  # p = 0.001 at 3 degrees of freedom; the noise is fixed
    assert all(seen[i] == 0 for i, weight in enumerate(weights) if not weight)


def test_noise_is_a_contract_between_workers() -> None:
    assert [uniform(1, 0, index) for index in range(2)] == [
        0.5631175988272692,
        0.732927118690441,
    ]
    assert uniform(1, 3, 5) == uniform(choice_seed(1, 3), 0, 5)
    assert len({uniform(seed, 0, 0) for seed in range(1000)}) == 1000


def test_noise_is_even() -> None:
    noise = np.array([uniform(seed, 0, index) for seed in range(100) for index in range(200)])
    counts, _ = np.histogram(noise, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # p = 0.001 at 19 degrees of freedom
    by_seed = noise.reshape(100, 200)
    assert np.abs(np.corrcoef(by_seed)[np.triu_indices(100, 1)]).max() < 0.35


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-4])
@pytest.mark.parametrize("top_p", [1.0, 1e-4])
def test_tiny_temperatures_and_nuclei_give_the_greedy_token(
    temperature: float, top_p: float
) -> None:
    logits = [1.0, 3.0, 2.9, -5.0]
    for seed in range(20):
        sampling = params(temperature=temperature, top_p=top_p, seed=seed)
        assert token(logits, sampling) == 1
    assert token(logits, params(temperature=1.0, top_p=1e-4, seed=3)) == 1


def test_temperature_one_samples_and_a_seed_repeats_itself() -> None:
    logits = np.random.default_rng(1).normal(0, 1, VOCAB).tolist()
    tokens = [token(logits, params(temperature=1.0, seed=seed)) for seed in range(1, 21)]
    assert len(set(tokens)) >= 2
    assert tokens == [token(logits, params(temperature=1.0, seed=seed)) for seed in range(1, 21)]


def test_equal_logits_are_broken_towards_the_lower_id() -> None:
    assert token([0.0, 5.0, 5.0, 5.0], params(temperature=0)) == 1
    tokens = {
        token([0.0, 5.0, 5.0, 5.0], params(temperature=1.0, top_k=2, seed=s)) for s in range(50)
    }
    assert tokens == {1, 2}


def test_repetition_looks_at_prompt_and_output_presence_and_frequency_at_output_only() -> None:
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert token([4.0, 3.0, 0.0], params(repetition_penalty=2.0, **greedy), prompt=[0]) == 1
    assert token([-1.0, -1.5, -9], params(repetition_penalty=2.0, **greedy), prompt=[0]) == 1
    assert token([4.0, 3.0, 0.0], params(presence_penalty=2.0, **greedy), prompt=[0]) == 0
    assert token([4.0, 3.0, 0.0], params(presence_penalty=2.0, **greedy), output=[0]) == 1
    assert token([4.0, 3.0, 0.0], params(frequency_penalty=0.6, **greedy), output=[0]) == 0
    assert token([4.0, 3.0, 0.0], params(frequency_penalty=0.6, **greedy), output=[0, 0]) == 1


def test_min_tokens_holds_back_eos_and_stop_tokens_until_they_are_there() -> None:
    sampling = params(min_tokens=2, stop_token_ids=(1,), temperature=0.0)
    logits = [9.0, 8.0, 7.0, 0.0]
    assert token(logits, sampling, output=[3], eos_token_ids=(0,)) == 2
    assert token(logits, sampling, output=[3, 3], eos_token_ids=(0,)) == 0
    ignoring = params(min_tokens=2, ignore_eos=True, temperature=0.0)
    assert token(logits, ignoring, output=[], eos_token_ids=(0,)) == 0


def test_logprobs_are_the_models_own_whatever_the_request_does_to_them() -> None:
    logits_RV = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    sampling = params(temperature=0.0, logprobs=2, logit_bias=((0, 100.0),))
    (drawn,) = sample(logits_RV, [Draw(0, sampling, 0, [0], [])])
    assert drawn is not None
    assert drawn.token_id == 0
    assert drawn.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token_id for token_id, _ in drawn.top] == [3, 2]
    assert [logprob for _, logprob in drawn.top] == pytest.approx(
        [math.log(0.4), math.log(0.3)], abs=1e-6
    )


def test_logprobs_zero_reports_the_token_alone_and_none_reports_nothing() -> None:
    assert one([0.0, 0.0], params(temperature=0, logprobs=0)) == Drawn(0, -math.log(2), ())
    assert one([0.0, 0.0], params(temperature=0)) == Drawn(0)
    tied = one([1.0, 1.0, 1.0, 0.0], params(temperature=0, logprobs=2))
    assert tied is not None
    assert [token_id for token_id, _ in tied.top] == [0, 1]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_numbers_fails_alone(poison: float, temperature: float) -> None:
    logits_RV = torch.tensor([[0.0, 1.0], [poison, 1.0], [3.0, 1.0]])
    sampling = params(temperature=temperature, seed=4, top_p=0.9)
    drawn = sample(logits_RV, [Draw(row, sampling, 0, [0], []) for row in range(3)])
    clean = torch.tensor([[0.0, 1.0], [3.0, 1.0]])
    neighbours = sample(clean, [Draw(row, sampling, 0, [0], []) for row in range(2)])
    assert drawn == [neighbours[0], None, neighbours[1]]


def test_a_draw_with_every_token_forbidden_fails_alone() -> None:
    forbidden = params(allowed_token_ids=(1,), stop_token_ids=(1,), min_tokens=1)
    draws = [Draw(0, forbidden, 0, [0], []), Draw(0, params(temperature=0), 0, [0], [])]
    assert sample(torch.tensor([[1.0, 2.0]]), draws) == [None, Drawn(1)]
