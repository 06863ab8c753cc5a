"""From logits to tokens, each choice by its own rules, whatever else is in the batch.

For each draw, in this order: logprobs are read from the raw logits; EOS and stop ids are masked
until min_tokens are there, then everything but the allowed ids; repetition (Keskar et al. 2019),
presence and frequency penalties; logit bias; temperature; min-p; top-k; top-p over what is left.
Then one uniform number, a function of (seed, choice, index) only, is looked up in the cumulative
distribution. So a token does not depend on the batch, on preemption, or on which worker draws it.

    logits_RV   R rows of the step, V vocabulary
    draws       a row may serve several: the n choices of a prompt
    D           draws of one kind
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling_params import SamplingParams, choice_seed
from engine.stop_rules import ending_token_ids
from kernels.best_tokens import best_tokens
from kernels.launch import device_of, sent
from kernels.sample_tokens import Filters, sample_tokens

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn from row `row`: number len(output) of this choice."""

    row: int
    params: SamplingParams
    choice: int
    prompt: Sequence[int]
    output: Sequence[int]
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, choice: int, index: int) -> float:
    """Noise in [0, 1) for one token: SplitMix64 (Steele et al. 2014), used as a counter."""
    state = _mix(choice_seed(seed, choice) ^ 0x6A09E667F3BCC909)
    return (_mix(state + (index + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits_RV: Tensor, draws: Sequence[Draw]) -> list[Drawn | None]:
    """Draw one token per draw; None where the logits leave none (NaN, infinite, all masked)."""
    if not draws:
        return []
    with device_of(logits_RV):
        tokens, possible = queue_draws(logits_RV, draws).tolist()  # waits, once
        return [
            Drawn(token_id, *_logprobs(logits_RV[draw.row], token_id, draw.params)) if ok else None
            for ok, token_id, draw in zip(possible, tokens, draws, strict=True)
        ]


@torch.inference_mode()
def queue_draws(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The tokens, and whether they are any, one under the other; of a device nothing is awaited."""
    rows_D = _ids([draw.row for draw in draws], logits_RV)
    logits_DV, found = logits_RV, best_tokens(logits_RV)
    sane_R = found.sane_R
    if any(map(_is_shaped, draws)) or [draw.row for draw in draws] != [*range(len(logits_RV))]:
        logits_DV = logits_RV[rows_D]  # a copy, to be written
        for number, draw in enumerate(draws):
            _shape(logits_DV[number], draw)
        found = best_tokens(logits_DV)
    possible_D = sane_R[rows_D] & found.possible_R
    tokens_D = found.best_R
    for kind in (_is_plain, _is_filtered):
        numbers = [i for i, draw in enumerate(draws) if kind(draw.params)]
        if numbers:
            some_D = _ids(numbers, logits_RV)
            none_D1 = possible_D[some_D, None].logical_not()
            random_DV = logits_DV[some_D].masked_fill_(none_D1, 0.0)  # drawn in vain
            chosen_D = _draw_random(random_DV, [draws[i] for i in numbers])
            tokens_D = tokens_D.index_copy(0, some_D, chosen_D)
    return torch.stack([tokens_D, possible_D.long()])


def _is_plain(params: SamplingParams) -> bool:
    """Random, and no need to sort the vocabulary."""
    return not params.greedy and not _sorts(params)


def _is_filtered(params: SamplingParams) -> bool:
    return not params.greedy and _sorts(params)


def _sorts(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _is_shaped(draw: Draw) -> bool:
    params = draw.params
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens > len(draw.output)
    )


def _shape(logits_V: Tensor, draw: Draw) -> None:
    """Apply, in place, everything that comes before the temperature."""
    params = draw.params
    ids: Tensor
    if params.repetition_penalty != 1.0:
        ids = _ids(sorted({*draw.prompt, *draw.output}), logits_V)
        seen = logits_V[ids]
        penalty = params.repetition_penalty
        logits_V[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if draw.output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(draw.output)
        ids = _ids(list(counts), logits_V)
        times = _column(list(counts.values()), logits_V).to(logits_V.dtype)
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        ids = _ids([token_id for token_id, _ in params.logit_bias], logits_V)
        biases = [bias for _, bias in params.logit_bias]
        logits_V[ids] += _column(biases, logits_V).to(logits_V.dtype)
    if params.allowed_token_ids:
        ids = _ids(params.allowed_token_ids, logits_V)
        allowed = logits_V[ids].clone()
        logits_V.fill_(-torch.inf)
        logits_V[ids] = allowed
    if len(draw.output) < params.min_tokens:
        ending = sorted(ending_token_ids(params, draw.eos_token_ids))
        logits_V[_ids(ending, logits_V)] = -torch.inf


def _draw_random(logits_DV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draws that are all plain or all filtered, so that a draw's arithmetic is always the same."""
    params = [draw.params for draw in draws]
    noise = [uniform(d.params.seed, d.choice, len(d.output)) for d in draws]
    filters = Filters(
        temperature_D=_column([p.temperature for p in params], logits_DV),
        min_p_D=_column([p.min_p for p in params], logits_DV),
        top_k_D=_ids([p.top_k for p in params], logits_DV),
        top_p_D=_column([p.top_p for p in params], logits_DV),
        noise_D=_column(noise, logits_DV),
    )
    return sample_tokens(logits_DV, filters, _sorts(params[0]))


def _logprobs(
    logits_V: Tensor, token_id: int, params: SamplingParams
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """The token's log probability under the model itself, and the likeliest alternatives'."""
    if params.logprobs is None:
        return None, ()
    logprobs_V = logits_V.to(torch.float64).log_softmax(-1)
    count = min(params.logprobs, logprobs_V.shape[0])
    if count == 0:
        return float(logprobs_V[token_id]), ()
    least = logprobs_V.topk(count).values[-1]
    ids_L = (logprobs_V >= least).nonzero()[:, 0]
    pairs: list[tuple[int, float]] = [*zip(ids_L.tolist(), logprobs_V[ids_L].tolist(), strict=True)]
    top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]
    return float(logprobs_V[token_id]), tuple(top)


def _ids(token_ids: Sequence[int], like: Tensor) -> Tensor:
    return sent(torch.tensor(token_ids, dtype=torch.int64), like.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return sent(torch.tensor(values, dtype=torch.float64), like.device)


def _mix(state: int) -> int:
    """The finaliser of SplitMix64."""
    state &= _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
