"""What it costs to hold cached blocks against their digests.

`make bench-recheck`. The same cached prompt of SmolLM2 is asked for again and again, in turn by
engines that check no block of it, 1 in 64 (the default), and all; beside them the price of a block,
and of telling, at each step, which blocks are written. Then prompts that are computed: what it
takes to digest their blocks as each layer seals them.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from rich.console import Console

from engine.clock import MonotonicClock
from engine.engine import Engine, EngineConfig
from engine.request import Output, Request
from engine.sampling_params import SamplingParams
from kvcache.block_pool import BlockPool
from kvcache.kv_store import KvStore
from kvferry.bench_report import Row, publish, row
from model.comm import SingleComm
from model.source import ModelSource, open_model
from prefill_worker.sealing import Note, SealingObserver
from transport.orders import FirstToken
from worker.rank_parts import RankParts, build_rank
from worker.settings import WorkerSettings

OUT = Path("bench/out/recheck.json")
SHARES = {"none": 0.0, "1 in 64": 1 / 64, "all": 1.0}
NUM_TOKENS = 1024
NUM_BLOCKS = 80
RUNS = 41
SEALED_TOKENS = 512
SEALED_RUNS = 7


def prompt_of(vocab_size: int) -> list[int]:
    return [(7 * i * i + 3 * i) % vocab_size for i in range(NUM_TOKENS)]


def make_engine(source: ModelSource, parts: RankParts, share: float) -> Engine:
    """With a pool of its own, in which the prompt is cached and has its digests."""
    store = KvStore(parts.spec, parts.kv_heads, NUM_BLOCKS)
    config = EngineConfig(max_tokens_per_step=NUM_TOKENS, recheck_share=share)
    engine = Engine(
        config,
        parts.model,
        store,
        BlockPool(NUM_BLOCKS),
        SingleComm(),
        source.namespace("float32"),
        MonotonicClock(),
        random=Random(1),
    )
    ask(engine, prompt_of(source.vocab_size))
    store.recheck(range(NUM_BLOCKS))
    return engine


def ask(engine: Engine, prompt: Sequence[int], observer: SealingObserver | None = None) -> float:
    """Milliseconds to the first token."""
    heard: list[Output] = []
    number = engine.new_key()
    if observer is not None:
        observer.watch(number, len(prompt))
    request = Request(
        f"r{number}", number, prompt, SamplingParams(1, temperature=0.0), heard.append
    )
    began = time.perf_counter()
    engine.add(request)
    while engine.step():
        pass
    took = (time.perf_counter() - began) * 1e3
    assert heard, "the request was not answered"
    return took


def timed(work: Callable[[], object], per: int = 1) -> list[float]:
    """Microseconds each, of `per` things done at once."""
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e6 / per)
    return times


class Unheard:
    """Takes the place of a shipper."""

    def seal(self, *run: object) -> None:
        pass

    def finish(self, request_key: int, first_tokens: Sequence[FirstToken] = ()) -> None:
        pass


class Prefill:
    """Computes prompts that share nothing, and seals their blocks as a prefill worker does."""

    def __init__(self, source: ModelSource, parts: RankParts, note: Note) -> None:
        spec = parts.spec
        self._observer = SealingObserver(
            Unheard(), note, spec.num_layers, spec.block_size, finishes_prompts=True
        )
        self._vocab_size = source.vocab_size
        self._num_asked = 0
        self._engine = Engine(
            EngineConfig(max_tokens_per_step=SEALED_TOKENS, recheck_share=0.0),
            parts.model,
            parts.store,
            BlockPool(NUM_BLOCKS),
            SingleComm(),
            source.namespace("float32"),
            MonotonicClock(),
            observer=self._observer,
        )

    def ask(self) -> float:
        """Milliseconds to the first token."""
        self._num_asked += 1
        prompt = [self._num_asked, *prompt_of(self._vocab_size)[1:SEALED_TOKENS]]
        return ask(self._engine, prompt, self._observer)


def sealed(source: ModelSource, parts: RankParts) -> list[Row]:
    """A prompt whose blocks are digested as they are sealed, beside one whose are not."""
    times: list[float] = []

    def timed_note(layer: int, block_ids: Sequence[int]) -> None:
        began = time.perf_counter()
        parts.store.note_cells(layer, block_ids)
        times.append((time.perf_counter() - began) * 1e3)

    ends = [Prefill(source, parts, note) for note in (timed_note, lambda layer, block_ids: None)]
    took: list[list[float]] = [[], []]
    for run in range(SEALED_RUNS + 1):
        for end, mine in zip(ends, took, strict=True):
            ms = end.ask()
            if run:
                mine.append(ms)
    num_layers = parts.spec.num_layers
    each = [sum(times[i : i + num_layers]) for i in range(num_layers, len(times), num_layers)]
    what = f"{SEALED_TOKENS} tokens computed"
    shares = [100 * digest / whole for digest, whole in zip(each, took[0], strict=True)]
    return [
        row(f"{what}, digested as sealed", took[0], (), "not digested", took[1], "ms"),
        row(f"{what}: digesting all layers", each, unit="ms"),
        row(f"{what}: share of digesting", shares, unit="%"),
    ]


def measure() -> list[Row]:
    source = open_model("smollm2")
    settings = WorkerSettings(name="bench", num_blocks=NUM_BLOCKS)
    parts = build_rank(settings, source, SingleComm())
    engines = {name: make_engine(source, parts, share) for name, share in SHARES.items()}
    times: dict[str, list[float]] = {name: [] for name in SHARES}
    for _ in range(RUNS):
        for name, engine in engines.items():
            times[name].append(ask(engine, prompt_of(source.vocab_size)))
    store = parts.store
    store.recheck(range(NUM_BLOCKS))
    rows = [row("a block, checked", timed(lambda: store.recheck(range(64)), 64), unit="us")]
    rows.append(
        row("a step's note of 32 blocks", timed(lambda: store.kept.forget(range(32))), unit="us")
    )
    rows.append(row("digests of a block", [float(store.kept.bytes_per_block)], unit="bytes"))
    for name in SHARES:
        what = f"{NUM_TOKENS} cached tokens, {name} checked"
        rows.append(
            row(what, times[name], peer="none checked", peer_values=times["none"], unit="ms")
        )
    return rows + sealed(source, parts)


def main() -> None:
    load = os.getloadavg()[0]
    rows = measure()
    publish(OUT, rows, Console(width=110), load)


if __name__ == "__main__":
    main()
