"""What the kernels' cases have in common."""

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

Case = tuple[str, Callable[[], None]]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def as_bytes(check: Callable[[], None]) -> None:
    """The check as on a card that knows no float8."""
    with mock.patch("kernels.quantise_kv.knows_float8", lambda: False):
        check()


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Any bits at all, NaN payloads included: a copy must not touch them."""
    rng = torch.Generator().manual_seed(seed)
    num_bytes = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=rng)
    return raw.view(dtype).view(shape).to(device)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Drawn from a normal distribution, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
