"""Triton, where there is one for the platform; which tensors its kernels are launched on, and how
tensors get to where that is.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["device_of", "knows_float8", "launches", "sent", "tl", "triton"]

FLOAT8_ARCH = 89  # Ada: the first cards with instructions for float8_e4m3fn, and Triton's first


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


def knows_float8() -> bool:
    """Whether float8_e4m3fn is a type to what kernels run on; else they are given its bytes."""
    if triton.knobs.runtime.interpret:
        return True
    arch: int = triton.runtime.driver.active.get_current_target().arch
    return arch >= FLOAT8_ARCH


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The host's tensor on `device`; to a card by a copy out of pinned memory, which the card makes
    in its turn and this thread does not wait for.
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
