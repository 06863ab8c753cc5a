"""How matrices of few bits a weight are made: of a file's own codes, or of its values.

    int8      a scale for 32 inputs of an output, and codes of -127 to 127
    int4      a scale and a least value for 32 inputs of an output, and codes of 0 to 15
    stored    what a GGUF file holds in one of PACKED_TYPES, value for value

Rows are read and packed some at a time: there is never a whole matrix of fp32.

    O outputs, G groups of a row, N inputs of a group, B bytes of its codes
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.huge_pages import Memory
from kernels.packed_linear import GROUP, TILE, PackedMatrix, PackedRows
from model.errors import BadModelFile
from model.stored_codes import PACKED_TYPES, Packing, block_codes, one_by_one, two_a_byte
from model.stored_tensor import StoredTensor, TensorBytes
from model.tensor_values import read_blocks, read_values
from model.weight_form import WeightForm

log = logging.getLogger(__name__)

VALUES: dict[str, Packing] = {"int8": Packing(8, False), "int4": Packing(4, True)}
CHUNK_VALUES = 1 << 20  # packed at a time: 4 MiB of fp32


@dataclass(frozen=True, slots=True)
class RowsOf:
    """Rows of one tensor, in the order wanted."""

    stored: StoredTensor
    numbers: npt.NDArray[np.int64]


def check_form(tensors: Iterable[StoredTensor], form: WeightForm) -> None:
    """Raises BadModelFile where no matrix can be kept as it is stored; says which cannot."""
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    others = Counter(tensor.type for tensor in matrices if not can_pack(tensor, form))
    if form == "stored" and others.total() == len(matrices):
        raise BadModelFile(
            f"{matrices[0].path.name} holds no matrix in {', '.join(PACKED_TYPES)}, "
            "so none can be kept as stored: set weights to dense, int8 or int4"
        )
    if form not in ("dense", "bf16") and others:
        found = ", ".join(f"{count} in {kind}" for kind, count in sorted(others.items()))
        log.warning("matrices that cannot be kept as stored are kept dense: %s", found)


def can_pack(stored: StoredTensor, form: WeightForm) -> bool:
    """Whether a matrix of that type can be had in that form, which is not `dense`."""
    return form in ("int8", "int4") or (form == "stored" and stored.type in PACKED_TYPES)


def read_packed(
    mapped: TensorBytes,
    parts: Sequence[RowsOf],
    cols: range,
    form: WeightForm,
    memory: Memory | None = None,
) -> PackedMatrix:
    """Columns `cols` of the parts, one under the other; each part must be one that `can_pack`.

    Groups lie where they lie in the whole matrix, so that the ranks of a group hold the values
    that one rank would hold alone.
    """
    packing = VALUES.get(form) or _common([PACKED_TYPES[part.stored.type] for part in parts])
    num_outputs = sum(len(part.numbers) for part in parts)
    skip = cols.start % GROUP
    matrix = _empty(num_outputs, len(cols), packing, skip, memory)
    step = max(1, CHUNK_VALUES // len(cols) // TILE) * TILE
    for first in range(0, num_outputs, step):
        rows = [
            _as(_pack(mapped, part, cols, form), packing)
            for part in _between(parts, first, first + step)
        ]
        matrix.fill(first, _under_one_another(rows))
    return matrix


def _between(parts: Sequence[RowsOf], first: int, last: int) -> list[RowsOf]:
    """Outputs `first` to `last` of those that the parts make together."""
    found, start = [], 0
    for part in parts:
        numbers = part.numbers[max(0, first - start) : max(0, last - start)]
        if len(numbers):
            found.append(RowsOf(part.stored, numbers))
        start += len(part.numbers)
    return found


def _pack(mapped: TensorBytes, part: RowsOf, cols: range, form: WeightForm) -> PackedRows:
    groups = range(cols.start // GROUP, -(-cols.stop // GROUP))
    raw = mapped.of(part.stored)
    if form == "stored":
        each = PACKED_TYPES[part.stored.type].groups
        blocks = range(groups.start // each, -(-groups.stop // each))
        found = read_blocks(raw, part.stored, part.numbers, blocks)
        rows = block_codes(part.stored.type, torch.from_numpy(found))
        if rows.mins_OG is not None and not rows.mins_OG.isfinite().all():
            raise BadModelFile(f"{part.stored.name} holds values beyond half precision, or none")
        skipped = groups.start - blocks.start * each
        return _groups(rows, range(skipped, skipped + len(groups)))
    whole = range(groups.start * GROUP, min(groups.stop * GROUP, part.stored.shape[-1]))
    return _quantise(read_values(raw, part.stored, part.numbers, whole).float(), form)


def _groups(rows: PackedRows, which: range) -> PackedRows:
    codes_OGB, scales_OG, mins_OG = rows
    if len(which) == codes_OGB.shape[1]:
        return rows
    parts = scales_OG.shape[1] // codes_OGB.shape[1]
    held = slice(which.start * parts, which.stop * parts)
    return PackedRows(
        codes_OGB[:, which.start : which.stop].contiguous(),
        scales_OG[:, held],
        None if mins_OG is None else mins_OG[:, held],
    )


def pack_values(values_OI: Tensor, form: WeightForm) -> PackedMatrix:
    """A matrix at hand, as int8 or int4."""
    num_outputs, width = values_OI.shape
    matrix = _empty(num_outputs, width, VALUES[form])
    matrix.fill(0, _quantise(values_OI, form))
    return matrix


def _quantise(values_OI: Tensor, form: WeightForm) -> PackedRows:
    padding = -values_OI.shape[1] % GROUP
    values_OGN = pad(values_OI, (0, padding)).view(len(values_OI), -1, GROUP)
    return quantise_int8(values_OGN) if form == "int8" else quantise_int4(values_OGN)


def quantise_int8(values_OGN: Tensor) -> PackedRows:
    """Each value within half a step of its group's scale, which is its largest size over 127."""
    scales_OG = (values_OGN.abs().amax(dim=2) / 127).half()
    return PackedRows(
        _codes(values_OGN.clone(), scales_OG, -127, 127).add_(128).byte(), scales_OG, None
    )


