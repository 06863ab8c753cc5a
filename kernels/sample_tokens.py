"""Draw one token per row of logits, after temperature, min-p, top-k and top-p, without a sort.

logits_DV    D draws over a vocabulary of V, fp32; each row has a finite largest value and no NaN
filters      what each draw is subject to, and its uniform number
sorts        whether any uses top-k or top-p. Draws of both kinds come in two calls, so that a
             draw's arithmetic never depends on its neighbours
tokens_D     int64

A token's weight is exp((logit - largest) / temperature), in fp64. min-p drops weights below its
share of the largest, top-k keeps the k largest, top-p of these the fewest whose sum reaches p of
their total; of equal weights the lower id comes first. The draw is where the cumulative weight
first exceeds the uniform number's share of the total: from the likeliest on where top-k or top-p is
used, in order of ids where neither is, for then nothing has to be sorted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.launch import launches, tl, triton

LIKELIEST = 1024  # top-k and top-p seldom reach further; 1.0 ms a row against 7.4 ms to sort all


class Filters(NamedTuple):
    """One value a draw, on the logits' device."""

    temperature_D: Tensor  # fp64, above 0
    min_p_D: Tensor  # fp64, 0 to 1
    top_k_D: Tensor  # int64, 0: no limit
    top_p_D: Tensor  # fp64, 1: no limit
    noise_D: Tensor  # fp64, in [0, 1)


def sample_tokens_reference(logits_DV: Tensor, filters: Filters, sorts: bool) -> Tensor:
    """What `sample_tokens` means."""
    weights_DV = logits_DV.to(torch.float64)
    weights_DV -= weights_DV.amax(-1, keepdim=True)
    weights_DV /= filters.temperature_D[:, None]
    weights_DV.exp_()  # the largest is 1, so min-p is a plain threshold
    if bool(filters.min_p_D.any()):
        weights_DV.masked_fill_(weights_DV < filters.min_p_D[:, None], 0.0)
    if not sorts:
        return _look_up(weights_DV, filters.noise_D[:, None])[:, 0]
    size = weights_DV.shape[-1]
    tokens_D, certain_D = _draw_sorted(weights_DV, filters, min(LIKELIEST, size))
    if not bool(certain_D.all()):
        again = ~certain_D
        rest = Filters(*(column[again] for column in filters))
        tokens_D[again], _ = _draw_sorted(weights_DV[again], rest, size)
    return tokens_D


def _draw_sorted(weights_DV: Tensor, filters: Filters, count: int) -> tuple[Tensor, Tensor]:
    """Draw from the `count` largest weights only; also say for which draws these were enough."""
    size = weights_DV.shape[-1]
    ids_DS = torch.arange(size, device=weights_DV.device).expand(weights_DV.shape)
    if count < size:
        ids_DS = weights_DV.topk(count).indices.sort(-1).values
    weights_DS, places_DS = weights_DV.gather(1, ids_DS).sort(stable=True, dim=-1, descending=True)
    least_D1 = weights_DS[:, -1:].clone()
    ranks_S = torch.arange(count, device=weights_DS.device)
    top_k_D1 = torch.where(filters.top_k_D > 0, filters.top_k_D, size)[:, None]
    weights_DS.masked_fill_(ranks_S >= top_k_D1, 0.0)
    cumulative_DS = weights_DS.cumsum(-1)
    total_D1 = torch.where(top_k_D1 < size, cumulative_DS[:, -1:], weights_DV.sum(-1, keepdim=True))
    share_D1 = torch.where(filters.top_p_D < 1.0, filters.top_p_D, torch.inf)[:, None]
    weights_DS.masked_fill_(cumulative_DS - weights_DS >= share_D1 * total_D1, 0.0)
    last_D1 = (weights_DS > 0).sum(-1, keepdim=True) - 1
    enough_D1 = (top_k_D1 <= count) | (top_k_D1 == size)  # or the total is not known
    enough_D1 &= (weights_DS.gather(1, last_D1) > least_D1) | (least_D1 == 0.0)
    enough_D1 |= count == size
    chosen_D1 = places_DS.gather(1, _look_up(weights_DS, filters.noise_D[:, None]))
    return ids_DS.gather(1, chosen_D1)[:, 0], enough_D1[:, 0]


