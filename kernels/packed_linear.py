"""Rows times a matrix of 8 or 4 bits a weight, kept so that a core reads no more than that.

A weight is scale * code + min, with one scale (and min, where the form has one) for GROUP inputs
of an output; that is GGUF's Q8_0, Q4_1 and their like, value for value. The rows are quantised in
the same groups, 127 steps either side of zero: a product differs by about half a percent of its
size from the one with unquantised rows, and the matrix is taken as it is.

`packed_linear.c` is compiled at first use, for AVX2 and for AVX-512 with VNNI, and takes the best
the processor has. Without a compiler the reference does the work.

    T rows, I inputs, O outputs, G groups of a row, N = GROUP inputs of a group
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.compiled import loaded
from kernels.host_decoder import Matrix
from kernels.huge_pages import Memory

SOURCE = Path(__file__).with_name("packed_linear.c")
TILE = 16  # outputs that lie side by side
GROUP = 32
PLAIN, AVX2, VNNI512 = range(3)  # instructions


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """See packed_linear.c for the order. A row begins `skip` inputs into the first group: what a
    rank holds of a row need not begin or end with a group.
    """

    codes: Tensor  # uint8: [tiles, G, quads of 4 bytes, TILE, 4]
    scales: Tensor  # fp16 or fp32: [tiles, G * parts, TILE]
    mins: Tensor | None
    bits: int
    num_outputs: int
    width: int
    skip: int

    @classmethod
    def empty(
        cls, num_outputs: int, width: int, bits: int, skip: int = 0,
        dtype: torch.dtype = torch.float16, with_mins: bool = False, parts: int = 1,
        memory: "Memory | None" = None,
    ) -> "PackedMatrix":  # fmt: skip
        """All zero, to be filled some rows at a time; `dtype` is that of scales and mins."""
        assert (bits == 8 and parts in (1, 2)) or (bits == 4 and with_mins and parts == 1)
        num_tiles, num_groups = -(-num_outputs // (2 * TILE)) * 2, -(-(skip + width) // GROUP)
        memory = memory or Memory(0)
        codes = memory.zeros(num_tiles, num_groups, bits, TILE, 4, dtype=torch.uint8)
        shape = (num_tiles, num_groups * parts, TILE)
        scales = memory.zeros(*shape, dtype=dtype)
        mins = memory.zeros(*shape, dtype=dtype) if with_mins else None
        return cls(codes, scales, mins, bits, num_outputs, width, skip)

    def fill(self, first: int, part: "PackedRows") -> None:
        """Write rows `first` and on; `first` begins a tile."""
        assert first % TILE == 0 and (self.mins is None) == (part.mins_OG is None)
        num_rows, num_groups, _ = part.codes_OGB.shape
        tiles = slice(first // TILE, -(-(first + num_rows) // TILE))
        padding = (0, 0, 0, -num_rows % TILE)

        def tiled(values_OX: Tensor) -> Tensor:
            return pad(values_OX, padding).view(-1, TILE, values_OX.shape[1])

        quads = tiled(part.codes_OGB.flatten(1).view(torch.int32)).transpose(1, 2)
        self.codes[tiles].view(torch.int32)[..., 0] = quads.reshape(-1, num_groups, self.bits, TILE)
        self.scales[tiles] = tiled(part.scales_OG).transpose(1, 2)
        if self.mins is not None and part.mins_OG is not None:
            self.mins[tiles] = tiled(part.mins_OG).transpose(1, 2)

    @property
    def num_groups(self) -> int:
        return self.codes.shape[1]

    @property
    def parts(self) -> int:
        """Of a group, each with a scale."""
        return self.scales.shape[1] // self.num_groups

    @property
    def num_bytes(self) -> int:
        mins = 0 if self.mins is None else self.mins.nbytes
        return self.codes.nbytes + self.scales.nbytes + mins


class PackedRows(NamedTuple):
    """Some rows of a matrix, B bytes to a group: of 8 bits, 128 + each code (-128 to 127); of 4
    bits, codes of 0 to 15, those of inputs 16 and on in the high halves, as in GGUF.
    """

    codes_OGB: Tensor  # uint8, contiguous
    scales_OG: Tensor  # or [O, G * 2], as the next
    mins_OG: Tensor | None


def quantise_rows(x_TI: Tensor, skip: int) -> tuple[Tensor, Tensor]:
    """codes_TGN in fp32, and scales_TG; a value that is not finite makes its group's scale NaN."""
    padded = pad(x_TI.float(), (skip, -(skip + x_TI.shape[1]) % GROUP))
    x_TGN = padded.view(len(x_TI), -1, GROUP)
    largest_TG = x_TGN.abs().amax(dim=2)
    steps_TG = torch.full_like(largest_TG, 127)  # torch would turn 127 / x into 127 * (1 / x)
    inverse_TG = torch.where(largest_TG > 1e-30, steps_TG / largest_TG, 0)
    scales_TG = torch.where(inverse_TG == 0, 0, largest_TG / 127)
    scales_TG = torch.where(x_TGN.isfinite().all(dim=2), scales_TG, torch.nan)
    codes_TGN = (x_TGN * inverse_TG[..., None]).round().nan_to_num(0).clamp(-127, 127)
    return codes_TGN, scales_TG


