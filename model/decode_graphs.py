"""Decode steps recorded once as CUDA graphs and replayed: one launch a step, not hundreds.

A graph is recorded the first time a step of its shape comes: rows padded to a power of two, block
tables to a power of two of blocks. Padding rows write nowhere (slot -1), see nothing (context 0),
and their logits are cut off. Steps with prompts in them, and batches larger than the largest
graph's, are computed as ever.

S sequences of one new token each, B blocks of the longest table, V vocabulary.
"""

import logging
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from model.batch import Batch
from model.decoder import Decoder
from model.model import OnLayer

MAX_ROWS = 256
log = logging.getLogger(__name__)

Compute = Callable[[], Tensor]
Record = Callable[[Compute], tuple[Tensor, Callable[[], None]]]
"""Takes a computation over memory that stays; gives its result's memory, and what renews it."""


def record_on_device(compute: Compute) -> tuple[Tensor, Callable[[], None]]:
    """As a CUDA graph, after two runs on a side stream that compile kernels and fill caches."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            compute()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compute()
    return result, graph.replay


class DecodeGraphs:
    """A `Decoder` of one rank whose decode steps are replayed."""

    def __init__(self, decoder: Decoder, record: Record = record_on_device) -> None:
        assert decoder.num_ranks == 1, "the ranks' sums are not recorded"
        self.spec: CacheSpec = decoder.spec
        self._decoder = decoder
        self._record = record
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._broken = False

    def forward(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> Tensor | None:
        """As the decoder's own; `on_layer` is called for all layers once all are computed."""
        num_rows = batch.num_sequences
        decodes = num_rows == batch.num_tokens == len(batch.logit_rows_R)
        if self._broken or not decodes or not 0 < num_rows <= MAX_ROWS:
            return self._decoder.forward(batch, store, on_layer)
        shape = (_padded(num_rows), _padded(batch.block_tables_SB.shape[1]))
        graph = self._graphs.get(shape)
        if graph is None:
            try:
                graph = self._graphs[shape] = self._recorded(shape, store)
            except RuntimeError:
                self._broken = True
                log.exception(
                    "CUDA graphs cannot be recorded: decode steps are launched one by one"
                )
                return self._decoder.forward(batch, store, on_layer)
        logits_SV = graph.run(batch)
        for layer in range(store.num_layers):
            on_layer(layer)
        return logits_SV

    def _recorded(self, shape: tuple[int, int], store: KvStore) -> "_Graph":
        return _Graph(self._decoder, store, _padding(*shape, store.layer(0).device), self._record)


class _Graph:
    """One shape: its inputs' memory, its logits', and what computes these from those."""

    def __init__(self, decoder: Decoder, store: KvStore, inputs: Batch, record: Record) -> None:
        self._inputs = inputs
        self._padding = [getattr(inputs, field.name).clone() for field in fields(Batch)]

        def compute() -> Tensor:
            logits_SV = decoder.compute(inputs, store, lambda layer: None)
            assert logits_SV is not None
            return logits_SV

        with torch.inference_mode():
            self._logits_SV, self._replay = record(compute)

    def run(self, batch: Batch) -> Tensor:
        """logits_SV, in memory of their own."""
        for field, padding in zip(fields(Batch), self._padding, strict=True):
            into, values = getattr(self._inputs, field.name), getattr(batch, field.name)
            if field.name in ("query_starts_S1", "logit_rows_R"):
                continue  # of decode rows they always are 0, 1, 2, ...
            into.copy_(padding)
            into[tuple(slice(size) for size in values.shape)] = values
        self._replay()
        return self._logits_SV[: batch.num_sequences].clone()


def _padding(num_rows: int, num_blocks: int, device: torch.device) -> Batch:
    """A batch of padding only."""
    none_S = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return Batch(
        token_ids_T=none_S.clone(),
        positions_T=none_S.clone(),
        slots_T=none_S - 1,
        query_starts_S1=torch.arange(num_rows + 1, device=device),
        context_lens_S=none_S.clone(),
        block_tables_SB=none_S[:, None].repeat(1, num_blocks),
        logit_rows_R=torch.arange(num_rows, device=device),
    )


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()
