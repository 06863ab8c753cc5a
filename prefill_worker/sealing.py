"""Tell the shipper, layer by layer, which blocks of a prompt will not change any more.

    begin(plan)          a prompt's first slice: the blocks that its prefix hit brought are sealed,
                         in every layer
    layer_done(l, plan)  each block that this slice filled is sealed in layer l, and at the prompt's
                         end the partial tail too, while the next layers still compute
    end(plan)            a prompt's last slice: ranks that do not sample have nothing more to say

Called on the engine's thread, so nothing here waits or copies. Only digests of full blocks are made
here, of cells that the layer has just written: they lie in a cache still, and whoever ships them
later, beside the next layers, need not read them for that.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.step_plan import SlicePlan, StepPlan
from transport.orders import FirstToken


class Seals(Protocol):
    """The part of `transport.shipper.Shipper` that the engine's thread may touch."""

    def seal(
        self,
        request_key: int,
        layer: int,
        first_block: int,
        block_ids: Sequence[int],
        tail_tokens: int | None,
    ) -> None: ...

    def finish(self, request_key: int, first_tokens: Sequence[FirstToken] = ()) -> None: ...


Note = Callable[[int, Sequence[int]], None]  # full blocks of a layer: `KvStore.note_cells`


class SealingObserver:
    """An `engine` slice observer. `watch` and `forget` may be called from any thread."""

    def __init__(
        self, seals: Seals, note: Note, num_layers: int, block_size: int, *, finishes_prompts: bool
    ) -> None:
        self._seals = seals
        self._note = note
        self._num_layers = num_layers
        self._block_size = block_size
        self._finishes_prompts = finishes_prompts  # rank 0 finishes with the tokens it sampled
        self._num_tokens: dict[int, int] = {}
        self._begun: set[int] = set()

    def watch(self, request_key: int, num_tokens: int) -> None:
        """Seal this request's prompt as it is computed. Call before the engine may run it."""
        self._num_tokens[request_key] = num_tokens

    def forget(self, request_key: int) -> None:
        self._num_tokens.pop(request_key, None)
        self._begun.discard(request_key)

    def begin(self, plan: StepPlan) -> None:
        for part in plan.slices:
            if part.request_key not in self._num_tokens or part.request_key in self._begun:
                continue
            self._begun.add(part.request_key)
            cached = part.block_table[: part.start // self._block_size]
            if cached:
                for layer in range(self._num_layers):
                    self._seals.seal(part.request_key, layer, 0, cached, None)

    def layer_done(self, layer: int, plan: StepPlan) -> None:
        for part in plan.slices:
            num_tokens = self._num_tokens.get(part.request_key)
            if num_tokens is not None:
                self._seal_slice(layer, part, num_tokens)

    def end(self, plan: StepPlan) -> None:
        for part in plan.slices:
            num_tokens = self._num_tokens.get(part.request_key)
            if num_tokens is None or part.start + len(part.token_ids) < num_tokens:
                continue
            self.forget(part.request_key)
            if self._finishes_prompts:
                self._seals.finish(part.request_key)

    def _seal_slice(self, layer: int, part: SlicePlan, num_tokens: int) -> None:
        stop_token = part.start + len(part.token_ids)
        first = part.start // self._block_size
        stop = stop_token // self._block_size
        tail = stop_token % self._block_size if stop_token == num_tokens else 0
        if tail:
            stop += 1
        if stop > first:
            blocks = part.block_table[first:stop]
            full = blocks[:-1] if tail else blocks
            if full:
                self._note(layer, full)
            self._seals.seal(part.request_key, layer, first, blocks, tail or None)
