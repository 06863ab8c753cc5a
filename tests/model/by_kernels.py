"""Runs a saved model through paged stores and saves the logits: chunks, then a batch that decodes.

TRITON_INTERPRET=1 python tests/model/by_kernels.py OUT FOLDER...
"""

import os
import random
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from kvcache.head_map import HeadMap
from model.comm import Comm
from model.model import Model
from model.source import ModelSource, open_model
from tests.model.paged_run import PagedRun

TOKENS = random.Random(3).choices(range(101), k=24)


def load(head_map: HeadMap, comm: Comm, source: ModelSource) -> Model:
    return source.load(head_map, comm.rank, comm, block_size=8)


def logits_of_a_run(folder: str) -> Tensor:
    source = open_model(folder)
    config = source.config
    head_map = HeadMap.even(config.num_query_heads, config.num_kv_heads, 1)
    run = PagedRun(partial(load, source=source), head_map)
    chunks = run.prefill("a", TOKENS, chunk=11)
    run.prefill("b", TOKENS[:5])
    steps = [run.step({"a": [token], "b": [token + 1]}) for token in (3, 7)]
    return torch.cat([chunks, *steps])


def main(out: str, *folders: str) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    torch.save({folder: logits_of_a_run(folder) for folder in folders}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
