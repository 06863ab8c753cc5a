"""The arithmetic of a layer that torch does slowly on a CPU, done faster there.

On a GPU, and in half precision, torch's own kernels are used.

    T rows, I inputs, O outputs, W the width that is normalised
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

FEWEST_TURNED = 4  # rows: see `linear`
MOST_TURNED = 48


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`, the product turned round where MKL is faster so.

    Measured on 2 cores of an AMD EPYC (AVX2), fp32, all matrices of SmolLM2-135M: 1 to 3 rows
    23 to 27 ms as they are, 24 to 47 turned; 4 rows 56 and 47, 8 rows 69 and 48, 16 rows 115 and
    48; from 64 rows on as they are is faster. On one core the two are within 10 % of each other.
    """
    if x_TI.is_cuda or not FEWEST_TURNED <= len(x_TI) <= MOST_TURNED:
        return F.linear(x_TI, weight_OI, bias_O)
    out_TO = (weight_OI @ x_TI.t()).t().contiguous()
    return out_TO if bias_O is None else out_TO.add_(bias_O)


class RmsNorm:
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467) with its weight.

    On a CPU as x / hypot(|x|, sqrt(W eps)) * (sqrt(W) weight): 11 us for a row of 576 where torch,
    which has no such kernel there, takes 44; the two differ in the last bits.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        width = weight.shape[-1]
        self.weight = weight
        self._eps = eps
        self._scaled = weight * math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * eps), dtype=weight.dtype, device=weight.device)
        self._by_hand = weight.dtype == torch.float32 and not weight.is_cuda

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [..., W] normalised over its last dim; the weight broadcasts against it."""
        if self._by_hand:
            length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x / length.hypot_(self._floor)).mul_(self._scaled)
        return F.rms_norm(x, x.shape[-1:], None, self._eps) * self.weight
