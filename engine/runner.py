"""A step plan, carried out on one rank: integers become tensors, the model runs over the pool.

Every rank of a worker runs the same plan; only rank 0 gets logits back.

T new tokens, S sequences, B blocks of the longest table, R rows whose logits are wanted.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.step_plan import StepPlan
from kernels.launch import device_of, sent
from kvcache.kv_store import KvStore
from model.batch import Batch
from model.model import Model, nobody

Ints = npt.NDArray[np.int64]


class SliceObserver(Protocol):
    """Sees each step of its rank, on the thread that runs it. Nothing may be slow in here."""

    def begin(self, plan: StepPlan) -> None: ...

    def layer_done(self, layer: int, plan: StepPlan) -> None:
        """This layer's KV of every slice of the plan is in the store."""
        ...

    def end(self, plan: StepPlan) -> None:
        """The step is over on this rank; not called when it failed."""
        ...


class Runner:
    """One rank's model and the store it writes to."""

    def __init__(self, model: Model, store: KvStore, observer: SliceObserver | None = None) -> None:
        self._model = model
        self._store = store
        self._observer = observer

    def run(self, plan: StepPlan) -> Tensor | None:
        """logits_RV on rank 0, one row for each slice that wants it, in order; else None."""
        with device_of(self._store.layer(0)):
            return self._run(plan)

    def _run(self, plan: StepPlan) -> Tensor | None:
        observer = self._observer
        if observer is not None:
            observer.begin(plan)
        self._store.kept.forget(_written(plan, self._store.spec.block_size))
        for copies in _independent(plan.copies):
            self._store.copy_blocks(copies)
        batch = make_batch(plan, self._store.spec.block_size, self._store.layer(0).device)

        def on_layer(layer: int) -> None:
            self._store.layer_written(layer)
            if observer is not None:
                observer.layer_done(layer, plan)

        try:
            heard = observer is not None or self._store.follows_layers
            logits_RV = self._model.forward(batch, self._store, on_layer if heard else nobody)
        finally:  # whatever part of it was asked for
            self._store.step_ended()
        if observer is not None:
            observer.end(plan)
        return logits_RV


def make_batch(plan: StepPlan, block_size: int, device: torch.device | str) -> Batch:
    """The plan's slices, each one sequence of the batch."""
    tokens: list[int] = []
    positions: list[Ints] = []
    slots: list[Ints] = []
    starts, rows = [0], []
    width = max(len(part.block_table) for part in plan.slices)
    tables_SB = np.zeros((len(plan.slices), width), np.int64)
    for number, part in enumerate(plan.slices):
        table = tables_SB[number, : len(part.block_table)]
        table[:] = part.block_table
        span = np.arange(part.start, part.stop, dtype=np.int64)
        tokens += part.token_ids
        positions.append(span)
        slots.append(table[span // block_size] * block_size + span % block_size)
        starts.append(len(tokens))
        if part.wants_logits:
            rows.append(len(tokens) - 1)

    parts = [
        np.asarray(tokens, dtype=np.int64),
        np.concatenate(positions),
        np.concatenate(slots),
        np.asarray(starts, dtype=np.int64),
        np.asarray([part.stop for part in plan.slices], dtype=np.int64),
        tables_SB.ravel(),
        np.asarray(rows, dtype=np.int64),
    ]
    flat = sent(torch.from_numpy(np.concatenate(parts)), device)  # one copy
    columns = list(torch.split(flat, [part.size for part in parts]))
    columns[5] = columns[5].view(tables_SB.shape)
    return Batch(*columns)


def _written(plan: StepPlan, block_size: int) -> list[int]:
    """The blocks that the plan's slices write to."""
    return [
        block_id
        for part in plan.slices
        for block_id in part.block_table[part.start // block_size : -(-part.stop // block_size)]
    ]


def _independent(copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut a sequence of copies where one touches what an earlier one wrote or read.

    In a crowded pool a block can be copied from, given back, and copied to, all in one plan.
    """
    groups: list[list[tuple[int, int]]] = []
    touched: set[int] = set()
    written: set[int] = set()
    for source, target in copies:
        if not groups or target in touched or source in written:
            groups.append([])
            touched, written = set(), set()
        groups[-1].append((source, target))
        touched |= {source, target}
        written.add(target)
    return groups
