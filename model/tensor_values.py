"""The values of a stored tensor, a slice at a time, whatever the type they are stored in."""

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from model.stored_codes import PACKED_TYPES, block_values
from model.stored_tensor import RawBytes, StoredTensor

PLAIN_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
Rows = slice | npt.NDArray[np.int64]  # of a matrix; a vector counts as one row


def read_values(raw: RawBytes, stored: StoredTensor, rows: Rows, cols: range) -> Tensor:
    """[rows, cols] in the type they are stored in, quantised ones in fp32.

    Reads no more than the quantisation blocks that hold them.
    """
    item = PLAIN_TYPES.get(stored.type)
    if item is not None:
        table = raw.reshape(-1, stored.shape[-1] * item.itemsize)
        part = table[rows, cols.start * item.itemsize : cols.stop * item.itemsize]
        return torch.from_numpy(np.array(part)).view(item)
    block_size, _ = GGML_QUANT_SIZES[GGMLQuantizationType[stored.type]]
    blocks = range(cols.start // block_size, -(-cols.stop // block_size))
    part = read_blocks(raw, stored, rows, blocks)
    if stored.type in PACKED_TYPES:
        values = block_values(stored.type, torch.from_numpy(part))
    else:
        kind = GGMLQuantizationType[stored.type]
        values = torch.from_numpy(dequantize(part.reshape(len(part), -1), kind))
    skipped = cols.start - blocks.start * block_size
    return values[:, skipped : skipped + len(cols)]


def read_blocks(
    raw: RawBytes, stored: StoredTensor, rows: Rows, blocks: range
) -> npt.NDArray[np.uint8]:
    """[rows, blocks, bytes of a block] of a quantised tensor, as they are."""
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[stored.type]]
    table = raw.reshape(-1, stored.shape[-1] // block_size, block_bytes)
    return np.array(table[rows, blocks.start : blocks.stop])
