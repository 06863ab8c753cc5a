"""The headers of a folder's safetensors files: one file, or the shards an index names.

Format: https://huggingface.co/docs/safetensors. A header is believed only where the file's size
bears it out.
"""

import json
import math
from pathlib import Path

from model.errors import BadModelFile
from model.stored_tensor import OpenFile, StoredTensor

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIM = 1 << 40


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file of the checkpoint."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{path} is not a JSON object")
    return value


def read_safetensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of `model.safetensors`, or of the shards in `model.safetensors.index.json`."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if whole.exists() or not index.exists():
        if not whole.exists() and any(folder.glob("*.bin")):
            raise BadModelFile(f"{folder} has its weights in .bin files; save them as safetensors")
        return _read_file(whole)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModelFile(f"{index} has no weight_map")
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise BadModelFile(f"{index} places {name} in {file_name!r}, not a file beside it")
        if file_name not in shards:
            shards[file_name] = _read_file(folder / file_name)
        if name not in shards[file_name]:
            raise BadModelFile(f"{folder / file_name} lacks {name}, which {index.name} says it has")
        tensors[name] = shards[file_name][name]
    return tensors


def _read_file(path: Path) -> dict[str, StoredTensor]:
    file = OpenFile(path)
    length = int.from_bytes(file.bytes[:8], "little")
    if file.size < 8 or length > min(file.size - 8, MAX_HEADER_BYTES):
        raise BadModelFile(f"{path} is cut short, or not a safetensors file")
    try:
        header = json.loads(file.bytes[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not a safetensors file: its header is no JSON") from error
    if not isinstance(header, dict):
        raise BadModelFile(f"{path} is not a safetensors file: its header is no JSON object")
    return {
        name: _placed(file, 8 + length, name, entry)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _placed(file: OpenFile, start: int, name: str, entry: object) -> StoredTensor:
    path = file.path
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise BadModelFile(f"{path}: the entry of tensor {name} is not understood")
    if not all(isinstance(dim, int) and 0 <= dim <= MAX_DIM for dim in shape):
        raise BadModelFile(f"{path}: tensor {name} has the impossible shape {shape}")
    if not 0 <= begin <= end:
        raise BadModelFile(f"{path}: tensor {name} ends before it begins")
    if start + end > file.size:
        raise BadModelFile(
            f"{path} is cut short: tensor {name} ends at byte {start + end}, "
            f"the file at {file.size}"
        )
    if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != end - begin:
        raise BadModelFile(f"{path}: tensor {name} of shape {shape} is not {end - begin} bytes")
    return StoredTensor(name, tuple(shape), dtype, path, start + begin, end - begin)
