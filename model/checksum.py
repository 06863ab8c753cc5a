"""A model without floats whose next token is a digest of its whole KV cache.

Any stale, swapped, foreign, missing or half-written cell changes the logits, so transport, tensor
parallelism and faults are tested in seconds with exact equality. `checksum_reference` says what is
computed; here the same comes out of the paged store, rank by rank.

T new tokens, S sequences (and slots of a block), R rows whose logits are wanted, N blocks of their
contexts together, C blocks of the longest context, L layers, P planes, H KV heads of this rank, G
of all ranks, D columns of a plane, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.write_kv import write_kv
from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from model.batch import Batch
from model.checksum_reference import (
    LOSER_STEP,
    WINNER,
    Keys,
    Words,
    checksum_continuation,
    checksum_logits,
    checksum_next_token,
)
from model.comm import Comm
from model.config import ChecksumConfig
from model.model import OnLayer

__all__ = [
    "ChecksumConfig",
    "ChecksumModel",
    "ReplicasDisagree",
    "checksum_continuation",
    "checksum_logits",
    "checksum_next_token",
    "checksum_spec",
]


class ReplicasDisagree(Exception):
    """Two ranks that hold the same KV head hold different bytes."""


def checksum_spec(config: ChecksumConfig, block_size: int) -> CacheSpec:
    return CacheSpec.full(
        config.num_layers, config.num_kv_heads, config.head_dim, block_size, "int64"
    )


class ChecksumModel:
    """One rank's heads of the checksum model."""

    def __init__(
        self,
        config: ChecksumConfig,
        head_map: HeadMap,
        comm: Comm,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        assert (head_map.num_query_heads, head_map.num_kv_heads) == (
            config.num_query_heads,
            config.num_kv_heads,
        )
        self.spec = checksum_spec(config, block_size)
        self.config = config
        self._comm = comm
        self._head_map = head_map
        keys = Keys.of(config)
        heads = head_map.kv[comm.rank]
        self._salt = _tensor(keys.salt, device)
        self._keys_LPHD = _tensor(keys.values_LPHD[:, :, heads.start : heads.stop], device)
        self._keys_LG = _tensor(keys.digests_LH, device)
        self._weights_CPSD = _tensor(_by_block(keys.positions_CPD, block_size), device)
        self._keys_V = _tensor(keys.vocabulary_V, device)

    @torch.no_grad()
    def forward(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> Tensor | None:
        assert store.layer(0).shape[3] == self.spec.block_size
        sequences = _Sequences(batch, self.spec.block_size)
        words_T = _mix(_mix(self._salt + batch.token_ids_T) + batch.positions_T)
        local_T = words_T.cumsum(0)
        starts_S = batch.query_starts_S1[:-1]
        local_T -= (local_T - words_T)[starts_S][sequences.of_row_T]
        contexts = _Contexts(batch, sequences, self._weights_CPSD)
        digests_LRH = []
        for layer in range(self.config.num_layers):
            pool_NPHSD = store.layer(layer)
            chain_TH = local_T[:, None] + self._chain_before(pool_NPHSD, layer, sequences)
            key_PHD = self._keys_LPHD[layer]
            raw_TPHD = chain_TH[:, None, :, None] ^ key_PHD
            kv_TPHD = _mix(raw_TPHD)
            kv_TPHD[:, 0, :, 0] = raw_TPHD[:, 0, :, 0]
            write_kv(pool_NPHSD, kv_TPHD[:, 0], kv_TPHD[:, 1], batch.slots_T)
            on_layer(layer)
            digests_LRH.append(contexts.digests(pool_NPHSD))
        if not contexts.num_rows:
            empty = torch.empty(0, self.config.vocab_size, device=batch.token_ids_T.device)
            return empty if self._comm.rank == 0 else None
        return self._logits(torch.stack(digests_LRH, dim=1))

    def _chain_before(self, pool_NPHSD: Tensor, layer: int, sequences: "_Sequences") -> Tensor:
        """The chain at the token before each row's sequence's first new one, as its cell has it."""
        block_S, offset_S = sequences.last_old_S
        chain_SH = pool_NPHSD[block_S, 0, :, offset_S, 0] ^ self._keys_LPHD[layer, 0, :, 0]
        chain_SH[sequences.is_new_S] = 0
        return chain_SH[sequences.of_row_T]

    def _logits(self, digests_RLH: Tensor) -> Tensor | None:
        layers = self.config.num_layers
        widths = [layers * len(heads) for heads in self._head_map.kv]
        parts = self._comm.gather_to_0(digests_RLH.flatten(1), widths)
        if parts is None:
            return None
        digests_RLG = self._combine(
            [part.reshape(len(part), layers, part.shape[1] // layers) for part in parts]
        )
        digest_R1 = _mix(_mix(digests_RLG ^ self._keys_LG).sum((1, 2)))[:, None]
        losers_RV = _shift(_mix(self._keys_V ^ digest_R1), 40)
        logits_RV = losers_RV.to(torch.float32) * float(LOSER_STEP)
        return logits_RV.scatter_(1, _shift(digest_R1, 1) % self.config.vocab_size, WINNER)

    def _combine(self, parts_RLH: Sequence[Tensor]) -> Tensor:
        """Each KV head's digests, which all ranks that hold it must agree on."""
        owners: dict[int, tuple[int, Tensor]] = {}
        for rank, (heads, part_RLH) in enumerate(zip(self._head_map.kv, parts_RLH, strict=True)):
            for local, head in enumerate(heads):
                owner, digests_RL = owners.setdefault(head, (rank, part_RLH[:, :, local]))
                if owner != rank and not torch.equal(digests_RL, part_RLH[:, :, local]):
                    layer = int((digests_RL != part_RLH[:, :, local]).any(0).nonzero()[0])
                    raise ReplicasDisagree(
                        f"ranks {owner} and {rank} hold different bytes of KV head {head}, "
                        f"layer {layer}"
                    )
        return torch.stack([owners[head][1] for head in sorted(owners)], dim=-1)


class _Sequences:
    """Where each sequence of a batch begins, in rows and in the cache."""

    def __init__(self, batch: Batch, block_size: int) -> None:
        lengths_S = batch.query_starts_S1.diff()
        self.block_size = block_size
        self.of_row_T = torch.repeat_interleave(lengths_S, output_size=batch.num_tokens)
        first_S = batch.positions_T[batch.query_starts_S1[:-1]]
        self.is_new_S = first_S == 0
        last_S = (first_S - 1).clamp_(min=0)
        rows_S = torch.arange(batch.num_sequences, device=last_S.device)
        self.last_old_S = (
            batch.block_tables_SB[rows_S, last_S // block_size],
            last_S % block_size,
        )


class _Contexts:
    """Every cached block that a wanted row sees, row after row, without padding."""

    def __init__(self, batch: Batch, sequences: _Sequences, weights_CPSD: Tensor) -> None:
        rows_R = batch.logit_rows_R
        size = sequences.block_size
        lengths_R = batch.positions_T[rows_R] + 1
        blocks_R = (lengths_R + size - 1) // size
        self.num_rows = rows_R.shape[0]
        self.row_N = torch.repeat_interleave(blocks_R)
        number_N = torch.arange(len(self.row_N), device=rows_R.device)
        number_N -= (blocks_R.cumsum(0) - blocks_R)[self.row_N]
        sequence_N = sequences.of_row_T[rows_R][self.row_N]
        self.block_N = batch.block_tables_SB[sequence_N, number_N]
        filled_N = lengths_R[self.row_N] - number_N * size
        unfilled_NS = torch.arange(size, device=rows_R.device) >= filled_N[:, None]
        self.weights_NPSD = weights_CPSD[number_N].masked_fill_(unfilled_NS[:, None, :, None], 0)

    def digests(self, pool_NPHSD: Tensor) -> Tensor:
        """digest_RH of one layer."""
        terms_NPHSD = pool_NPHSD.index_select(0, self.block_N)
        terms_NPHSD *= self.weights_NPSD[:, :, None]
        terms_NH = terms_NPHSD.sum((1, 3, 4))
        digests_RH = terms_NH.new_zeros(self.num_rows, terms_NH.shape[1])
        return digests_RH.index_add_(0, self.row_N, terms_NH)


def _by_block(words_CPD: Words, block_size: int) -> Words:
    """Cut the context C into blocks: words_CPSD, zero past its end."""
    padding = -len(words_CPD) % block_size
    padded = np.pad(words_CPD, ((0, padding), (0, 0), (0, 0)))
    return padded.reshape(-1, block_size, *words_CPD.shape[1:]).swapaxes(1, 2)


def _tensor(words: Words, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int64)).to(device)


def _shift(words: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's own shifts the sign in."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _mix(words: Tensor) -> Tensor:
    """`checksum_reference.mix`; int64 products wrap, so the bits are those of uint64."""
    words = (words ^ _shift(words, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    words = (words ^ _shift(words, 27)) * (0x94D049BB133111EB - (1 << 64))
    return words ^ _shift(words, 31)
