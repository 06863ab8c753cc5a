"""The gated product of a feed-forward layer: silu(gate) * up (Shazeer, arXiv 2002.05202).

gate_up_T2M   T rows; M gates, then M values; each row contiguous
out_TM        of the same dtype
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.launch import launches, tl, triton


def silu_multiply_reference(gate_up_T2M: Tensor) -> Tensor:
    """What `silu_multiply` means."""
    width = gate_up_T2M.shape[1] // 2
    return F.silu(gate_up_T2M[:, :width]).mul_(gate_up_T2M[:, width:])


def silu_multiply(gate_up_T2M: Tensor) -> Tensor:
    """As the reference up to rounding, in one launch and one pass."""
    if not launches(gate_up_T2M):
        return silu_multiply_reference(gate_up_T2M)
    num_rows, width = gate_up_T2M.shape[0], gate_up_T2M.shape[1] // 2
    assert gate_up_T2M.stride(1) == 1 and gate_up_T2M.shape[1] == 2 * width
    shape = (num_rows, width)
    out_TM = torch.empty(shape, dtype=gate_up_T2M.dtype, device=gate_up_T2M.device)
    if out_TM.numel():
        _silu_multiply[(num_rows, triton.cdiv(width, CHUNK))](
            gate_up_T2M, out_TM, gate_up_T2M.stride(0), width, CHUNK
        )
    return out_TM


CHUNK = 1024  # values a program makes: one 16-byte load a thread at 4 warps of bf16


@triton.jit
def _silu_multiply(gate_up, out, row_stride, width, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < width
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + width + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = gated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + at, product.to(gate.dtype), mask=inside)