def _look_up(weights_DV: Tensor, noise_D1: Tensor) -> Tensor:
    """The place in each row where the cumulative weight first exceeds this share of the total."""
    cumulative_DV = weights_DV.cumsum(-1)
    total_D1 = cumulative_DV[:, -1:]
    below_D1 = total_D1.nextafter(torch.zeros_like(total_D1))
    return torch.searchsorted(
        cumulative_DV, torch.minimum(noise_D1 * total_D1, below_D1), right=True
    )


def sample_tokens(logits_DV: Tensor, filters: Filters, sorts: bool) -> Tensor:
    """As the reference, but for numbers within rounding of a boundary, in one launch.

    Thresholds are found by bisection over the bits of the logits: every step sums a row once.
    """
    if not launches(logits_DV):
        return sample_tokens_reference(logits_DV, filters, sorts)
    num_draws, size = logits_DV.shape
    assert logits_DV.dtype == torch.float32 and logits_DV.stride(1) == 1
    assert all(len(column) == num_draws for column in filters)
    tokens_D = torch.empty(num_draws, dtype=torch.int64, device=logits_DV.device)
    if num_draws:
        weights_DV = torch.empty(num_draws, size, dtype=torch.float64, device=logits_DV.device)
        _sample_tokens[(num_draws,)](
            logits_DV, weights_DV, *filters, tokens_D, logits_DV.stride(0), size,
            sorts, CHUNK, num_warps=8,
        )  # fmt: skip
    return tokens_D


