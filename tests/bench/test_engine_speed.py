"""What the benchmark of engines asks of them, compares, and takes for the limit."""

import random

import pytest

from bench.engine_speed import (
    CONTEXT,
    KV_BYTES,
    WEIGHT_BYTES,
    Contexts,
    Measured,
    Speeds,
    chosen,
    roofline,
)
from bench.engines.child import Kvferry, answer


def test_our_engine_does_what_the_benchmark_asks_for() -> None:
    engine, source = Kvferry("checksum", 1, most=2), random.Random(1)
    assert answer(engine, {"do": "prefill", "tokens": 40}, source) > 0
    assert engine.size == 0
    answer(engine, {"do": "grow", "batch": 1, "context": 30}, source)
    answer(engine, {"do": "grow", "batch": 2, "context": 20}, source)
    assert engine.size == 2
    assert answer(engine, {"do": "decode", "steps": 3}, source) > 0
    assert answer(engine, {"do": "pool bytes"}, source) == engine.pool_bytes > 0
    answer(engine, {"do": "end"}, source)
    assert engine.size == 0


def test_a_form_of_weights_brings_the_peers_that_keep_them_alike() -> None:
    names = [str(who) for who in chosen(("kvferry", "vLLM", "llama.cpp"), ["int8"])]
    assert names == ["kvferry int8", "vLLM", "llama.cpp Q8_0"]


def test_sequences_of_a_smaller_batch_have_grown_when_it_becomes_larger() -> None:
    contexts = Contexts()
    contexts.grow(1)
    contexts.step(40)
    contexts.grow(2)
    assert contexts.mean() == CONTEXT + (42 + 2 + 2) / 2


@pytest.mark.parametrize("batch", [1, 8])
def test_a_decode_step_reads_the_weights_once_and_every_sequences_cache(batch: int) -> None:
    found = Measured(f"decode-{batch}", {}, [Speeds(read=1e10, multiply=1e15)], context=600)
    num_bytes = WEIGHT_BYTES["int8"] + batch * 600 * KV_BYTES
    assert roofline(found, "int8") == [pytest.approx(batch * 1e10 / num_bytes)]
