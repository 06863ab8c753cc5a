"""The sampling kernel against its reference."""

from collections.abc import Iterator
from functools import partial

import torch

from kernels.sample_tokens import LIKELIEST, Filters, sample_tokens, sample_tokens_reference
from tests.kernels.cases import Case, random_values

NUM_DRAWS = 6


def sampling_cases(device: str) -> Iterator[Case]:
    for sorts in (False, True):
        yield f"sample_tokens sorted {sorts}", partial(draw, 5000, sorts, device)
    yield "sample_tokens of one", partial(draw, 1, False, device)
    yield "sample_tokens far down", partial(draw_far_down, device)


def draw(size: int, sorts: bool, device: str) -> None:
    """Half of the rows have a few values only: most boundaries fall between equal weights."""
    logits = random_values((NUM_DRAWS, size), torch.float32) * 4
    logits[3:] = logits[3:].round()
    logits[2, size // 2 :] = -torch.inf
    logits[2, 0] = 1.0
    _alike(logits, _filters(sorts), sorts, device)


def draw_far_down(device: str) -> None:
    """Nearly all of a flat vocabulary is kept: more than the reference looks at first."""
    logits = random_values((3, 4 * LIKELIEST), torch.float32) / 100
    flat = Filters(
        temperature_D=torch.ones(3, dtype=torch.float64),
        min_p_D=torch.zeros(3, dtype=torch.float64),
        top_k_D=torch.tensor([0, 3000, 2000]),
        top_p_D=torch.tensor([0.999, 0.9, 1.0], dtype=torch.float64),
        noise_D=torch.tensor([0.2, 0.99, 0.7], dtype=torch.float64),
    )
    _alike(logits, flat, True, device)


def _filters(sorts: bool) -> Filters:
    wide = torch.float64
    noise = torch.rand(NUM_DRAWS, generator=torch.Generator().manual_seed(3), dtype=wide)
    noise[0] = 0.0
    return Filters(
        temperature_D=torch.tensor([1.0, 0.7, 1.5, 0.3, 2.0, 1.0], dtype=wide),
        min_p_D=torch.tensor([0.0, 0.0, 0.1, 0.01, 0.0, 0.5], dtype=wide),
        top_k_D=torch.tensor([0, 5, 3, 0, 50, 1] if sorts else [0] * NUM_DRAWS),
        top_p_D=torch.tensor([0.9, 1.0, 0.5, 0.95, 0.8, 1.0] if sorts else [1.0] * 6, dtype=wide),
        noise_D=noise,
    )


def _alike(logits: torch.Tensor, filters: Filters, sorts: bool, device: str) -> None:
    want = sample_tokens_reference(logits, filters, sorts)
    there = Filters(*(column.to(device) for column in filters))
    got = sample_tokens(logits.to(device), there, sorts).cpu()
    assert torch.equal(got, want), (got.tolist(), want.tolist())
