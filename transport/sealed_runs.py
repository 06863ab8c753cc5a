"""What the engine seals, in runs of blocks, and the chunks that are cut of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transport.shipment import Shape


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a prompt in one layer, whose KV is complete.

    The engine's own blocks until it is cut, blocks of the wire from then on.
    """

    layer: int
    first_block: int
    block_ids: tuple[int, ...]
    tail_tokens: int | None = None  # that the last block holds, when it is not full

    def part(self, start: int, stop: int) -> "Run":
        """Its blocks from the `start`th up to the `stop`th, as far as there are so many."""
        block_ids = self.block_ids[start:stop]
        to_end = start + len(block_ids) == len(self.block_ids)
        tail_tokens = self.tail_tokens if to_end else None
        return Run(self.layer, self.first_block + start, block_ids, tail_tokens)

    def __str__(self) -> str:
        last = self.first_block + len(self.block_ids) - 1
        blocks = (
            f"block {last}" if last == self.first_block else f"blocks {self.first_block}-{last}"
        )
        return f"layer {self.layer}, {blocks}"


def cut(run: Run, shape: Shape) -> Run:
    """The same run, of our own blocks, in blocks of the wire."""
    parts = shape.parts
    if parts == 1:
        return run
    stop, tail = len(run.block_ids) * parts, None
    if run.tail_tokens is not None:
        stop -= parts - -(-run.tail_tokens // shape.block_size)
        tail = run.tail_tokens % shape.block_size or None
    ids = tuple(shape.part_ids(run.block_ids, 0, stop))
    return Run(run.layer, run.first_block * parts, ids, tail)


@dataclass(frozen=True, slots=True)
class Part:
    """One chunk to gather and send; with `heads`, cells that are sent again, and have no number."""

    seq: int
    run: Run
    heads: tuple[int, ...] = ()
    num_layers: int = 1  # in which the same blocks go, from that of `run` on

    @property
    def layers(self) -> range:
        return range(self.run.layer, self.run.layer + self.num_layers)

    @property
    def runs(self) -> list[Run]:
        """One of each layer."""
        return [replace(self.run, layer=layer) for layer in self.layers]

    @property
    def num_blocks(self) -> int:
        """Of all layers."""
        return self.num_layers * len(self.run.block_ids)

    def num_bytes(self, shape: Shape, heads: Sequence[int]) -> int:
        """Of its cells, which are of `heads`."""
        return self.num_blocks * shape.layers[self.run.layer].block_bytes(len(heads))
