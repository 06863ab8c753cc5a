import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels import host_decoder
from kvcache.head_map import HeadMap
from model.comm import Comm
from model.decoder import Decoder
from model.host_decoder import CpuDecoder
from model.model import Model
from model.source import ModelSource, open_model
from tests.model.paged_run import PagedRun
from tests.model.tiny_checkpoints import CASES, logits_of, save_tiny

torch.set_num_threads(1)

TOKENS = random.Random(3).choices(range(101), k=70)


def load(head_map: HeadMap, comm: Comm, source: ModelSource, block_size: int) -> Model:
    return source.load(head_map, comm.rank, comm, block_size=block_size)


def run(source: ModelSource, tp: int = 1, block_size: int = 16) -> PagedRun:
    config = source.config
    head_map = HeadMap.even(config.num_query_heads, config.num_kv_heads, tp)
    return PagedRun(partial(load, source=source, block_size=block_size), head_map)


class Tiny:
    """One saved checkpoint and what transformers computes with it."""

    def __init__(self, case: str, folder: Path) -> None:
        self.oracle: Any = save_tiny(case, folder)
        self.source = open_model(str(folder))
        self.expected = logits_of(self.oracle, TOKENS)


@pytest.fixture(scope="module")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    return {case: Tiny(case, tmp_path_factory.mktemp("tiny") / "model") for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_a_whole_prompt_gives_transformers_logits(tinies: dict[str, Tiny], case: str) -> None:
    tiny = tinies[case]
    logits = run(tiny.source).prefill("a", TOKENS)
    torch.testing.assert_close(logits, tiny.expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("chunk", "block_size"), [(1, 8), (7, 16), (32, 64)])
def test_chunks_through_the_paged_store_give_transformers_logits(
    tinies: dict[str, Tiny], case: str, chunk: int, block_size: int
) -> None:
    tiny = tinies[case]
    logits = run(tiny.source, block_size=block_size).prefill("a", TOKENS, chunk)
    torch.testing.assert_close(logits, tiny.expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tp", [2, 3, 4, 9])
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_parallel_size_gives_the_logits_of_one(
    tinies: dict[str, Tiny], case: str, tp: int
) -> None:
    tiny = tinies[case]
    if tp > tiny.source.config.num_query_heads:
        with pytest.raises(ValueError, match=f"tensor parallel size {tp} is outside"):
            run(tiny.source, tp)
        return
    logits = run(tiny.source, tp).prefill("a", TOKENS, chunk=40)
    torch.testing.assert_close(logits, tiny.expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_without_a_compiler_torch_computes_the_same(
    tinies: dict[str, Tiny], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tinies[case]
    by_kernels = run(tiny.source, tp=2)
    assert {type(model) for model in by_kernels.models} == {CpuDecoder}
    logits = by_kernels.prefill("a", TOKENS, chunk=40)
    monkeypatch.setattr(host_decoder, "load", lambda: None)
    by_torch = run(tiny.source, tp=2)
    assert {type(model) for model in by_torch.models} == {Decoder}
    torch.testing.assert_close(by_torch.prefill("a", TOKENS, chunk=40), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tp", [1, 3])
def test_paging_changes_no_bit(tinies: dict[str, Tiny], tp: int) -> None:
    """Neither the size of blocks nor where they lie: blocks are dealt in random order."""
    source = tinies["smollm2 geometry"].source
    first: torch.Tensor | None = None
    for block_size in (8, 16, 32, 64, 128):
        paged = run(source, tp, block_size)
        found = torch.cat([paged.prefill("a", TOKENS[:50]), paged.prefill("a", TOKENS[50:], 1)])
        assert first is None or torch.equal(found, first), f"blocks of {block_size}"
        first = found


@pytest.mark.parametrize(
    "case", ["smollm2 geometry", "qwen3 biased tied", "qwen2 past the window of one layer"]
)
def test_a_batch_and_a_chunk_change_no_bit(tinies: dict[str, Tiny], case: str) -> None:
    paged = run(tinies[case].source)
    whole = paged.step({"a": TOKENS[:60]})
    paged.step({"b": TOKENS[:33]}, rows=[])
    assert torch.equal(paged.step({"b": TOKENS[33:60]}), whole)
    alone = paged.step({"a": TOKENS[60:61]})
    together = paged.step({"b": TOKENS[60:61], "c": TOKENS[:20], "d": TOKENS[:60]})
    assert torch.equal(together[:1], alone) and torch.equal(together[2:], whole)


def test_prompts_and_decode_steps_share_a_batch(tinies: dict[str, Tiny]) -> None:
    tiny = tinies["qwen3 biased tied"]
    paged = run(tiny.source, tp=2)
    prompts = {name: TOKENS[start : start + 30] for name, start in [("a", 0), ("b", 9), ("c", 40)]}
    paged.step({"b": prompts["b"][:20]}, rows=[])
    paged.step({"a": prompts["a"][:29], "b": prompts["b"][20:25], "c": prompts["c"][:16]})
    logits = paged.step({"c": prompts["c"][16:], "a": prompts["a"][29:], "b": prompts["b"][25:]})
    expected = [logits_of(tiny.oracle, prompts[name])[-1] for name in ("c", "a", "b")]
    torch.testing.assert_close(logits, torch.stack(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 20, 48, 49])
def test_batches_of_every_size_agree(tinies: dict[str, Tiny], num_rows: int) -> None:
    tiny = tinies["llama with every bias"]
    paged = run(tiny.source)
    names = [str(number) for number in range(num_rows)]
    for name in names:
        paged.step({name: TOKENS[:5]}, rows=[])
    logits = paged.step({name: TOKENS[5:6] for name in names})
    torch.testing.assert_close(logits, tiny.expected[5].expand_as(logits), atol=1e-4, rtol=0)


def test_a_step_that_wants_no_logits_still_fills_the_cache(tinies: dict[str, Tiny]) -> None:
    tiny = tinies["llama GQA tied"]
    paged = run(tiny.source, tp=2)
    assert paged.step({"a": TOKENS[:-1]}, rows=[]).shape == (0, 101)
    assert paged.layers_seen == [0, 1]
    logits = paged.step({"a": TOKENS[-1:]})
    torch.testing.assert_close(logits, tiny.expected[-1:], atol=1e-4, rtol=0)


def test_logits_may_be_changed_in_place(tinies: dict[str, Tiny]) -> None:
    run(tinies["mistral"].source).prefill("a", TOKENS[:3]).fill_(0)


@pytest.mark.parametrize("tp", [1, 2, 3, 9])
def test_a_rank_holds_its_own_weights_only(tinies: dict[str, Tiny], tp: int) -> None:
    source = tinies["smollm2 geometry"].source
    head_map = HeadMap.even(9, 3, tp)
    sizes = []

    def measure(head_map: HeadMap, comm: Comm) -> Model:
        model = load(head_map, comm, source, 16)
        sizes.append(sum(values_of(model)))
        return model

    PagedRun(measure, head_map)
    norms, per_layer = 5 * 72, (9 + 9) * 8 * 72 + 3 * 40 * 72
    kv = 2 * 8 * 72 * sum(len(heads) for heads in head_map.kv)
    assert sum(sizes) == tp * (norms + 4) + 2 * (per_layer + kv) + 101 * 72
    assert max(sizes) - min(sizes) <= 0.4 * max(sizes)


def values_of(model: Any) -> list[int]:
    """How many fp32 values each part of the weights takes."""
    weights = model._weights
    parts = [weights.embedding, weights.final_norm, weights.frequencies_F]
    for layer in weights.layers:
        parts += [getattr(layer, name) for name in type(layer).__slots__]
    return [size_of(part) // 4 for part in parts if part is not None]


def size_of(part: Any) -> int:
    tensor = getattr(part, "weight", part)  # of a norm
    size: int = tensor.nbytes if isinstance(tensor, torch.Tensor) else part.num_bytes
    return size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(tinies: dict[str, Tiny], dtype: str) -> None:
    tiny = tinies["qwen3"]

    def half(head_map: HeadMap, comm: Comm) -> Model:
        return tiny.source.load(head_map, comm.rank, comm, dtype=dtype)

    logits = PagedRun(half, HeadMap.even(4, 2, 2)).prefill("a", TOKENS)
    expected = logits_of(tiny.oracle, TOKENS)
    error = (logits - expected).norm() / expected.norm()
    assert error < (0.05 if dtype == "bfloat16" else 0.01)


def test_sharded_safetensors_are_read_across_their_files(tmp_path: Path) -> None:
    oracle = save_tiny("llama MHA untied", tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    logits = run(open_model(str(tmp_path / "model"))).prefill("a", TOKENS)
    torch.testing.assert_close(logits, logits_of(oracle, TOKENS), atol=1e-4, rtol=0)


def test_half_precision_files_are_read_exactly(tmp_path: Path) -> None:
    save_tiny("qwen2 tied", tmp_path / "saved").bfloat16().save_pretrained(tmp_path / "model")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    logits = run(open_model(str(tmp_path / "model"))).prefill("a", TOKENS)
    torch.testing.assert_close(logits, logits_of(oracle, TOKENS), atol=1e-4, rtol=0)
