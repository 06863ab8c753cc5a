"""What it brings to keep the first layer's projections of known tokens, and what it takes.

`make bench-known_tokens`. SmolLM2 with none and with all of its vocabulary known, in turn: decode
steps and prompts of one thread. What is left out is a product of 553,000 weights of 134,500,000,
0.4 %: more than that is the machine's noise. Gains are of pairs: the median, and the middle half.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from kvferry.bench_report import Row, publish, row
from model.batch import Batch
from model.comm import SingleComm
from model.host_decoder import CpuDecoder
from model.source import ModelSource, open_model

OUT = Path("bench/out/known_tokens.json")
SHAPES = ((1, 1), (8, 1), (1, 128))  # sequences, new tokens of each
CONTEXT = 256
BLOCK_SIZE = 16
ROUNDS = 20  # of two pairs each
PEER = "nothing known"


def load(source: ModelSource, num_known: int) -> tuple[CpuDecoder, KvStore]:
    config = source.config
    head_map = HeadMap.even(config.num_query_heads, config.num_kv_heads, 1)
    model = source.load(head_map, 0, SingleComm(), block_size=BLOCK_SIZE, num_known=num_known)
    assert isinstance(model, CpuDecoder), "only the compiled decoder knows tokens"
    store = KvStore(model.spec, head_map.kv[0], 8 * CONTEXT // BLOCK_SIZE)
    for layer in range(store.num_layers):
        store.layer(layer).zero_()
    return model, store


def batch_of(num_sequences: int, num_new: int, vocab_size: int) -> Batch:
    """The last tokens of contexts of CONTEXT."""
    blocks = CONTEXT // BLOCK_SIZE
    tables_SB = torch.arange(num_sequences * blocks).view(num_sequences, blocks)
    new = torch.arange(CONTEXT - num_new, CONTEXT)
    starts = torch.arange(num_sequences + 1) * num_new
    return Batch(
        token_ids_T=torch.arange(num_sequences * num_new) * 7919 % vocab_size,
        positions_T=new.repeat(num_sequences),
        slots_T=(tables_SB[:, new // BLOCK_SIZE] * BLOCK_SIZE + new % BLOCK_SIZE).flatten(),
        query_starts_S1=starts,
        context_lens_S=torch.full((num_sequences,), CONTEXT),
        block_tables_SB=tables_SB,
        logit_rows_R=starts[1:] - 1,
    )


def tokens_s(model: CpuDecoder, store: KvStore, batch: Batch) -> float:
    began = time.perf_counter()
    model.forward(batch, store, lambda layer: None)
    return batch.num_tokens / (time.perf_counter() - began)


def measure(model: str, rounds: int) -> list[Row]:
    source = open_model(model)
    known, unknown = load(source, source.vocab_size), load(source, 0)
    first_ms = [
        1000 / tokens_s(*each, batch_of(1, 1, source.vocab_size)) for each in (known, unknown)
    ]
    rows = [
        row("kept of the first layer", [known[0].known_bytes / 2**20], unit="MiB"),
        row("the first step", [first_ms[0]], peer=PEER, peer_values=[first_ms[1]], unit="ms"),
    ]
    for num_sequences, num_new in SHAPES:
        batch = batch_of(num_sequences, num_new, source.vocab_size)
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(2 * rounds):
            pair = (known, ours), (unknown, theirs)
            for side, rates in pair if number % 2 else pair[::-1]:
                rates.append(tokens_s(*side, batch))
        what = f"{num_sequences} x {num_new} new tokens after {CONTEXT - num_new}"
        rows.append(row(what, ours, peer=PEER, peer_values=theirs, unit="tokens/s"))
        gains = [mine / other - 1 for mine, other in zip(ours, theirs, strict=True)]
        quarters = statistics.quantiles(gains, n=4)
        print(f"{what}: {quarters[1]:+.1%} ({quarters[0]:+.1%} to {quarters[2]:+.1%})", flush=True)
    return rows


def main(model: str = "smollm2", rounds: str = str(ROUNDS)) -> None:
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows = measure(model, int(rounds))
    publish(OUT, rows, Console(), load)


if __name__ == "__main__":
    main(*sys.argv[1:])
