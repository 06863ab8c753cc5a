"""Of the last layer, only rows whose logits are wanted go on past attention."""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import host_decoder
from kvcache.head_map import HeadMap
from model.comm import Comm
from model.decoder import Decoder
from model.host_decoder import CpuDecoder
from model.linear import Linear
from model.source import ModelSource, open_model
from tests.model.paged_run import PagedRun
from tests.model.tiny_checkpoints import save_tiny

TOKENS = random.Random(9).choices(range(101), k=30)
WANTED = [3, 29]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny("llama with every bias", folder)
    return open_model(str(folder))


@dataclass
class Counted:
    """A matrix that writes down how many rows it was multiplied with."""

    linear: Linear
    num_rows: list[int] = field(default_factory=list)

    def __call__(self, x_TI: Tensor) -> Tensor:
        self.num_rows.append(len(x_TI))
        return self.linear(x_TI)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.linear, name)


def run(source: ModelSource) -> PagedRun:
    config = source.config
    head_map = HeadMap.even(config.num_query_heads, config.num_kv_heads, 1)

    def load(heads: HeadMap, comm: Comm) -> Decoder | CpuDecoder:
        model = source.load(heads, comm.rank, comm, block_size=8)
        assert isinstance(model, Decoder | CpuDecoder)
        return model

    return PagedRun(partial(load), head_map)


def test_torch_multiplies_the_wanted_rows_alone(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_decoder, "load", lambda: None)
    whole = run(source).step({"a": TOKENS}, range(30))
    counting = run(source)
    (model,) = counting.models
    assert isinstance(model, Decoder)
    layers = [
        replace(
            layer,
            o=Counted(layer.o),
            gate_up=Counted(layer.gate_up),
            down=Counted(layer.down),
        )
        for layer in model._weights.layers
    ]
    model._weights = replace(model._weights, layers=tuple(layers))
    logits = counting.step({"a": TOKENS}, WANTED)
    for layer, num_rows in zip(layers, (30, 2), strict=True):
        assert [getattr(layer, name).num_rows for name in ("o", "gate_up", "down")] == (
            [[num_rows]] * 3
        )
    torch.testing.assert_close(logits, whole[WANTED], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("wanted", "attends"), [([29], 1), (WANTED, 0), ([0], 0)], ids=["last", "two", "first"]
)
def test_the_compiled_decoder_goes_on_with_the_wanted_rows_alone(
    source: ModelSource, wanted: list[int], attends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And attends with them alone where each is the last of its sequence, as decode does, which
    adds up in another order; else no bit changes.
    """
    whole = run(source).step({"a": TOKENS}, range(30))
    counting = run(source)
    (model,) = counting.models
    assert isinstance(model, CpuDecoder)
    made, steps = model._step, []

    def step(*arguments: Any) -> Any:
        steps.append(made(*arguments))
        assert steps[-1].num_rows == 30
        return steps[-1]

    monkeypatch.setattr(model, "_step", step)
    logits = counting.step({"a": TOKENS}, wanted)
    assert [(each.num_rows, each.only_last) for each in steps] == [(len(wanted), attends)]
    torch.testing.assert_close(logits, whole[wanted], atol=1e-5 if attends else 0, rtol=0)
