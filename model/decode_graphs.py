"""Decode steps recorded once as CUDA graphs and replayed: one launch a step, not hundreds.

A graph is recorded the first time a step of its shape comes: rows padded to a power of two, block
tables to a power of two of blocks. Padding rows write nowhere (slot -1), see nothing (context 0),
and their logits are cut off. Steps with prompts in them, and batches larger than the largest
graph's, are computed as ever.

Ranks record together, their sums with the rest, and replay if every one of them could record. What
is gathered on rank 0 is not in the graph: it goes between two ranks, whose first meeting makes a
communicator, and only rank 0 has what it gives.

S sequences of one new token each, B blocks of the longest table, V vocabulary.
"""

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

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
Replay = Callable[[], object]


class Recorder(Protocol):
    """Takes computations over memory that stays."""

    def warm(self, compute: Compute) -> None:
        """Compile kernels, fill caches, let the ranks meet."""
        ...

    def record(self, compute: Compute) -> tuple[Tensor, Replay]:
        """The result's memory, and what renews it. Raises RuntimeError where it cannot."""
        ...


class CudaRecorder:
    """CUDA graphs, which take turns in one pool of memory: each result is copied before the next.

    Other threads may use the device meanwhile (transfers, NCCL's watchdog): only what this thread
    must not do while it records is an error.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def warm(self, compute: Compute) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(side)

    def record(self, compute: Compute) -> tuple[Tensor, Replay]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        self._pool = graph.pool()
        return result, graph.replay


class DecodeGraphs:
    """A `Decoder` whose decode steps are replayed."""

    def __init__(self, decoder: Decoder, recorder: Recorder | None = None) -> None:
        self.spec: CacheSpec = decoder.spec
        self._decoder = decoder
        self._recorder = recorder or CudaRecorder()
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
            graph = self._recorded(shape, store)
            if graph is None:
                self._broken = True
                return self._decoder.forward(batch, store, on_layer)
            self._graphs[shape] = graph
        own_SV = graph.run(batch)
        for layer in range(store.num_layers):
            on_layer(layer)
        return self._decoder.gather(own_SV, own_SV.device)

    def _recorded(self, shape: tuple[int, int], store: KvStore) -> "_Graph | None":
        """None where a rank cannot record. What fails before that fails as any step does."""
        device = store.layer(0).device
        inputs = _padding(*shape, device)

        def compute() -> Tensor:
            own_SV = self._decoder.compute(inputs, store, lambda layer: None)
            assert own_SV is not None
            return own_SV

        graph = None
        with torch.inference_mode():
            self._recorder.warm(compute)
            try:
                graph = _Graph(inputs, *self._recorder.record(compute))
            except RuntimeError:
                log.exception(
                    "CUDA graphs cannot be recorded: decode steps are launched one by one"
                )
            everywhere = self._decoder.agree(graph is not None, device)
        return graph if everywhere else None


class _Graph:
    """One shape: its inputs' memory, its logits', and what computes these from those."""

    def __init__(self, inputs: Batch, own_SV: Tensor, replay: Replay) -> None:
        self._inputs = inputs
        self._padding = [getattr(inputs, field.name).clone() for field in fields(Batch)]
        self._own_SV = own_SV
        self._replay = replay

    def run(self, batch: Batch) -> Tensor:
        """This rank's logits, in memory of their own."""
        for field, padding in zip(fields(Batch), self._padding, strict=True):
            into, values = getattr(self._inputs, field.name), getattr(batch, field.name)
            if field.name in ("query_starts_S1", "logit_rows_R"):
                continue  # of decode rows they always are 0, 1, 2, ...
            into.copy_(padding)
            into[tuple(slice(size) for size in values.shape)] = values
        self._replay()
        return self._own_SV[: batch.num_sequences].clone()


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
