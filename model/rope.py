"""Rotary positions (Su et al., arXiv 2104.09864), each head's halves rotated against each other.

T tokens, H heads, D head dim, F = D / 2 frequencies.
"""

import math

import torch
from torch import Tensor

from model.config import DecoderConfig, LinearScaling, Llama3Scaling


def inverse_frequencies(config: DecoderConfig, rope_freqs_F: Tensor | None) -> Tensor:
    """Radians per position, fp32. `rope_freqs_F` are a GGUF file's own divisors, if it has any."""
    exponents_F = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies_F = 1.0 / (config.rope_theta**exponents_F)
    if rope_freqs_F is not None:
        frequencies_F = frequencies_F / rope_freqs_F
    match config.rope_scaling:
        case LinearScaling(factor):
            return frequencies_F / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies_F, scaling)
        case None:
            return frequencies_F


def _llama3(frequencies_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keep waves much shorter than the original context, stretch those much longer, blend between.

    As Llama 3.1's reference code does it.
    """
    waves_F = 2 * math.pi / frequencies_F
    turns_F = scaling.original_max_context / waves_F
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept_F) * frequencies_F / scaling.factor + kept_F * frequencies_F


def rotation(positions_T: Tensor, frequencies_F: Tensor) -> tuple[Tensor, Tensor]:
    """cos_TD and sin_TD for `kernels.rotate_write`; the sines of the first half are negated."""
    angles_TF = positions_T[:, None].float() * frequencies_F
    cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
    return torch.cat([cos_TF, cos_TF], 1), torch.cat([-sin_TF, sin_TF], 1)
