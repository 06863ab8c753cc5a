"""What is packed is what the file or the values say, whichever part of it a rank holds."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor

from kernels.packed_linear import GROUP, PackedMatrix, reference_rows
from model.errors import BadModelFile
from model.packing import RowsOf, can_pack, check_form, pack_values, read_packed
from model.stored_codes import PACKED_TYPES
from model.stored_tensor import StoredTensor, TensorBytes
from model.weight_form import WeightForm


def saved(folder: Path, kind: str, values: Tensor) -> tuple[StoredTensor, Tensor]:
    """A tensor in a file of its own, and the values it has there; of K types, any values."""
    quantization = GGMLQuantizationType[kind]
    raw = (
        any_blocks(kind, *values.shape)
        if kind.endswith("K")
        else quantize(values.numpy(), quantization)
    )
    path = folder / kind
    raw.tofile(path)
    whole = torch.from_numpy(np.array(dequantize(raw, quantization), np.float32))
    return StoredTensor(kind, tuple(values.shape), kind, path, 0, raw.nbytes), whole


def any_blocks(kind: str, num_rows: int, width: int) -> NDArray[np.uint8]:
    """What no quantiser here can write: random codes and scales, under sober scales of scales."""
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    shape = (num_rows, width // 256, block_bytes)
    raw = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    halves = np.linspace(0.01, 0.5, num_rows * (width // 256), dtype=np.float16)
    for place in (208,) if kind == "Q6_K" else (0, 2):
        raw[..., place : place + 2] = halves.view(np.uint8).reshape(num_rows, -1, 2)
    return raw.reshape(num_rows, -1)


def values_of(matrix: PackedMatrix) -> Tensor:
    return reference_rows(matrix, torch.arange(matrix.num_outputs))


@pytest.mark.parametrize("kind", PACKED_TYPES)
@pytest.mark.parametrize(
    "cols", [range(512), range(32, 96), range(5, 70), range(250, 300), range(500, 501)]
)
def test_stored_codes_keep_their_values_in_any_order_and_slice(
    kind: str, cols: range, tmp_path: Path
) -> None:
    stored, whole = saved(tmp_path, kind, torch.randn(70, 512))
    numbers = torch.randperm(70)[:45]
    matrix = read_packed(TensorBytes(), [RowsOf(stored, numbers.numpy())], cols, "stored")
    assert torch.equal(values_of(matrix), whole[numbers][:, cols.start : cols.stop])


def test_matrices_of_several_types_become_one(tmp_path: Path) -> None:
    each = [saved(tmp_path, kind, torch.randn(7, 256)) for kind in PACKED_TYPES]
    parts = [RowsOf(stored, np.arange(2, 7)) for stored, _ in each]
    matrix = read_packed(TensorBytes(), parts, range(256), "stored")
    assert torch.equal(values_of(matrix), torch.cat([whole[2:7] for _, whole in each]))


@pytest.mark.parametrize("form", ["int8", "int4", "stored"])
def test_a_matrix_packed_in_pieces_is_the_matrix_packed_at_once(
    form: WeightForm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = saved(tmp_path, "Q4_1", torch.randn(100, 64))
    parts = [RowsOf(stored, np.arange(*ends)) for ends in [(0, 33), (90, 100), (33, 90)]]
    at_once = values_of(read_packed(TensorBytes(), parts, range(64), form))
    monkeypatch.setattr("model.packing.CHUNK_VALUES", 1)
    assert torch.equal(values_of(read_packed(TensorBytes(), parts, range(64), form)), at_once)


@pytest.mark.parametrize(("form", "steps"), [("int8", 254), ("int4", 15)])
def test_quantised_values_are_half_a_step_off_at_most(form: WeightForm, steps: int) -> None:
    values = torch.randn(40, 75) * torch.rand(40, 1)
    values[3] = 0
    difference = (values_of(pack_values(values, form)) - values).abs()
    groups = torch.nn.functional.pad(values, (0, -75 % GROUP)).view(40, -1, GROUP)
    if form == "int8":
        span = 2 * groups.abs().amax(dim=2)
    else:
        span = groups.amax(dim=2) - groups.amin(dim=2)
    rounding = groups.abs().amax(dim=2) * 2**-9  # of scales and least values to half precision
    most = (span / steps / 2 + rounding).repeat_interleave(GROUP, dim=1)[:, :75]
    assert (difference <= most).all()
    assert difference.norm() > 0


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_ranks_hold_the_values_that_one_would_hold(form: WeightForm, tmp_path: Path) -> None:
    stored, _ = saved(tmp_path, "F32", torch.randn(20, 100))
    part = [RowsOf(stored, np.arange(20))]
    whole = values_of(read_packed(TensorBytes(), part, range(100), form))
    for cols in (range(34), range(34, 67), range(67, 100)):
        matrix = read_packed(TensorBytes(), part, cols, form)
        assert torch.equal(values_of(matrix), whole[:, cols.start : cols.stop])


def test_what_cannot_be_kept_as_stored_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = saved(tmp_path, "F16", torch.randn(4, 32))
    with pytest.raises(BadModelFile, match=r"F16 holds no matrix in Q8_0, .*set weights to dense"):
        check_form([plain], "stored")
    assert not can_pack(plain, "stored") and can_pack(plain, "int8")
    packed, _ = saved(tmp_path, "Q8_0", torch.randn(4, 32))
    check_form([plain, packed, plain], "stored")
    assert "kept dense: 2 in F16" in caplog.text


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    stored, _ = saved(tmp_path, "Q4_1", torch.randn(4, 32))
    raw = bytearray(stored.path.read_bytes())
    raw[2:4] = b"\x00\x7e"  # the first block's least value
    stored.path.write_bytes(raw)
    with pytest.raises(BadModelFile, match="Q4_1 holds values beyond half precision"):
        read_packed(TensorBytes(), [RowsOf(stored, np.arange(4))], range(32), "stored")


PEAK = """
import re, sys
from pathlib import Path
import torch
import model.load
from kvcache.head_map import HeadMap
from model.comm import SingleComm
from model.source import open_model
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
before = peak()
torch.empty(1000, 1000).fill_(1) @ torch.ones(1000, 8)
made = open_model("smollm2").load(HeadMap.even(9, 3, 1), 0, SingleComm(), weights=sys.argv[1])
print(peak() - before)
"""


def test_weights_kept_as_stored_are_never_in_memory_as_fp32() -> None:
    command = [sys.executable, "-c", PEAK, "stored"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    weights, file, fp32 = 97e6, 99e6, 538e6  # bytes; the mapped file counts until it is let go
    assert weights < int(done.stdout) < weights + file + 80e6 < fp32