def quantise_int4(values_OGN: Tensor) -> PackedRows:
    """Fifteen steps from the least value of a group to its largest."""
    least_OG, most_OG = values_OGN.aminmax(dim=2)
    mins_OG = least_OG.half()
    scales_OG = ((most_OG - mins_OG.float()) / 15).half()
    codes_OGN = _codes(values_OGN - mins_OG.float()[..., None], scales_OG, 0, 15).byte()
    return PackedRows(two_a_byte(codes_OGN), scales_OG, mins_OG)


def _codes(values_OGN: Tensor, scales_OG: Tensor, least: int, most: int) -> Tensor:
    """Changes the values."""
    steps_OG = scales_OG.float()
    inverse_OG = torch.where(steps_OG > 0, steps_OG.reciprocal(), 0)
    return values_OGN.mul_(inverse_OG[..., None]).round_().clamp_(least, most)


def _common(packings: Sequence[Packing]) -> Packing:
    """One that holds the values of all of them."""
    return Packing(
        max(each.bits for each in packings),
        any(each.with_mins for each in packings),
        max(each.parts for each in packings),
        max((each.dtype for each in packings), key=lambda dtype: dtype.itemsize),
    )


def _empty(
    num_outputs: int, width: int, packing: Packing, skip: int = 0, memory: Memory | None = None
) -> PackedMatrix:
    bits, with_mins, parts, dtype, _ = packing
    return PackedMatrix.empty(num_outputs, width, bits, skip, dtype, with_mins, parts, memory)


def _as(rows: PackedRows, packing: Packing) -> PackedRows:
    """The same values with more bits, with least values of zero, or with more scales."""
    codes_OGB, scales_OG, mins_OG = rows
    if packing.bits == 8 and codes_OGB.shape[2] == GROUP // 2:
        codes_OGB = one_by_one(codes_OGB) + 128
    if packing.with_mins and mins_OG is None:
        mins_OG = torch.zeros_like(scales_OG)
    each = codes_OGB.shape[1] * packing.parts // scales_OG.shape[1]

    def spread(factors_OG: Tensor) -> Tensor:
        return factors_OG.repeat_interleave(each, dim=1).to(packing.dtype)

    mins_OG = None if mins_OG is None else spread(mins_OG)
    return PackedRows(codes_OGB, spread(scales_OG), mins_OG)


def _under_one_another(rows: Sequence[PackedRows]) -> PackedRows:
    mins = [part.mins_OG for part in rows if part.mins_OG is not None]
    return PackedRows(
        torch.cat([part.codes_OGB for part in rows]),
        torch.cat([part.scales_OG for part in rows]),
        torch.cat(mins) if mins else None,
    )
