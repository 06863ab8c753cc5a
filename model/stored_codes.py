"""The codes inside GGUF's simpler quantised blocks, and what they stand for.

A weight is scale * code + min, with one half-precision scale (and min) for 32 inputs of an output.
Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

    O outputs, G groups of a row, N inputs of a group, B bytes of its block or its codes
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.packed_linear import PackedRows

PACKED_TYPES = {  # GGUF's: bits they are packed in, and whether a group has a least value
    "Q8_0": (8, False),
    "Q5_0": (8, False),
    "Q5_1": (8, True),
    "Q4_0": (4, True),
    "Q4_1": (4, True),
}


def block_codes(kind: str, blocks_OGB: Tensor) -> PackedRows:
    """What whole blocks of one of PACKED_TYPES hold."""
    return _READERS[kind](blocks_OGB)


def block_values(kind: str, blocks_OGB: Tensor) -> Tensor:
    """The same as fp32, [O, G * N], rounded as GGUF's own arithmetic rounds it."""
    codes_OGB, scales_OG, mins_OG = block_codes(kind, blocks_OGB)
    if kind == "Q4_0":  # its least value, -8 times the scale, may be beyond half precision
        values_OGN, mins_OG = one_by_one(codes_OGB).float() - 8, None
    elif PACKED_TYPES[kind][0] == 4:
        values_OGN = one_by_one(codes_OGB).float()
    else:
        values_OGN = (codes_OGB ^ 128).view(torch.int8).float()
    values_OGN *= scales_OG.float()[..., None]
    if mins_OG is not None:
        values_OGN += mins_OG.float()[..., None]
    return values_OGN.flatten(1)


def one_by_one(codes_OGB: Tensor) -> Tensor:
    """A byte for each code of 4 bits: the low halves of a group come first."""
    return torch.cat([codes_OGB & 15, codes_OGB >> 4], dim=2)


def _halves(blocks_OGB: Tensor, first: int) -> Tensor:
    """One of the half-precision numbers a block begins with, [O, G]."""
    return blocks_OGB[..., first : first + 2].contiguous().view(torch.float16)[..., 0]


def _q8_0(blocks_OGB: Tensor) -> PackedRows:
    return PackedRows(blocks_OGB[..., 2:] ^ 128, _halves(blocks_OGB, 0), None)


def _q5_0(blocks_OGB: Tensor) -> PackedRows:
    codes_OGN = _five_bits(blocks_OGB[..., 2:6], blocks_OGB[..., 6:])
    return PackedRows(codes_OGN + (128 - 16), _halves(blocks_OGB, 0), None)


def _q5_1(blocks_OGB: Tensor) -> PackedRows:
    codes_OGN = _five_bits(blocks_OGB[..., 4:8], blocks_OGB[..., 8:])
    return PackedRows(codes_OGN + 128, _halves(blocks_OGB, 0), _halves(blocks_OGB, 2))


def _q4_0(blocks_OGB: Tensor) -> PackedRows:
    scales_OG = _halves(blocks_OGB, 0)
    return PackedRows(blocks_OGB[..., 2:].contiguous(), scales_OG, scales_OG * -8)


def _q4_1(blocks_OGB: Tensor) -> PackedRows:
    return PackedRows(
        blocks_OGB[..., 4:].contiguous(), _halves(blocks_OGB, 0), _halves(blocks_OGB, 2)
    )


def _five_bits(high_OG4: Tensor, low_OGB: Tensor) -> Tensor:
    """The fifth bits stand apart, 32 to a group, the first input's lowest."""
    fifth_OG48 = high_OG4[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return one_by_one(low_OGB) | fifth_OG48.flatten(2) << 4


_READERS: dict[str, Callable[[Tensor], PackedRows]] = {
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}
