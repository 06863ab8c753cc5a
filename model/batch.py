"""One step's work as integer tensors: all that a forward pass may know of the requests.

T rows (new tokens), S sequences, B blocks of the longest table, R rows whose logits are wanted.
Rows of one sequence stand together, in order of position; the sequences stand in table order.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The new tokens of one step, and where their keys and values go.

    token_ids_T      the new tokens
    positions_T      their positions, each sequence's from 0
    slots_T          where their KV is written: block id * block size + offset
    query_starts_S1  first row of each sequence, then T
    context_lens_S   tokens each sequence holds once this step's are in the store
    block_tables_SB  block ids in order of position, padded with 0
    logit_rows_R     numbers of the rows in T whose logits are wanted; may be empty
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    query_starts_S1: Tensor
    context_lens_S: Tensor
    block_tables_SB: Tensor
    logit_rows_R: Tensor

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.context_lens_S.shape[0]