def reference_rows(matrix: PackedMatrix, numbers_T: Tensor) -> Tensor:
    """The given rows of the matrix as fp32, [T, I]; exactly what its codes stand for."""
    tiles, lanes = numbers_T // TILE, numbers_T % TILE
    quads = matrix.codes[tiles, :, :, lanes]
    if matrix.bits == 4:
        quads = torch.cat([quads & 15, quads >> 4], dim=2)
    codes_TGN = quads.flatten(2).float() - (128 if matrix.bits == 8 else 0)
    codes_TGN = codes_TGN.view(len(numbers_T), -1, GROUP // matrix.parts)
    values_TGN = codes_TGN * matrix.scales[tiles, :, lanes].float()[..., None]
    if matrix.mins is not None:
        values_TGN += matrix.mins[tiles, :, lanes].float()[..., None]
    return values_TGN.flatten(1)[:, matrix.skip : matrix.skip + matrix.width]


def reference(matrix: PackedMatrix, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """out_TO in fp32, some tiles at a time, so that no whole matrix of fp32 is made."""
    codes_TGN, scales_TG = quantise_rows(x_TI, matrix.skip)
    x_TI = (codes_TGN * scales_TG[..., None]).flatten(1)[:, matrix.skip :][:, : matrix.width]
    out_TO = x_TI.new_empty(len(x_TI), matrix.num_outputs)
    for start in range(0, matrix.num_outputs, 64 * TILE):
        numbers = torch.arange(start, min(start + 64 * TILE, matrix.num_outputs))
        out_TO[:, start : start + len(numbers)] = x_TI @ reference_rows(matrix, numbers).t()
    return out_TO if bias_O is None else out_TO.add_(bias_O)


class _Packed(ctypes.Structure):
    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("mins", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("skip", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("half", ctypes.c_int32),
        ("instructions", ctypes.c_int32),
    ]


class PackedKernel(NamedTuple):
    """The compiled functions."""

    library: ctypes.CDLL
    instructions: int

    def describe(self, matrix: PackedMatrix) -> _Packed:
        """Where things are, for the calls below; `matrix` must outlive it."""
        mins = None if matrix.mins is None else matrix.mins.data_ptr()
        return _Packed(
            matrix.codes.data_ptr(), matrix.scales.data_ptr(), mins, matrix.num_outputs,
            matrix.num_groups, matrix.width, matrix.skip, matrix.bits, matrix.parts,
            matrix.scales.dtype == torch.float16, self.instructions,
        )  # fmt: skip

    def matrix(self, matrix: _Packed, bias_O: Tensor | None) -> Matrix:
        """As the compiled decoder wants it; both must outlive it."""
        made, bias = Matrix(), None if bias_O is None else bias_O.data_ptr()
        self.library.packed_matrix(ctypes.byref(made), ctypes.byref(matrix), bias)
        return made

    def multiply(self, matrix: _Packed, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """out_TO from fp32 rows, whose values lie side by side; like the reference.

        The same bits for a row whatever rows are beside it, on any number of threads, and with any
        of the instructions.
        """
        assert x_TI.dtype == torch.float32 and x_TI.stride(1) == 1
        num_rows = len(x_TI)
        out_TO = x_TI.new_empty(num_rows, matrix.num_outputs)
        needed = self.library.packed_scratch(ctypes.byref(matrix), num_rows)
        scratch = torch.empty(needed, dtype=torch.uint8)
        self.library.packed_multiply(
            ctypes.byref(matrix), x_TI.data_ptr(), x_TI.stride(0), num_rows,
            None if bias_O is None else bias_O.data_ptr(), out_TO.data_ptr(), scratch.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TO

    def rows(self, matrix: _Packed, numbers_T: Tensor) -> Tensor:
        numbers_T = numbers_T.contiguous()
        out_TI = torch.empty(len(numbers_T), matrix.width)
        self.library.packed_rows(
            ctypes.byref(matrix), numbers_T.data_ptr(), len(numbers_T), out_TI.data_ptr()
        )
        return out_TI


@functools.cache
def load() -> PackedKernel | None:
    """The compiled functions, or None, said once in the log, where they cannot be had."""
    address, count, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    return loaded(
        SOURCE,
        *("-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-lm"),
        signatures={
            "packed_multiply": (
                None,
                [address, address, count, count, address, address, address, integer],
            ),
            "packed_scratch": (count, [address, count]),
            "packed_rows": (None, [address, address, count, address]),
            "packed_matrix": (None, [address, address, address]),
            "best_instructions": (integer, []),
        },
        make=lambda library: PackedKernel(library, library.best_instructions()),
        otherwise="packed weights are multiplied by torch, slowly",
    )
