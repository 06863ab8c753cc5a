"""Cells of a prompt, one by one and in runs.

A cell, here, is one head of one block of one layer, with all its planes: the least that is asked
for again.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from protos.transfer_pb2 import CellRun, Chunk


class Cell(NamedTuple):
    layer: int
    block: int  # of the prompt
    head: int

    def __str__(self) -> str:
        return f"layer {self.layer}, block {self.block}, head {self.head}"


def cells_of(run: CellRun) -> Iterator[Cell]:
    """In the order in which they travel."""
    for block in range(run.first_block, run.first_block + run.num_blocks):
        for head in run.heads:
            yield Cell(run.layer, block, head)


def layers_of(chunk: Chunk) -> range:
    """That it says it has cells of, right or wrong."""
    return range(chunk.layer, chunk.layer + max(1, chunk.num_layers))


def runs_in(chunk: Chunk, heads: Sequence[int]) -> list[CellRun]:
    """What a chunk of these heads carries, layer by layer, in the order in which they travel."""
    return [run_in(chunk, heads, layer) for layer in layers_of(chunk)]


def run_in(chunk: Chunk, heads: Sequence[int], layer: int) -> CellRun:
    first, count = chunk.first_block, chunk.num_blocks
    return CellRun(layer=layer, first_block=first, num_blocks=count, heads=heads)


def runs_of(cells: Iterable[Cell]) -> list[CellRun]:
    """Each block's heads stand together, and blocks in a row with the same heads are one run."""
    rows: dict[tuple[int, int], list[int]] = {}
    for layer, block, head in sorted(cells):
        rows.setdefault((layer, block), []).append(head)
    runs: list[CellRun] = []
    for (layer, block), heads in rows.items():
        last = runs[-1] if runs else None
        if last is not None and _continues(last, layer, block, heads):
            last.num_blocks += 1
        else:
            runs.append(CellRun(layer=layer, first_block=block, num_blocks=1, heads=heads))
    return runs


def _continues(last: CellRun, layer: int, block: int, heads: Sequence[int]) -> bool:
    follows = last.layer == layer and last.first_block + last.num_blocks == block
    return follows and list(last.heads) == list(heads)
