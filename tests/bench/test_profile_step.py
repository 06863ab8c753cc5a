"""What the profile of a step counts, and what it takes for the bounds of its parts."""

from pathlib import Path

import pytest

from bench.engine_speed import CONTEXT, HEAD, KV_BYTES, LAYERS, PER_LAYER, WEIGHT_BYTES, WIDTH
from bench.profile_step import AROUND, BETWEEN, Profiled, decode_work, prefill_work
from kernels.host_decoder import PARTS
from tests.model.tiny_checkpoints import save_tiny


@pytest.mark.parametrize("weights", ["dense", "int8"])
def test_the_parts_of_a_decode_step_read_what_the_whole_reads(weights: str) -> None:
    work = decode_work(4, CONTEXT, weights)
    whole = WEIGHT_BYTES[weights] + 4 * CONTEXT * KV_BYTES
    assert sum(part.num_bytes for part in work.values()) == pytest.approx(whole)
    flops = sum(part.flops for name, part in work.items() if name != "attention")
    exact = 2 * 4 * (LAYERS * PER_LAYER + HEAD)
    assert flops == (pytest.approx(exact) if weights == "dense" else 0)


def test_a_prompt_s_last_layer_attends_for_one_row_and_its_head_is_read_once() -> None:
    work = prefill_work(1024, "dense")
    assert work["o"].flops == 2 * WIDTH * WIDTH * ((LAYERS - 1) * 1024 + 1)
    assert work["o"].num_bytes == 2 * 4 * WIDTH * WIDTH * LAYERS  # in two steps
    assert work["head"].num_bytes == 4 * HEAD
    assert work["attention"].flops == 4 * (LAYERS - 1) * WIDTH * 1024 * 1025 / 2


def test_a_bound_is_the_slower_of_reading_and_computing() -> None:
    part = decode_work(16, CONTEXT, "dense")["down"]
    assert part.bound_ms(read=1e9, multiply=1e15) == pytest.approx(part.num_bytes / 1e6)
    assert part.bound_ms(read=1e15, multiply=1e9) == pytest.approx(part.flops / 1e6)


def test_every_part_of_a_step_is_counted_and_all_of_them_are_the_step(tmp_path: Path) -> None:
    save_tiny("llama MQA", tmp_path / "model")
    profiled = Profiled(2, "dense", str(tmp_path / "model"), most=1)
    prefilled = profiled.parts(lambda: profiled.engine.prefill([list(range(40))]))
    decoded = profiled.parts(profiled.engine.step)
    for found in (prefilled, decoded):
        assert [*found] == [*PARTS[1:], BETWEEN, AROUND]
        assert all(taken > 0 for taken, _ in found.values())
        assert all(waited >= 0 for _, waited in found.values())
