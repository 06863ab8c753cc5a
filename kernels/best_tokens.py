"""The likeliest token of each row of logits, and whether the row is fit to be drawn from.

logits_RV   R rows over a vocabulary of V; each row contiguous
best_R      int64, the lowest id of the largest logit
possible_R  whether that logit is finite
sane_R      whether all of a row's are, NaN and infinities of either sign being none; what of a
            row that is not sane is best means nothing

On a CPU torch passes over the logits twice, and with more than one thread: those of its own then
wait, for as long as a step's team, on the cores that the team needs.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.compiled import NATIVE, loaded

SOURCE = Path(__file__).with_suffix(".c")


class Best(NamedTuple):
    best_R: Tensor
    possible_R: Tensor
    sane_R: Tensor


def best_tokens_reference(logits_RV: Tensor) -> Best:
    best_R = logits_RV.argmax(-1)
    possible_R = torch.isfinite(logits_RV.gather(1, best_R[:, None])[:, 0])
    return Best(best_R, possible_R, torch.isfinite(logits_RV.sum(-1)))


def best_tokens(logits_RV: Tensor) -> Best:
    """`best_tokens_reference`; in one pass where a compiled function reads the logits."""
    on_host = logits_RV.device.type == "cpu" and logits_RV.dtype == torch.float32
    compiled = _load() if on_host and logits_RV.stride(1) == 1 else None
    return (compiled or best_tokens_reference)(logits_RV)


@functools.cache
def _load() -> Callable[[Tensor], Best] | None:
    address, count = ctypes.c_void_p, ctypes.c_int64
    return loaded(
        SOURCE,
        *(NATIVE, "-fno-math-errno"),
        signatures={
            "best_tokens": (None, [address, count, count, count, address, address, address])
        },
        make=_made,
        otherwise="the likeliest tokens are found by torch, slower",
    )


def _made(library: ctypes.CDLL) -> Callable[[Tensor], Best]:
    def find(logits_RV: Tensor) -> Best:
        num_rows, width = logits_RV.shape
        best_R = torch.empty(num_rows, dtype=torch.int64)
        largest_R, sums_R = torch.empty(2, num_rows)
        library.best_tokens(
            logits_RV.data_ptr(), num_rows, width, logits_RV.stride(0),
            best_R.data_ptr(), largest_R.data_ptr(), sums_R.data_ptr(),
        )  # fmt: skip
        return Best(best_R, largest_R.isfinite(), sums_R.isfinite())

    return find
