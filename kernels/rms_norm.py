"""Root-mean-square norm of rows (Zhang and Sennrich, arXiv 1910.07467), a residual added first.

x_TE          T rows of E values, each contiguous
weights_WE    row t is weighed by row t % W: one for all, or one for each head
residual_TE   where it is given, x is added to it in place, and the sum is what is normalised
out_TE        of x's dtype; the mean is taken in fp32
"""

import torch
from torch import Tensor

from kernels.launch import launches, tl, triton


def rms_norm_reference(
    x_TE: Tensor, weights_WE: Tensor, eps: float, residual_TE: Tensor | None = None
) -> Tensor:
    """What `rms_norm` means."""
    if residual_TE is not None:
        residual_TE += x_TE
        x_TE = residual_TE
    wide_TE = x_TE.float()
    scale_T1 = torch.rsqrt(wide_TE.square().mean(-1, keepdim=True) + eps)
    normal_TE = (wide_TE * scale_T1).to(x_TE.dtype)
    weighed = normal_TE.view(-1, *weights_WE.shape) * weights_WE
    return weighed.view(x_TE.shape)


def rms_norm(
    x_TE: Tensor, weights_WE: Tensor, eps: float, residual_TE: Tensor | None = None
) -> Tensor:
    """As the reference up to rounding, in one launch."""
    if not launches(x_TE):
        return rms_norm_reference(x_TE, weights_WE, eps, residual_TE)
    num_rows, width = x_TE.shape
    num_weights = weights_WE.shape[0]
    assert weights_WE.shape[1] == width and num_rows % num_weights == 0
    assert x_TE.stride(1) == 1 and weights_WE.is_contiguous()
    out_TE = torch.empty((num_rows, width), dtype=x_TE.dtype, device=x_TE.device)
    summed = residual_TE is not None
    target = residual_TE if residual_TE is not None else x_TE
    assert target.shape == x_TE.shape and target.stride(1) == 1 and target.dtype == x_TE.dtype
    if num_rows:
        _rms_norm[(num_rows,)](
            x_TE, target, weights_WE, out_TE, x_TE.stride(0), target.stride(0), num_weights, eps,
            width, triton.next_power_of_2(width), summed, num_warps=4 if width <= 2048 else 8,
        )  # fmt: skip
    return out_TE


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x, residual, weights, out, x_row, residual_row, num_weights, eps,
    width, WIDTH: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < width
    values = tl.load(x + row * x_row + at, mask=inside, other=0.0)
    if SUMMED:
        old = tl.load(residual + row * residual_row + at, mask=inside, other=0.0)
        values = (old.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
        tl.store(residual + row * residual_row + at, values, mask=inside)
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    normal = (wide * scale).to(values.dtype)
    weight = tl.load(weights + row % num_weights * width + at, mask=inside, other=0.0)
    weighed = normal.to(tl.float32) * weight.to(tl.float32)
    tl.store(out + row * width + at, weighed.to(values.dtype), mask=inside)
