"""The codes inside GGUF's quantised blocks, and what they stand for.

A weight is scale * code + min, with one scale (and min) for 32 inputs of an output; a block is one
such group or, in the types whose names end in K, eight. Of the many types those are read here whose
values fit the packed form exactly.
Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

    O outputs, K blocks of a row, G groups of a row, N inputs of a group, B bytes
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.packed_linear import GROUP, PackedRows


class Packing(NamedTuple):
    """How a type's codes are packed."""

    bits: int
    with_mins: bool
    parts: int = 1  # of a group, each with a scale
    dtype: torch.dtype = torch.float16  # of scales and mins
    groups: int = 1  # of a block in the file


PACKED_TYPES = {
    "Q8_0": Packing(8, False),
    "Q5_0": Packing(8, False),
    "Q5_1": Packing(8, True),
    "Q4_0": Packing(4, True),
    "Q4_1": Packing(4, True),
    "Q4_K": Packing(4, True, 1, torch.float32, 8),
    "Q5_K": Packing(8, True, 1, torch.float32, 8),
    "Q6_K": Packing(8, False, 2, torch.float32, 8),
}


def block_codes(kind: str, blocks_OKB: Tensor) -> PackedRows:
    """What whole blocks of one of PACKED_TYPES hold."""
    return _READERS[kind](blocks_OKB)


def block_values(kind: str, blocks_OKB: Tensor) -> Tensor:
    """The same as fp32, [O, G * N], rounded as GGUF's own arithmetic rounds it."""
    codes_OGB, scales_OG, mins_OG = block_codes(kind, blocks_OKB)
    if kind == "Q4_0":  # its least value, -8 times the scale, may be beyond half precision
        values_OGN, mins_OG = one_by_one(codes_OGB).float() - 8, None
    elif PACKED_TYPES[kind].bits == 4:
        values_OGN = one_by_one(codes_OGB).float()
    else:
        values_OGN = (codes_OGB ^ 128).view(torch.int8).float()
    if PACKED_TYPES[kind].parts == 2:
        values_OGN = values_OGN.view(len(values_OGN), -1, GROUP // 2)
    values_OGN *= scales_OG.float()[..., None]
    if mins_OG is not None:
        values_OGN += mins_OG.float()[..., None]
    return values_OGN.flatten(1)


def one_by_one(codes_OGB: Tensor) -> Tensor:
    """A byte for each code of 4 bits: the low halves of a group come first."""
    return torch.cat([codes_OGB & 15, codes_OGB >> 4], dim=2)


def two_a_byte(codes_OGN: Tensor) -> Tensor:
    return codes_OGN[..., : GROUP // 2] | codes_OGN[..., GROUP // 2 :] << 4


def _halves(blocks_OGB: Tensor, first: int) -> Tensor:
    """The half-precision number at that byte of every block, [O, K]."""
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


def _q4_k(blocks_OKB: Tensor) -> PackedRows:
    codes_OGN = _nibbles(blocks_OKB[..., 16:], 32)
    return PackedRows(two_a_byte(codes_OGN), *_k_scales(blocks_OKB))


def _q5_k(blocks_OKB: Tensor) -> PackedRows:
    fifth_OK8N = blocks_OKB[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    codes_OGN = _nibbles(blocks_OKB[..., 48:], 32) | fifth_OK8N.flatten(1, 2) << 4
    return PackedRows(codes_OGN + 128, *_k_scales(blocks_OKB))


def _q6_k(blocks_OKB: Tensor) -> PackedRows:
    low_OGN = _nibbles(blocks_OKB[..., :128], 64).view(len(blocks_OKB), -1, GROUP)
    shifts_41 = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high_OK24N = blocks_OKB[..., 128:192].reshape(*blocks_OKB.shape[:2], 2, 1, 32) >> shifts_41 & 3
    codes_OGN = low_OGN | high_OK24N.flatten(1, 3) << 4
    whole_OK1 = _halves(blocks_OKB, 208).float()[..., None]
    scales_OK16 = blocks_OKB[..., 192:208].contiguous().view(torch.int8).float() * whole_OK1
    return PackedRows(codes_OGN + (128 - 32), scales_OK16.flatten(1), None)


def _nibbles(bytes_OKB: Tensor, run: int) -> Tensor:
    """[O, *, run]: of each run of bytes the low halves, then the high halves."""
    runs = bytes_OKB.reshape(*bytes_OKB.shape[:2], -1, run)
    return torch.stack([runs & 15, runs >> 4], dim=3).flatten(1, 3)


def _k_scales(blocks_OKB: Tensor) -> tuple[Tensor, Tensor]:
    """scales_OG and mins_OG: six bits each, the last four groups' upper two apart."""
    first, second, third = blocks_OKB[..., 4:16].reshape(*blocks_OKB.shape[:2], 3, 4).unbind(-2)
    scales_OK8 = torch.cat([first & 63, third & 15 | first >> 2 & 48], dim=-1)
    mins_OK8 = torch.cat([second & 63, third >> 4 | second >> 2 & 48], dim=-1)
    scales_OK8 = scales_OK8 * _halves(blocks_OKB, 0).float()[..., None]
    mins_OK8 = mins_OK8 * _halves(blocks_OKB, 2).float()[..., None]
    return scales_OK8.flatten(1), -mins_OK8.flatten(1)


_READERS: dict[str, Callable[[Tensor], PackedRows]] = {
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
