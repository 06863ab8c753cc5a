"""The vocabulary, cut over the ranks of a model: tokens are looked up and logits gathered here.

T tokens, E hidden size, R rows whose logits are wanted, V vocabulary
"""

import torch
from torch import Tensor

from model.comm import Comm
from model.linear import Linear
from model.shard import split


class VocabularyShard:
    """One rank's share of it."""

    def __init__(self, vocab_size: int, comm: Comm) -> None:
        self._vocab_size = vocab_size
        self._comm = comm
        shares = split(vocab_size, comm.size)
        self._own = shares[comm.rank]
        self._widths = [len(share) for share in shares]

    @property
    def width(self) -> int:
        """Of this rank's logits."""
        return len(self._own)

    def embed(self, embedding: Linear, token_ids_T: Tensor) -> Tensor:
        """x_TE. Each rank looks up its own tokens, and zeros stand for the others' until they add
        up.
        """
        if self._comm.size == 1:
            return embedding.rows(token_ids_T)
        local_T = token_ids_T - self._own.start
        foreign_T = (local_T < 0) | (local_T >= len(self._own))
        x_TE = embedding.rows(local_T.masked_fill(foreign_T, 0))
        return self._comm.all_reduce(x_TE.masked_fill_(foreign_T[:, None], 0))

    def gather(self, logits_RV: Tensor) -> Tensor | None:
        """The logits of all ranks' shares side by side, on rank 0."""
        parts = self._comm.gather_to_0(logits_RV, self._widths)
        if parts is None:
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def no_logits(self, device: torch.device) -> Tensor | None:
        """What is given on rank 0 where no row was wanted."""
        empty = torch.empty(0, self._vocab_size, dtype=torch.float32, device=device)
        return empty if self._comm.rank == 0 else None
