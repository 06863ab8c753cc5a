"""Runs a saved model through paged stores and saves the logits: chunks, then a batch that decodes;
the first one also with its decode steps recorded.

TRITON_INTERPRET=1 python tests/model/by_kernels.py OUT FOLDER...
"""

import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.launch import launches
from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from model.batch import Batch
from model.comm import Comm
from model.decode_graphs import Compute, DecodeGraphs, Recorder, Replay
from model.decoder import Decoder
from model.model import Model, OnLayer
from model.source import ModelSource, open_model
from tests.kernels.waits import WAITING
from tests.model.paged_run import PagedRun

TOKENS = random.Random(3).choices(range(101), k=16)


class NothingRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where a step would have to wait for the device: for a value, or for a shape made of
    values.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        assert func.overloadpacket not in WAITING, f"a step waits for {func}"
        return func(*args, **kwargs or {})


class Unread:
    """A model whose steps read nothing that a device computes."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.spec = model.spec

    def forward(self, batch: Batch, store: KvStore, on_layer: OnLayer) -> Tensor | None:
        with NothingRead():  # type: ignore[no-untyped-call]
            return self._model.forward(batch, store, on_layer)


def load(head_map: HeadMap, comm: Comm, source: ModelSource, recorder: Recorder | None) -> Model:
    model = source.load(head_map, comm.rank, comm, block_size=8)
    if recorder is None:
        if launches(torch.empty(0)) and isinstance(model, Decoder):
            return Unread(model)
        return model
    assert isinstance(model, Decoder)
    return DecodeGraphs(model, recorder)


class ComputedAgain:
    """Stands in for CUDA graphs: the same work over the same memory."""

    def warm(self, compute: Compute) -> None:
        compute()

    def record(self, compute: Compute) -> tuple[Tensor, Replay]:
        result = compute()

        def replay() -> None:
            with torch.inference_mode():
                result.copy_(compute())

        return result, replay


def logits_of_a_run(folder: str, recorder: Recorder | None = None, tp: int = 1) -> Tensor:
    source = open_model(folder)
    config = source.config
    head_map = HeadMap.even(config.num_query_heads, config.num_kv_heads, tp)
    run = PagedRun(partial(load, source=source, recorder=recorder), head_map)
    chunks = run.prefill("a", TOKENS, chunk=9)
    run.prefill("b", TOKENS[:5])
    run.prefill("c", TOKENS[:8])
    steps = [run.step({"a": [token], "b": [token + 1], "c": [5]}) for token in (3, 7)]
    return torch.cat([chunks, *steps, run.step({"b": [9]})])


def main(out: str, *folders: str) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    logits = {(folder, False): logits_of_a_run(folder) for folder in folders}
    logits[folders[0], True] = logits_of_a_run(folders[0], ComputedAgain())
    torch.save(logits, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
