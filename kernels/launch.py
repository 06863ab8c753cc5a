"""Triton, where there is one for the platform, and which tensors its kernels are launched on."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["device_of", "launches", "tl", "triton"]


class _Absent:
    """Stands in for Triton while kernels are defined; where it does, none is ever launched."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, function: object) -> object:
        return function


try:
    import triton
    import triton.language as tl

    PRESENT = True
except ImportError:
    triton = tl = _Absent()
    PRESENT = False


def launches(tensor: Tensor) -> bool:
    """Whether to launch a kernel on `tensor` rather than to call its reference.

    On a CPU only under TRITON_INTERPRET=1, which has to be set before Triton is first imported.
    """
    return PRESENT and (tensor.is_cuda or bool(triton.knobs.runtime.interpret))


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Within it kernels go to `tensor`'s device: Triton launches on the thread's current one, which
    is the first whatever rank the thread works for.
    """
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