CHUNK = 4096  # of the vocabulary, summed at a time
LOWEST = tl.constexpr(-(2**31))  # below the key of any logit
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def _key(logits):  # type: ignore[no-untyped-def]
    """Integers in the order of the logits."""
    bits = logits.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _above(logits, weights, size, threshold, least, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum and the number of the weights above the threshold, and the number equal to it."""
    mass = tl.zeros([CHUNK], tl.float64)
    count = tl.zeros([CHUNK], tl.int32)
    equal = tl.zeros([CHUNK], tl.int32)
    for start in range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < size
        key = _key(tl.load(logits + at, mask=inside, other=float("-inf")))
        weight = tl.load(weights + at, mask=inside, other=0.0)
        inside &= weight >= least
        higher = inside & (key > threshold)
        mass += tl.where(higher, weight, 0.0)
        count += higher.to(tl.int32)
        equal += (inside & (key == threshold)).to(tl.int32)
    return tl.sum(mass, 0), tl.sum(count, 0), tl.sum(equal, 0)


@triton.jit
def _nth_equal(logits, weights, size, threshold, least, number, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The id of the `number`th of the tokens whose key is the threshold."""
    found = number * 0
    passed = number * 0
    for start in range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < size
        key = _key(tl.load(logits + at, mask=inside, other=float("-inf")))
        weight = tl.load(weights + at, mask=inside, other=0.0)
        equal = (inside & (weight >= least) & (key == threshold)).to(tl.int32)
        place = passed + tl.cumsum(equal, 0)
        found += tl.sum(tl.where((equal > 0) & (place == number + 1), at, 0), 0)
        passed += tl.sum(equal, 0)
    return found


@triton.jit
def _weight_of(key, largest, temperature):  # type: ignore[no-untyped-def]
    bits = key.to(tl.int32)
    logit = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp((logit.to(tl.float64) - largest) / temperature)


@triton.jit
def _sample_tokens(  # type: ignore[no-untyped-def]
    logits, weights, temperatures, min_ps, top_ks, top_ps, noises, tokens,
    row_stride, size, SORTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    draw = tl.program_id(0).to(tl.int64)
    logits += draw * row_stride
    weights += draw * size
    temperature, least = tl.load(temperatures + draw), tl.load(min_ps + draw)
    noise = tl.load(noises + draw)

    highest = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        highest = tl.maximum(highest, tl.load(logits + at, mask=at < size, other=float("-inf")))
    largest = tl.max(highest, 0).to(tl.float64)
    masses = tl.zeros([CHUNK], tl.float64)
    for start in range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < size
        values = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float64)
        weight = tl.exp((values - largest) / temperature)
        tl.store(weights + at, weight, mask=inside)
        masses += tl.where(weight >= least, weight, 0.0)
    total = tl.sum(masses, 0)
    tl.debug_barrier()  # the weights are read by other threads from here on

    if SORTS:
        # The last that top-k keeps has the key `edge`; `ties` of this key are kept.
        top_k = tl.load(top_ks + draw)
        top_k = tl.where(top_k > 0, top_k, size)
        lo, hi = top_k * 0 + LOWEST, top_k * 0 + HIGHEST  # fewer than k lie above hi, not above lo
        for _ in range(32):
            middle = (lo + hi) >> 1
            _, count, _ = _above(logits, weights, size, middle, least, CHUNK)
            hi = tl.where(count < top_k, middle, hi)
            lo = tl.where(count < top_k, lo, middle)
        edge = hi
        mass, count, equal = _above(logits, weights, size, edge, least, CHUNK)
        ties = tl.minimum(top_k - count, equal)
        total = tl.where(equal > 0, mass + ties * _weight_of(edge, largest, temperature), total)

        # The same for top-p, over these.
        top_p = tl.load(top_ps + draw)
        if top_p < 1.0:
            share = top_p * total
            lo, hi = lo * 0 + LOWEST, hi * 0 + HIGHEST
            for _ in range(32):
                middle = (lo + hi) >> 1
                mass, _, _ = _above(logits, weights, size, middle, least, CHUNK)
                hi = tl.where(mass < share, middle, hi)
                lo = tl.where(mass < share, lo, middle)
            if hi >= edge:
                mass, _, equal = _above(logits, weights, size, hi, least, CHUNK)
                weight = _weight_of(hi, largest, temperature)
                ties = tl.where(hi > edge, equal, ties)
                wanted = tl.ceil((share - mass) / weight).to(tl.int64)
                ties = tl.minimum(tl.maximum(wanted, 1), ties)
                edge = hi
                total = mass + ties * weight

        # Where the cumulative weight, from the likeliest on, first exceeds the drawn share.
        drawn = noise * total
        lo, hi = edge - 1, edge * 0 + HIGHEST
        for _ in range(32):
            middle = (lo + hi) >> 1
            mass, _, _ = _above(logits, weights, size, middle, least, CHUNK)
            hi = tl.where(mass <= drawn, middle, hi)
            lo = tl.where(mass <= drawn, lo, middle)
        mass, _, equal = _above(logits, weights, size, hi, least, CHUNK)
        ties = tl.where(hi > edge, equal, ties)
        number = ((drawn - mass) / _weight_of(hi, largest, temperature)).to(tl.int64)
        number = tl.maximum(tl.minimum(number, ties - 1), 0).to(tl.int32)
        token = _nth_equal(logits, weights, size, hi, least, number, CHUNK)
        tl.store(tokens + draw, token.to(tl.int64))
    else:
        drawn = noise * total
        passed = total * 0
        token = tl.zeros([1], tl.int32)
        last = tl.zeros([1], tl.int32)
        for start in range(0, size, CHUNK):
            at = start + tl.arange(0, CHUNK)
            weight = tl.load(weights + at, mask=at < size, other=0.0)
            weight = tl.where(weight >= least, weight, 0.0)
            cumulative = passed + tl.cumsum(weight, 0)
            token += tl.sum(((cumulative <= drawn) & (at < size)).to(tl.int32), 0)
            last = tl.maximum(last, tl.max(tl.where(weight > 0, at, 0), 0))
            passed += tl.sum(weight, 0)
        tl.store(tokens + draw + tl.arange(0, 1), tl.minimum(token, last).to(tl.int64))
