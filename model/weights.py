"""One rank's slices of a decoder's weights, read straight into the tensors it computes with.

Each tensor is mapped, and only the rows and columns this rank holds are touched: of a quantised
one, the quantisation blocks that hold them. q, k and v, and gate and up, become one matrix each.
Matrices are kept in the form asked for; what is added or multiplied alone, in the dtype.

    H local query heads, K local KV heads, D head dim, E hidden size, M this rank's share of the
    intermediate size, Q = H + 2K; a matrix has its outputs first
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.huge_pages import Memory
from kernels.packed_linear import PackedMatrix
from model.config import DecoderConfig
from model.layers import RmsNorm
from model.linear import DenseLinear, Linear, PackedLinear
from model.packing import RowsOf, can_pack, check_form, read_packed
from model.rope import inverse_frequencies
from model.shard import Shard
from model.stored_tensor import StoredTensor, TensorBytes
from model.tensor_names import TensorSet
from model.tensor_values import read_values
from model.weight_form import WeightForm

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CHUNK_VALUES = 1 << 24  # dequantised at a time: 64 MiB of fp32


MakeDense = Callable[
    [Tensor, Tensor | None, bool], Linear
]  # matrix, bias, whether it is two of one width


def dense_by_torch(weight_OI: Tensor, bias_O: Tensor | None, paired: bool) -> Linear:
    return DenseLinear(weight_OI, bias_O)


def rounded_by_torch(weight_OI: Tensor, bias_O: Tensor | None, paired: bool) -> Linear:
    """The values that bf16 keeps; without a kernel for it they take as much as any others."""
    return DenseLinear(weight_OI.bfloat16().to(weight_OI.dtype), bias_O)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: RmsNorm
    qkv: Linear  # [Q * D, E] and its bias
    qk_norm: RmsNorm | None  # q's weight for each query head, then k's for each KV head
    o: Linear  # [E, H * D]
    o_bias_E: Tensor | None  # apart: it is added once, after the ranks have added up
    mlp_norm: RmsNorm
    gate_up: Linear  # [2 * M, E] and its bias
    down: Linear  # [E, M]
    down_bias_E: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Linear
    lm_head: Linear  # the embedding itself when tied
    final_norm: RmsNorm
    layers: tuple[LayerWeights, ...]
    frequencies_F: Tensor  # of rope, fp32


def read_weights(
    config: DecoderConfig,
    tensors: TensorSet,
    shard: Shard,
    device: torch.device | str,
    dtype: torch.dtype,
    make_dense: MakeDense = dense_by_torch,
    form: WeightForm = "dense",
) -> DecoderWeights:
    """Read what `shard` holds.

    Raises BadModelFile if a file has shrunk since it was opened, or if nothing in it is quantised
    and the form is "stored".
    """
    check_form(tensors.tensors.values(), form)
    reader = _Reader(config, tensors, shard, device, dtype, make_dense, form)
    embedding = lm_head = reader.column_parallel(["embedding"], None, [shard.vocabulary])
    if not config.tied_embeddings:
        lm_head = reader.column_parallel(["lm_head"], None, [shard.vocabulary])
    rope_freqs_F = None
    if tensors.rope_freqs is not None:
        rope_freqs_F = torch.empty(tensors.rope_freqs.shape)
        reader.fill(rope_freqs_F, tensors.rope_freqs)
    return DecoderWeights(
        embedding=embedding,
        lm_head=lm_head,
        final_norm=reader.norm("final_norm", None),
        layers=tuple(reader.layer(layer) for layer in range(config.num_layers)),
        frequencies_F=inverse_frequencies(config, rope_freqs_F).to(device),
    )


class _Reader:
    def __init__(
        self,
        config: DecoderConfig,
        tensors: TensorSet,
        shard: Shard,
        device: torch.device | str,
        dtype: torch.dtype,
        make_dense: MakeDense,
        form: WeightForm,
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._shard = shard
        self._device = device
        self._dtype = dtype
        self._make_dense = make_dense
        self._form = form
        self._memory = Memory()
        self._bytes = TensorBytes()
        self._interleaved = tensors.from_gguf and config.architecture == "llama"

    def layer(self, layer: int) -> LayerWeights:
        config, shard = self._config, self._shard
        qkv_rows, mlp_rows = [shard.query_rows, shard.kv_rows, shard.kv_rows], [shard.middle] * 2
        return LayerWeights(
            attention_norm=self.norm("attention_norm", layer),
            qkv=self.column_parallel(["q", "k", "v"], layer, qkv_rows, config.attention_bias),
            qk_norm=self._qk_norm(layer) if config.qk_norm else None,
            o=self._row_parallel("o", layer, shard.query_rows),
            o_bias_E=self.whole("o_bias", layer) if config.output_bias else None,
            mlp_norm=self.norm("mlp_norm", layer),
            gate_up=self.column_parallel(["gate", "up"], layer, mlp_rows, config.mlp_bias),
            down=self._row_parallel("down", layer, shard.middle),
            down_bias_E=self.whole("down_bias", layer) if config.mlp_bias else None,
        )

    def column_parallel(
        self, roles: Sequence[str], layer: int | None, rows: Sequence[range], biased: bool = False
    ) -> Linear:
        """The given rows of each matrix as one, with the biases of the same rows."""
        bias_O = self._rows([f"{role}_bias" for role in roles], layer, rows) if biased else None
        parts = [self._part(role, layer, some) for role, some in zip(roles, rows, strict=True)]
        if all(can_pack(part.stored, self._form) for part in parts):
            cols = range(parts[0].stored.shape[1])
            return PackedLinear(self._packed(parts, cols), bias_O)
        return self._make_dense(self._rows(roles, layer, rows), bias_O, roles == ["gate", "up"])

    def norm(self, role: str, layer: int | None) -> RmsNorm:
        return RmsNorm(self.whole(role, layer), self._config.rms_norm_eps)

    def whole(self, role: str, layer: int | None) -> Tensor:
        stored = self._tensors.of(role, layer)
        return self._rows([role], layer, [range(stored.shape[0])])

    def _rows(self, roles: Sequence[str], layer: int | None, rows: Sequence[range]) -> Tensor:
        """The given rows of each tensor, one tensor under the other."""
        first = self._tensors.of(roles[0], layer)
        out = self._empty(sum(map(len, rows)), *first.shape[1:])
        start = 0
        for role, part in zip(roles, rows, strict=True):
            target = out[start : start + len(part)]
            self.fill(target, self._tensors.of(role, layer), part)
            if self._interleaved and role in ("q", "k", "q_bias", "k_bias"):
                target.copy_(_halves_apart(target, self._config.head_dim))
            start += len(part)
        return out

    def fill(
        self,
        out: Tensor,
        stored: StoredTensor,
        rows: range | None = None,
        cols: range | None = None,
    ) -> None:
        """Copy a slice of `stored` (by default all of it), converted, into `out`."""
        rows = range(stored.shape[0]) if rows is None else rows
        cols = range(stored.shape[-1]) if cols is None else cols
        if len(stored.shape) == 1:  # one row, whose columns are asked for as rows
            rows, cols, out = range(1), rows, out[None]
        raw = self._bytes.of(stored)
        step = max(1, CHUNK_VALUES // stored.shape[-1])
        for start in range(rows.start, rows.stop, step):
            part = range(start, min(start + step, rows.stop))
            values = read_values(raw, stored, slice(part.start, part.stop), cols)
            out[start - rows.start :][: len(part)].copy_(values)

    def _row_parallel(self, role: str, layer: int, cols: range) -> Linear:
        stored = self._tensors.of(role, layer)
        if can_pack(stored, self._form):
            part = self._part(role, layer, range(stored.shape[0]))
            return PackedLinear(self._packed([part], cols))
        out = self._empty(stored.shape[0], len(cols))
        self.fill(out, stored, cols=cols)
        return self._make_dense(out, None, False)

    def _packed(self, parts: Sequence[RowsOf], cols: range) -> PackedMatrix:
        return read_packed(self._bytes, parts, cols, self._form, self._memory)

    def _part(self, role: str, layer: int | None, rows: range) -> RowsOf:
        numbers = torch.arange(rows.start, rows.stop)
        if self._interleaved and role in ("q", "k"):
            numbers = _halves_apart(numbers, self._config.head_dim)
        return RowsOf(self._tensors.of(role, layer), numbers.numpy())

    def _qk_norm(self, layer: int) -> RmsNorm:
        width = self._config.head_dim
        heads = (
            self.whole("q_norm", layer).expand(len(self._shard.query_rows) // width, -1),
            self.whole("k_norm", layer).expand(len(self._shard.kv_rows) // width, -1),
        )
        return RmsNorm(torch.cat(heads), self._config.rms_norm_eps)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def _halves_apart(rows: Tensor, head_dim: int) -> Tensor:
    """Undo GGUF's order of a llama head's rows, which sets the two rows rope turns side by side."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
