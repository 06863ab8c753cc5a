"""A step on a device that lags behind the thread that asks for it."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.runner import Runner
from engine.step_plan import SlicePlan, StepPlan
from kvcache.device_cells import DeviceCells
from kvcache.head_map import HeadInterval
from kvcache.kv_store import KvStore
from kvcache.spec import CacheSpec
from model.batch import Batch
from model.model import OnLayer
from tests.kvcache.late_device import LateDevice

NUM_LAYERS = 3
SPEC = CacheSpec.full(NUM_LAYERS, 1, 4, 8, "float32")


class Asked:
    """A model whose work waits on the device's stream long after `forward` is back."""

    spec = SPEC

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def forward(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> Tensor | None:
        for layer in range(NUM_LAYERS):
            self._device.steps.run(partial(store.layer(layer).fill_, layer + 1.0))
            on_layer(layer)
        return torch.empty(0, 1)


class Sender:
    """Gathers each layer when it hears that it is done, as a shipment's threads do."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self.sent: list[float] = []

    def begin(self, plan: StepPlan) -> None:
        pass

    def layer_done(self, layer: int, plan: StepPlan) -> None:
        (value,) = np.unique(self._store.gather_cells(layer, [0], [0]).view(np.float32))
        self.sent.append(float(value))

    def end(self, plan: StepPlan) -> None:
        self._store.scatter_cells(0, [5], [0], bytes(SPEC.bytes_per_block(1) // NUM_LAYERS))


def test_a_layer_is_sent_as_the_step_leaves_it_and_arrivals_come_after_the_step() -> None:
    device = LateDevice()
    store = KvStore(SPEC, HeadInterval(0, 1), 6, on_device=DeviceCells(device))
    sender = Sender(store)
    part = SlicePlan(1, start=0, token_ids=(3,), block_table=(0,), wants_logits=False)
    Runner(Asked(device), store, sender).run(StepPlan(1, slices=(part,)))
    device.finish()
    assert sender.sent == [1.0, 2.0, 3.0]
    assert (store.layer(0)[5] == 0.0).all() and (store.layer(0)[0] == 1.0).all()


class Writes:
    """A model that leaves the number of its steps in every slot it is to write."""

    spec = SPEC

    def __init__(self) -> None:
        self._num_steps = 0

    def forward(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> Tensor | None:
        self._num_steps += 1
        for layer in range(NUM_LAYERS):
            for slot in batch.slots_T.tolist():
                store.layer(layer)[slot // 8, :, :, slot % 8] = self._num_steps + layer
            on_layer(layer)
        return torch.empty(0, 1)


class Notes:
    """Has the store digest these blocks when a layer is done."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self.blocks: list[int] = []

    def begin(self, plan: StepPlan) -> None:
        pass

    def layer_done(self, layer: int, plan: StepPlan) -> None:
        if self.blocks:
            self._store.note_cells(layer, self.blocks)

    def end(self, plan: StepPlan) -> None:
        pass


def test_a_block_is_known_from_the_layer_that_fills_it_until_a_step_writes_it_again() -> None:
    store = KvStore(SPEC, HeadInterval(0, 1), 6)
    notes = Notes(store)
    runner = Runner(Writes(), store, notes)

    def step(start: int, count: int) -> None:
        part = SlicePlan(1, start, (3,) * count, block_table=(4, 2), wants_logits=False)
        runner.run(StepPlan(1, slices=(part,)))

    step(0, 5)
    assert store.kept.unknown([4, 2]) == [4, 2]
    notes.blocks = [4]
    step(5, 6)
    assert store.kept.unknown([4, 2]) == [2]
    assert store.recheck([4]) == []
    notes.blocks = []
    step(11, 2)
    assert store.kept.unknown([4, 2]) == [2], "a step that fills another block leaves this one"
    with_rot = store.layer(1)[4, 0, 0, 3]
    with_rot.neg_()
    assert store.recheck([4]) == [4]
    step(0, 1)
    assert store.kept.unknown([4]) == [4]
    assert store.recheck([4]) == [], "what a step has written is not held against it"
