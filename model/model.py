"""What the engine's runner asks of a model, be it the decoder or the checksum model."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from model.batch import Batch

OnLayer = Callable[[int], None]


def nobody(layer: int) -> None:
    """An `on_layer` where nobody asks: a model may go through several layers at once."""


class Model(Protocol):
    """One rank's share of a model; the ranks of a group call `forward` with the same batch."""

    @property
    def spec(self) -> CacheSpec:
        """The cache of the whole model, not of this rank's heads alone."""
        ...

    def forward(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> Tensor | None:
        """Write the new tokens' KV into `store`; return logits_RV (float32) on rank 0, else None.

        `on_layer(l)` is called on this thread once layer l's KV of this step is in the store,
        for every layer in order. With no row wanted, rank 0 returns a tensor of no rows.
        """
        ...
