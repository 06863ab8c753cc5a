"""A tensor as it lies in somebody's file: where, in what type, and its bytes when asked for."""

import hashlib
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from model.errors import BadModelFile

RawBytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` has the outermost dim first; `type` is the file format's own name for it."""

    name: str
    shape: tuple[int, ...]
    type: str
    path: Path
    offset: int
    num_bytes: int


class OpenFile:
    """A read-only view of a whole file, or a BadModelFile that says why there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BadModelFile(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise BadModelFile(f"{path} is empty") from error


class TensorBytes:
    """The bytes of tensors, mapped from their files and read from disk only as they are used."""

    def __init__(self) -> None:
        self._files: dict[Path, OpenFile] = {}

    def of(self, tensor: StoredTensor) -> RawBytes:
        file = self._files.get(tensor.path)
        if file is None:
            file = self._files[tensor.path] = OpenFile(tensor.path)
        if tensor.offset + tensor.num_bytes > file.size:
            raise BadModelFile(f"{tensor.path} is cut short: it ends inside {tensor.name}")
        return np.frombuffer(file.bytes, np.uint8, tensor.num_bytes, tensor.offset)


def fingerprint(tensors: Iterable[StoredTensor]) -> bytes:
    """16 bytes over the name, shape, type and every byte of every tensor, in any order."""
    mapped = TensorBytes()
    lines = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.path, tensor.offset)):
        digest = xxhash.xxh3_128_hexdigest(mapped.of(tensor).data)
        lines.append(repr((tensor.name, tensor.shape, tensor.type, digest)))
    total = hashlib.blake2b(digest_size=16, person=b"kvferry.weights")
    total.update("\n".join(sorted(lines)).encode())
    return total.digest()
