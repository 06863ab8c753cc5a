"""The decoder of the Llama family, one tensor-parallel rank of it.

Column-parallel q, k, v, gate and up; row-parallel o and down, after each of which the ranks add
up; vocabulary-parallel embedding and head. Keys and values are computed by every rank that holds
the head, never exchanged.

T new tokens, R rows whose logits are wanted, H local query heads, K local KV heads, D head dim,
E hidden size, M this rank's share of the intermediate size, V of the vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.paged_attention import Sight, paged_attention
from kernels.rotate_write import rotate_write
from kernels.silu_multiply import silu_multiply
from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from model.batch import Batch
from model.comm import Comm
from model.config import DecoderConfig
from model.layers import RmsNorm
from model.model import OnLayer
from model.rope import rotation
from model.vocabulary_shard import VocabularyShard
from model.weights import DecoderWeights, LayerWeights


class Decoder:
    """Computes in the dtype of its weights; logits are fp32."""

    def __init__(
        self,
        config: DecoderConfig,
        head_map: HeadMap,
        comm: Comm,
        weights: DecoderWeights,
        spec: CacheSpec,
        overlap_rows: int = 0,
    ) -> None:
        """With `overlap_rows`, a step of so many rows goes through in two halves: while the ranks
        add up what one half's products gave, the other's are computed.
        """
        assert head_map.tp == comm.size
        self.config = config
        self.spec = spec
        self._comm = comm
        self._weights = weights
        self._vocabulary = VocabularyShard(config.vocab_size, comm)
        self._num_query_heads = len(head_map.query[comm.rank])
        self._num_kv_heads = len(head_map.kv[comm.rank])
        self._scale = config.head_dim**-0.5
        self._sights = [Sight(window) for window in config.windows or (0,) * config.num_layers]
        self._overlap_rows = overlap_rows if comm.size > 1 else 0

    @torch.no_grad()
    def forward(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> Tensor | None:
        with torch.inference_mode():
            own_RV = self.compute(batch, store, on_layer)
            logits_RV = self.gather(own_RV, batch.token_ids_T.device)
        return None if logits_RV is None else logits_RV.clone()  # an ordinary tensor again

    @property
    def num_ranks(self) -> int:
        return self._comm.size

    def compute(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> Tensor | None:
        """The logits of this rank's share of the vocabulary; None where no row wants any.

        To be called under `torch.inference_mode`.
        """
        weights = self._weights
        x_TE = self._vocabulary.embed(weights.embedding, batch.token_ids_T)
        cos_TD, sin_TD = rotation(batch.positions_T, weights.frequencies_F)
        rope = (cos_TD.to(x_TE.dtype), sin_TD.to(x_TE.dtype))
        rows = Residual(x_TE, self._comm, self._parts(len(x_TE)))
        for number, layer in enumerate(weights.layers):
            pool_NPHSD = store.layer(number)
            q_THD = self._write(layer, rows, rope, batch, pool_NPHSD)
            on_layer(number)
            last = number == len(weights.layers) - 1
            if last and not len(batch.logit_rows_R):
                return None
            a_TE = self._attend(q_THD, batch, pool_NPHSD, self._sights[number]).flatten(1)
            if last:  # nothing reads the other rows any more
                rows, a_TE = rows.only(batch.logit_rows_R), a_TE[batch.logit_rows_R]
            for part in rows.parts:
                rows.add(part, layer.o(a_TE[part]), layer.o_bias_E)
            for part in rows.parts:
                rows.add(
                    part, self._mlp(layer, rows.normed(part, layer.mlp_norm)), layer.down_bias_E
                )
        own_RV: Tensor = weights.lm_head(weights.final_norm(rows.all())).float()
        return own_RV

    def gather(self, own_RV: Tensor | None, device: torch.device) -> Tensor | None:
        """All logits on rank 0, from what every rank computed."""
        if own_RV is None:
            return self._vocabulary.no_logits(device)
        return self._vocabulary.gather(own_RV)

    def agree(self, well: bool, device: torch.device) -> bool:
        """Whether it went well on every rank; they all ask at the same point."""
        return float(self._comm.all_reduce(torch.tensor([float(not well)], device=device))) == 0.0

    def _parts(self, num_rows: int) -> list[slice]:
        if not self._overlap_rows or num_rows < max(2, self._overlap_rows):
            return [slice(0, num_rows)]
        return [slice(0, num_rows // 2), slice(num_rows // 2, num_rows)]

    def _write(
        self,
        layer: LayerWeights,
        rows: "Residual",
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        pool_NPHSD: Tensor,
    ) -> Tensor:
        """Put the new tokens' keys and values into the store; return their queries."""
        num_query, num_kv, width = self._num_query_heads, self._num_kv_heads, self.config.head_dim
        qkv = [layer.qkv(rows.normed(part, layer.attention_norm)) for part in rows.parts]
        qkv_T = torch.cat(qkv) if len(qkv) > 1 else qkv[0]
        qkv_THD = qkv_T.view(len(qkv_T), num_query + 2 * num_kv, width)
        qk_THD, v_THD = qkv_THD[:, : num_query + num_kv], qkv_THD[:, num_query + num_kv :]
        if layer.qk_norm is not None:
            qk_THD = layer.qk_norm(qk_THD)
        q_THD, k_THD = qk_THD[:, :num_query], qk_THD[:, num_query:]
        return rotate_write(q_THD, k_THD, v_THD, *rope, pool_NPHSD, batch.slots_T)

    def _attend(self, q_THD: Tensor, batch: Batch, pool_NPHSD: Tensor, sight: Sight) -> Tensor:
        return paged_attention(
            q_THD,
            pool_NPHSD,
            batch.query_starts_S1,
            batch.context_lens_S,
            batch.block_tables_SB,
            self._scale,
            sight,
        )

    def _mlp(self, layer: LayerWeights, h_TE: Tensor) -> Tensor:
        return layer.down(silu_multiply(layer.gate_up(h_TE)))


class Residual:
    """The residual stream x_TE, in `parts` of rows, and the sums that are still to come to each.

    A part's sum is waited for when the part is read, and not before: until then the ranks add up
    while this one computes with another part.
    """

    def __init__(self, x_TE: Tensor, comm: Comm, parts: Sequence[slice]) -> None:
        self.parts = parts
        self._x_TE = x_TE
        self._comm = comm
        self._coming: dict[int, tuple[Callable[[], Tensor], Tensor | None]] = {}

    def add(self, part: slice, h_TE: Tensor, bias_E: Tensor | None) -> None:
        """A row-parallel product, to be summed over the ranks; its bias only once."""
        assert part.start not in self._coming, "a part that was not read"
        self._coming[part.start] = self._comm.begin_all_reduce(h_TE), bias_E

    def at(self, part: slice) -> Tensor:
        x_TE = self._x_TE[part]
        coming = self._coming.pop(part.start, None)
        if coming is not None:
            summed, bias_E = coming
            x_TE += summed()
            if bias_E is not None:
                x_TE += bias_E
        return x_TE

    def normed(self, part: slice, norm: RmsNorm) -> Tensor:
        """`at`, normalised."""
        coming = self._coming.get(part.start)
        if coming is None or coming[1] is not None:
            return norm(self.at(part))
        summed, _ = self._coming.pop(part.start)
        return norm.of_sum(self._x_TE[part], summed())

    def all(self) -> Tensor:
        for part in self.parts:
            self.at(part)
        return self._x_TE

    def only(self, rows_R: Tensor) -> "Residual":
        x_RE = self.all()[rows_R]
        return Residual(x_RE, self._comm, [slice(0, len(x_RE))])
