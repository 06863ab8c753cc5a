"""The header of a GGUF file, read in a fraction of a second and believed in nothing.

The `gguf` package's own reader takes seconds over a vocabulary of 49,152 tokens and trusts every
count it meets; here each is checked against the bytes that are there before it is used. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from model.errors import BadModelFile
from model.stored_tensor import OpenFile, StoredTensor

MAX_DIMS = 4
MAX_DIM = 1 << 40

SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    fields: dict[str, object]  # numbers, booleans, text, and lists of these
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read everything but the tensors' bytes, whose places are proven to lie inside the file."""
    file = OpenFile(path)
    cursor = _Cursor(file)
    if cursor.take(4) != b"GGUF":
        raise BadModelFile(f"{path} is not a GGUF file")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        big_endian = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
        raise BadModelFile(f"{path} is GGUF version {version}{big_endian}; 2 and 3 are read")
    num_tensors, num_fields = cursor.count(24), cursor.count(12)
    fields: dict[str, object] = {}
    for _ in range(num_fields):
        key = cursor.text()
        if key in fields:
            raise BadModelFile(f"{path} gives {key} twice")
        fields[key] = cursor.value(cursor.kind())
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    start = cursor.align(_alignment(path, fields))
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise BadModelFile(f"{path} holds tensor {name} twice")
        tensors[name] = _placed(file, name, shape, kind, start + offset)
    return GgufFile(path, fields, tensors)


def _alignment(path: Path, fields: dict[str, object]) -> int:
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment not in [1 << bit for bit in range(24)]:
        raise BadModelFile(f"{path}: general.alignment is {alignment!r}, not a power of two")
    return alignment


def _tensor_entry(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    num_dims = cursor.scalar("<I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.bad(f"gives tensor {name} {num_dims} dims, not 1 to {MAX_DIMS}")
    dims = [cursor.scalar("<Q") for _ in range(num_dims)]
    if not all(1 <= dim <= MAX_DIM for dim in dims):
        raise cursor.bad(f"gives tensor {name} the impossible shape {dims[::-1]}")
    return name, tuple(reversed(dims)), cursor.scalar("<I"), cursor.scalar("<Q")


def _placed(
    file: OpenFile, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> StoredTensor:
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError:
        raise BadModelFile(f"{file.path}: tensor {name} is of unknown type {kind}") from None
    block_values, block_bytes = GGML_QUANT_SIZES[quantization]
    if shape[-1] % block_values:
        raise BadModelFile(
            f"{file.path}: tensor {name} has rows of {shape[-1]} values, "
            f"not whole {quantization.name} blocks of {block_values}"
        )
    num_bytes = math.prod(shape) // block_values * block_bytes
    if offset + num_bytes > file.size:
        raise BadModelFile(
            f"{file.path} is cut short: tensor {name} ends at byte {offset + num_bytes}, "
            f"the file at {file.size}"
        )
    return StoredTensor(name, shape, quantization.name, file.path, offset, num_bytes)


class _Cursor:
    """Walks over a file's bytes; never past its end."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._at = 0

    def bad(self, problem: str) -> BadModelFile:
        return BadModelFile(f"{self._file.path} {problem}")

    def take(self, size: int) -> bytes:
        if size > self._file.size - self._at:
            raise self.bad(f"is cut short: {size} bytes are missing at byte {self._at}")
        self._at += size
        return self._file.bytes[self._at - size : self._at]

    def scalar(self, layout: str) -> int:
        number: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return number

    def count(self, least_bytes: int) -> int:
        """A number of things to come, each of `least_bytes` or more."""
        number = self.scalar("<Q")
        if number * least_bytes > self._file.size - self._at:
            raise self.bad(f"is cut short: it promises {number} more entries at byte {self._at}")
        return number

    def text(self) -> str:
        raw = self.take(self.count(1))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.bad(f"has text at byte {self._at - len(raw)} that is not UTF-8") from None

    def kind(self) -> GGUFValueType:
        number = self.scalar("<I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.bad(f"has a value of unknown type {number} at byte {self._at}") from None

    def value(self, kind: GGUFValueType) -> object:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind != GGUFValueType.ARRAY:
            return self.scalar(SCALARS[kind])
        item = self.kind()
        if item == GGUFValueType.ARRAY:
            raise self.bad(f"has a list of lists at byte {self._at}")
        if item == GGUFValueType.STRING:
            text: Callable[[], str] = self.text
            return [text() for _ in range(self.count(8))]
        layout = SCALARS[item]
        length = self.count(struct.calcsize(layout))
        raw = self.take(length * struct.calcsize(layout))
        return np.frombuffer(raw, np.dtype(layout)).tolist()

    def align(self, alignment: int) -> int:
        return -(-self._at // alignment) * alignment
