"""The decoder of the Llama family, one tensor-parallel rank of it.

Column-parallel q, k, v, gate and up; row-parallel o and down, after each of which the ranks add
up; vocabulary-parallel embedding and head. Keys and values are computed by every rank that holds
the head, never exchanged.

T new tokens, R rows whose logits are wanted, H local query heads, K local KV heads, D head dim,
E hidden size, M this rank's share of the intermediate size, V of the vocabulary.
"""

import torch
from torch import Tensor

from kernels.paged_attention import paged_attention
from kernels.rotate_write import rotate_write
from kernels.silu_multiply import silu_multiply
from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from model.batch import Batch
from model.comm import Comm
from model.config import DecoderConfig
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
    ) -> None:
        assert head_map.tp == comm.size
        self.config = config
        self.spec = spec
        self._comm = comm
        self._weights = weights
        self._vocabulary = VocabularyShard(config.vocab_size, comm)
        self._num_query_heads = len(head_map.query[comm.rank])
        self._num_kv_heads = len(head_map.kv[comm.rank])
        self._scale = config.head_dim**-0.5

    @torch.no_grad()
    def forward(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> Tensor | None:
        with torch.inference_mode():
            logits_RV = self.compute(batch, store, on_layer)
        return None if logits_RV is None else logits_RV.clone()  # an ordinary tensor again

    @property
    def num_ranks(self) -> int:
        return self._comm.size

    def compute(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> Tensor | None:
        """`forward` as it is under `torch.inference_mode`, which it must be called in."""
        weights = self._weights
        x_TE = self._vocabulary.embed(weights.embedding, batch.token_ids_T)
        cos_TD, sin_TD = rotation(batch.positions_T, weights.frequencies_F)
        rope = (cos_TD.to(x_TE.dtype), sin_TD.to(x_TE.dtype))
        for number, layer in enumerate(weights.layers):
            pool_NPHSD = store.layer(number)
            q_THD = self._write(layer, layer.attention_norm(x_TE), rope, batch, pool_NPHSD)
            on_layer(number)
            last = number == len(weights.layers) - 1
            if last and not len(batch.logit_rows_R):
                return self._vocabulary.no_logits(x_TE.device)
            a_TE = self._attend(q_THD, batch, pool_NPHSD).flatten(1)
            if last:  # nothing reads the other rows any more
                x_TE, a_TE = x_TE[batch.logit_rows_R], a_TE[batch.logit_rows_R]
            x_TE = self._add(x_TE, layer.o(a_TE), layer.o_bias_E)
            x_TE = self._add(x_TE, self._mlp(layer, x_TE), layer.down_bias_E)
        return self._vocabulary.gather(weights.lm_head(weights.final_norm(x_TE)).float())

    def _write(
        self,
        layer: LayerWeights,
        h_TE: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        pool_NPHSD: Tensor,
    ) -> Tensor:
        """Put the new tokens' keys and values into the store; return their queries."""
        num_query, num_kv, width = self._num_query_heads, self._num_kv_heads, self.config.head_dim
        qkv_THD = layer.qkv(h_TE).view(len(h_TE), num_query + 2 * num_kv, width)
        qk_THD, v_THD = qkv_THD[:, : num_query + num_kv], qkv_THD[:, num_query + num_kv :]
        if layer.qk_norm is not None:
            qk_THD = layer.qk_norm(qk_THD)
        q_THD, k_THD = qk_THD[:, :num_query], qk_THD[:, num_query:]
        return rotate_write(q_THD, k_THD, v_THD, *rope, pool_NPHSD, batch.slots_T)

    def _attend(self, q_THD: Tensor, batch: Batch, pool_NPHSD: Tensor) -> Tensor:
        return paged_attention(
            q_THD,
            pool_NPHSD,
            batch.query_starts_S1,
            batch.context_lens_S,
            batch.block_tables_SB,
            self._scale,
        )

    def _mlp(self, layer: LayerWeights, x_TE: Tensor) -> Tensor:
        h_TE = layer.mlp_norm(x_TE)
        return layer.down(silu_multiply(layer.gate_up(h_TE)))

    def _add(self, x_TE: Tensor, h_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        """A row-parallel product summed into the residual stream, in place; its bias only once."""
        x_TE += self._comm.all_reduce(h_TE)
        if bias_E is not None:
            x_TE += bias_E
        return x_TE
