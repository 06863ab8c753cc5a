"""The first layer's projections of known tokens are looked up, and not one bit is another."""

import random
from functools import partial
from pathlib import Path

import pytest
import torch

from kvcache.head_map import HeadMap
from model.comm import Comm
from model.host_decoder import CpuDecoder
from model.panel_linear import PanelLinear
from model.source import ModelSource, open_model
from tests.model.paged_run import PagedRun
from tests.model.tiny_checkpoints import save_tiny

NUM_KNOWN = 60  # of 101
KNOWN = random.Random(1).choices(range(NUM_KNOWN), k=40)
MIXED = [*KNOWN[:9], 100, *KNOWN[9:20]]


def load(head_map: HeadMap, comm: Comm, source: ModelSource, num_known: int) -> CpuDecoder:
    model = source.load(head_map, comm.rank, comm, block_size=8, num_known=num_known)
    assert isinstance(model, CpuDecoder)
    return model


def run(source: ModelSource, tp: int, num_known: int) -> PagedRun:
    config = source.config
    head_map = HeadMap.even(config.num_query_heads, config.num_kv_heads, tp)
    return PagedRun(partial(load, source=source, num_known=num_known), head_map)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", ["llama with every bias", "qwen3"])
def test_no_bit_depends_on_what_is_known(case: str, tp: int, tmp_path: Path) -> None:
    save_tiny(case, tmp_path / "model")
    source = open_model(str(tmp_path / "model"))
    none, some, everything = (
        _logits(source, tp, num_known) for num_known in (0, NUM_KNOWN, 1_000_000)
    )
    assert torch.equal(some, none) and torch.equal(everything, none)


def _logits(source: ModelSource, tp: int, num_known: int) -> torch.Tensor:
    running = run(source, tp, num_known)
    chunks = running.prefill("a", KNOWN, chunk=17)
    mixed = running.prefill("b", MIXED)
    steps = [running.step({"a": [token], "b": [token + 1]}) for token in (3, 99)]
    return torch.cat([chunks, mixed, *steps])


def test_products_are_left_out_where_all_tokens_of_a_step_are_known(tmp_path: Path) -> None:
    save_tiny("llama MQA", tmp_path / "model")
    running = run(open_model(str(tmp_path / "model")), 1, NUM_KNOWN)
    (model,) = running.models
    assert isinstance(model, CpuDecoder)
    known, unknown = (running.step({name: tokens}) for name, tokens in (("a", KNOWN), ("b", MIXED)))
    width = (4 + 2 * 1) * 8  # of the heads of q, k and v
    assert model.known_bytes == NUM_KNOWN * width * 4
    qkv = model._weights.layers[0].qkv
    assert isinstance(qkv, PanelLinear)
    qkv._memory[0].zero_()
    assert torch.equal(running.step({"c": KNOWN}), known)
    assert not torch.equal(running.step({"d": MIXED}), unknown)
