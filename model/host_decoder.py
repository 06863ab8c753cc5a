"""The decoder on a CPU: a layer is one call into C, the steps in between are those of `Decoder`.

It takes over where weights, activations and cache are fp32 and every matrix has a form that the
kernel can multiply by; see `kernels.host_decoder`. What a step works in is kept for the next one.

T new tokens, S sequences, B blocks of the longest table, R rows whose logits are wanted, E hidden
size, V of the vocabulary, Q width of q, k and v together.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import host_decoder as kernel
from kernels.host_decoder import Matrix, Part, Step, Team
from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from model.batch import Batch
from model.comm import Comm
from model.config import DecoderConfig
from model.linear import Linear
from model.model import OnLayer, nobody
from model.panel_linear import HostLinear
from model.vocabulary_shard import VocabularyShard
from model.weights import DecoderWeights, LayerWeights

OPEN = Part.PROJECT | Part.WRITE
LAYER = Part.ATTEND | Part.FEED | OPEN  # and the beginning of the next
LAST = Part.ATTEND | Part.FEED | Part.FINISH
PROJECTED = 256  # tokens at a time
NO_BYTES = torch.empty(0, dtype=torch.uint8)


class CpuDecoder:
    """One rank's share; see `model.decoder.Decoder`."""

    def __init__(
        self,
        config: DecoderConfig,
        head_map: HeadMap,
        comm: Comm,
        weights: DecoderWeights,
        spec: CacheSpec,
        team: Team,
        num_known: int = 0,
    ) -> None:
        """What the first layer's q, k and v are before rotation depends on the token alone: of the
        first `num_known` of the vocabulary they are computed in the first step, in which all ranks
        take part, and kept.
        """
        assert head_map.tp == comm.size
        self.config = config
        self.spec = spec
        self._comm = comm
        self._weights = weights  # the memory that the structures below point into
        self._team = team
        self._vocabulary = VocabularyShard(config.vocab_size, comm)
        self._decoder = _describe(config, head_map, comm, weights)
        self._buffers = _Buffers(self._decoder)
        self._pools: tuple[KvStore, Any] | None = None
        self._num_known = min(num_known, config.vocab_size)
        self._known_VQ: Tensor | None = None

    @property
    def known_bytes(self) -> int:
        """Of what is kept of the first layer."""
        return 0 if self._known_VQ is None else self._known_VQ.nbytes

    def compute_with(self, team: Team) -> None:
        """From the next step on, these threads do it."""
        self._team = team

    @torch.no_grad()
    def forward(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> Tensor | None:
        if self._num_known and self._known_VQ is None:
            self._known_VQ = self._project(self._num_known)
        step = self._step(batch, store)
        alone, last = self._comm.size == 1, self.config.num_layers - 1
        if not alone:
            x_TE = self._vocabulary.embed(self._weights.embedding, batch.token_ids_T)
            self._buffers.x_TE[: len(x_TE)] = x_TE
        self._run(step, 0, Part.BEGIN | (Part.WRITE if self._take_known(batch) else OPEN))
        on_layer(0)
        unheard = last if alone and on_layer is nobody else 0  # layers that one call goes through
        if unheard:
            self._run(step, 0, LAYER, unheard)
        for layer in range(unheard, last):
            if alone:
                self._run(step, layer, LAYER)
            else:
                self._layer_with_others(step, layer)
                self._run(step, layer + 1, OPEN)
            on_layer(layer + 1)
        if not step.num_wanted:
            return self._vocabulary.no_logits(torch.device("cpu"))
        kept = self._want(step, batch)
        logits_RV = torch.empty(step.num_wanted, self._vocabulary.width)
        step.logits = logits_RV.data_ptr()
        if alone:
            self._run(step, last, LAST)
        else:
            self._layer_with_others(step, last)
            self._run(step, last, Part.FINISH)
        del kept  # until here the structures pointed into it
        return self._vocabulary.gather(logits_RV)

    def _project(self, num_known: int) -> Tensor:
        buffers = self._buffers
        known_VQ = torch.empty(num_known, buffers.qkv_TQ.shape[1])
        for first in range(0, num_known, PROJECTED):
            ids_T = torch.arange(first, min(first + PROJECTED, num_known))
            buffers.make_room(len(ids_T), 0)
            step = Step(num_rows=len(ids_T), token_ids=ids_T.data_ptr(), positions=ids_T.data_ptr())
            buffers.enter(step)
            buffers.make_scratch(self._team.scratch_bytes(self._decoder, step))
            step.scratch = buffers.scratch.data_ptr()
            if self._comm.size > 1:
                x_TE = self._vocabulary.embed(self._weights.embedding, ids_T)
                buffers.x_TE[: len(x_TE)] = x_TE
            self._run(step, 0, Part.BEGIN | Part.PROJECT)
            known_VQ[ids_T] = buffers.qkv_TQ[: len(ids_T)]
        return known_VQ

    def _take_known(self, batch: Batch) -> bool:
        """The first layer's q, k and v from what is kept, if all of the step's are."""
        ids_T, known_VQ = batch.token_ids_T, self._known_VQ
        if known_VQ is None or int(ids_T.max()) >= len(known_VQ):
            return False
        torch.index_select(known_VQ, 0, ids_T, out=self._buffers.qkv_TQ[: len(ids_T)])
        return True

    def _run(self, step: Step, layer: int, parts: Part, times: int = 1) -> None:
        self._team.run(self._decoder, step, layer, parts, times)

    def _layer_with_others(self, step: Step, layer: int) -> None:
        for part in (Part.ATTEND, Part.FEED):
            self._run(step, layer, part)
            self._comm.all_reduce(self._buffers.sum_TE[: step.num_rows])

    def _step(self, batch: Batch, store: KvStore) -> Step:
        num_rows, num_wanted = batch.num_tokens, len(batch.logit_rows_R)
        self._buffers.make_room(num_rows, num_wanted)
        step = Step(
            num_rows=num_rows,
            num_sequences=batch.num_sequences,
            token_ids=batch.token_ids_T.data_ptr(),
            positions=batch.positions_T.data_ptr(),
            slots=batch.slots_T.data_ptr(),
            num_wanted=num_wanted,
            wanted=batch.logit_rows_R.data_ptr(),
            pools=self._pools_of(store),
        )
        self._buffers.enter(step)
        about = step.about
        about.read_from(store.layer(0))
        self._num_queries_S = batch.query_starts_S1.diff()
        about.num_sequences = batch.num_sequences
        about.first_query = about.first_out = batch.query_starts_S1.data_ptr()
        about.num_queries = self._num_queries_S.data_ptr()
        about.contexts = batch.context_lens_S.data_ptr()
        about.tables = batch.block_tables_SB.data_ptr()
        about.table_stride = batch.block_tables_SB.stride(0)
        self._buffers.make_scratch(self._team.scratch_bytes(self._decoder, step))
        step.scratch = self._buffers.scratch.data_ptr()
        return step

    def _want(self, step: Step, batch: Batch) -> Sequence[Tensor]:
        """In the last layer only wanted rows attend, where each is the last of its sequence."""
        rows_R = batch.logit_rows_R
        sequences_R = torch.searchsorted(batch.query_starts_S1, rows_R, right=True) - 1
        if not torch.equal(batch.query_starts_S1[sequences_R + 1] - 1, rows_R):
            return ()
        ones_R, places_R = torch.ones_like(rows_R), torch.arange(len(rows_R))
        contexts_R = batch.context_lens_S[sequences_R]
        tables_RB = batch.block_tables_SB[sequences_R]
        about = step.about
        step.only_last = 1
        about.num_sequences = len(rows_R)
        about.first_query = rows_R.data_ptr()
        about.num_queries = ones_R.data_ptr()
        about.first_out = places_R.data_ptr()
        about.contexts = contexts_R.data_ptr()
        about.tables = tables_RB.data_ptr()
        about.table_stride = tables_RB.stride(0)
        self._buffers.make_scratch(self._team.scratch_bytes(self._decoder, step))
        step.scratch = self._buffers.scratch.data_ptr()
        return (ones_R, places_R, contexts_R, tables_RB)

    def _pools_of(self, store: KvStore) -> Any:
        if self._pools is None or self._pools[0] is not store:
            layers = [store.layer(layer) for layer in range(store.num_layers)]
            assert all(pool.stride() == layers[0].stride() for pool in layers)
            addresses = (ctypes.c_void_p * len(layers))(*(pool.data_ptr() for pool in layers))
            self._pools = (store, addresses)
        return ctypes.addressof(self._pools[1])


class _Buffers:
    """What steps work in, as large as the largest so far wanted."""

    def __init__(self, decoder: kernel.Decoder) -> None:
        self._decoder = decoder
        self._layer = decoder.layers[0]
        self.scratch = NO_BYTES
        self._make(1, 1)

    def make_room(self, num_rows: int, num_wanted: int) -> None:
        if num_rows > len(self.x_TE) or num_wanted > len(self._kept):
            self._make(max(num_rows, len(self.x_TE)), max(num_wanted, len(self._kept)))

    def make_scratch(self, num_bytes: int) -> None:
        if num_bytes > len(self.scratch):
            self.scratch = torch.empty(num_bytes, dtype=torch.uint8)

    def enter(self, step: Step) -> None:
        step.x, step.sum, step.h = (t.data_ptr() for t in (self.x_TE, self.sum_TE, self._h))
        step.qkv, step.attended = self.qkv_TQ.data_ptr(), self._attended.data_ptr()
        step.inner, step.angles = self._inner.data_ptr(), self._angles.data_ptr()
        step.kept = self._kept.data_ptr()

    def _make(self, rows: int, wanted: int) -> None:
        decoder = self._decoder
        heads = decoder.num_query_heads * decoder.head_dim
        inner = decoder.middle * (1 if self._layer.gate_up.contents.paired else 3)
        self.x_TE, self.sum_TE, self._h = (torch.empty(rows, decoder.width) for _ in range(3))
        self.qkv_TQ = torch.empty(rows, self._layer.qkv.contents.out_width)
        self._attended = torch.empty(rows, heads)
        self._inner = torch.empty(rows, inner)
        self._angles = torch.empty(rows, decoder.head_dim)
        self._kept = torch.empty(wanted, decoder.width + heads)


def fits(config: DecoderConfig, weights: DecoderWeights) -> bool:
    """Whether the kernel can compute with these weights."""
    linears = [weights.embedding, weights.lm_head]
    for layer in weights.layers:
        linears += [layer.qkv, layer.o, layer.gate_up, layer.down]
    in_c = all(isinstance(linear, HostLinear) for linear in linears)
    return in_c and config.head_dim <= kernel.MAX_HEAD_DIM and config.head_dim % 2 == 0


def _describe(
    config: DecoderConfig, head_map: HeadMap, comm: Comm, weights: DecoderWeights
) -> kernel.Decoder:
    windows = config.windows or (0,) * len(weights.layers)
    described = map(_describe_layer, weights.layers, windows)
    layers = (kernel.Layer * len(weights.layers))(*described)
    embedding = _matrix(weights.embedding) if comm.size == 1 else None
    return kernel.Decoder(
        width=config.hidden_size,
        middle=weights.layers[0].down.in_width,
        head_dim=config.head_dim,
        num_query_heads=len(head_map.query[comm.rank]),
        num_kv_heads=len(head_map.kv[comm.rank]),
        num_layers=len(weights.layers),
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        frequencies=weights.frequencies_F.data_ptr(),
        layers=layers,
        embedding=None if embedding is None else ctypes.pointer(embedding),
        lm_head=ctypes.pointer(_matrix(weights.lm_head)),
        final_norm=weights.final_norm.weight.data_ptr(),
    )


def _describe_layer(layer: LayerWeights, window: int) -> kernel.Layer:
    return kernel.Layer(
        attention_norm=layer.attention_norm.weight.data_ptr(),
        mlp_norm=layer.mlp_norm.weight.data_ptr(),
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.weight.data_ptr(),
        o_bias=_address(layer.o_bias_E),
        down_bias=_address(layer.down_bias_E),
        qkv=ctypes.pointer(_matrix(layer.qkv)),
        o=ctypes.pointer(_matrix(layer.o)),
        gate_up=ctypes.pointer(_matrix(layer.gate_up)),
        down=ctypes.pointer(_matrix(layer.down)),
        window=window,
    )


def _matrix(linear: Linear) -> Matrix:
    assert isinstance(linear, HostLinear)
    return linear.matrix


def _address(bias: Tensor | None) -> int | None:
    return None if bias is None else bias.data_ptr()
