"""What rank 0 tells the other ranks to do in one step, as one array of integers.

    run    compute these slices, after these block copies
    check  hold these blocks against their digests, and tell rank 0 which have changed
    idle   nothing: rank 0 is alive
    stop   nothing, ever again

The array: kind, step id, number of slices, of copies, and of blocks to check; the copies and the
blocks; then for each slice its request key, first position, whether its logits are wanted, number
of tokens, length of its block table, the tokens, the table.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_HEAD = 5
_SLICE_HEAD = 5


class Kind(IntEnum):
    RUN = 1
    IDLE = 2
    STOP = 3
    CHECK = 4


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The next tokens of one choice: `token_ids` stand at `start` and after."""

    request_key: int
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]  # covers at least the slice's end
    wants_logits: bool

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    slices: tuple[SlicePlan, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()  # (from block, to block), in order, before the slices
    kind: Kind = Kind.RUN
    checks: tuple[int, ...] = ()  # blocks

    def encode(self) -> Ints:
        counts = (len(self.slices), len(self.copies), len(self.checks))
        numbers = [self.kind, self.step_id, *counts]
        for copy in self.copies:
            numbers += copy
        numbers += self.checks
        for part in self.slices:
            numbers += (
                part.request_key,
                part.start,
                part.wants_logits,
                len(part.token_ids),
                len(part.block_table),
            )
            numbers += part.token_ids
            numbers += part.block_table
        return np.array(numbers, dtype=np.int64)

    @classmethod
    def decode(cls, ints: Ints) -> "StepPlan":
        """Read what `encode` wrote; raises ValueError if it is not whole."""
        numbers: list[int] = ints.tolist()
        if len(numbers) < _HEAD:
            raise ValueError(f"a step plan of {len(numbers)} numbers has no head")
        kind, step_id, num_slices, num_copies, num_checks = numbers[:_HEAD]
        at = _HEAD + 2 * num_copies
        copies = tuple(zip(numbers[_HEAD:at:2], numbers[_HEAD + 1 : at : 2], strict=True))
        checks = tuple(numbers[at : at + num_checks])
        at += num_checks
        slices: list[SlicePlan] = []
        for _ in range(num_slices):
            key, start, wants_logits, num_tokens, num_blocks = numbers[at : at + _SLICE_HEAD]
            at += _SLICE_HEAD
            tokens = tuple(numbers[at : at + num_tokens])
            at += num_tokens
            table = tuple(numbers[at : at + num_blocks])
            at += num_blocks
            slices.append(SlicePlan(key, start, tokens, table, bool(wants_logits)))
        if at != len(numbers):
            raise ValueError(f"step plan {step_id} is {len(numbers)} numbers long, not {at}")
        return cls(step_id, tuple(slices), copies, Kind(kind), checks)
