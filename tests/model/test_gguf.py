import random
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvcache.head_map import HeadMap
from model.config import DecoderConfig
from model.source import ModelSource, open_model
from model.stored_tensor import StoredTensor
from model.tensor_values import read_values
from tests.model.paged_run import PagedRun
from tests.model.smollm2_oracle import smollm2_oracle
from tests.model.tiny_checkpoints import logits_of, make_tiny
from tests.model.tiny_gguf import write_gguf

torch.set_num_threads(1)

TOKENS = random.Random(4).choices(range(101), k=50)
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def run(source: ModelSource, tp: int = 1) -> PagedRun:
    config = source.config
    head_map = HeadMap.even(config.num_query_heads, config.num_kv_heads, tp)
    return PagedRun(lambda head_map, comm: source.load(head_map, comm.rank, comm), head_map)


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize(
    "case",
    ["llama MHA untied", "llama GQA tied", "mistral", "qwen2 tied", "qwen2 MQA untied", "qwen3"],
)
def test_every_architecture_gives_transformers_logits(case: str, tp: int, tmp_path: Path) -> None:
    model = make_tiny(case, **SHAPE)
    write_gguf(tmp_path / "tiny.gguf", model)
    source = open_model(str(tmp_path / "tiny.gguf"))
    assert source.name == "tiny" and source.kind == "gguf"
    logits = run(source, tp).prefill("a", TOKENS, chunk=20)
    torch.testing.assert_close(logits, logits_of(model, TOKENS), atol=1e-4, rtol=0)


def test_rope_divisors_stored_as_a_tensor_are_llama3_scaling(tmp_path: Path) -> None:
    model = make_tiny("llama 3 rope", num_attention_heads=4, **SHAPE)
    plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    divisors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert divisors.max() > 7.9 and divisors.min() < 1.1
    write_gguf(tmp_path / "tiny.gguf", model, rope_freqs=divisors.tolist())
    logits = run(open_model(str(tmp_path / "tiny.gguf"))).prefill("a", TOKENS)
    torch.testing.assert_close(logits, logits_of(model, TOKENS), atol=1e-4, rtol=0)


def test_biases_of_q_and_k_are_reordered_with_their_rows(tmp_path: Path) -> None:
    model = make_tiny(
        "llama with every bias", num_attention_heads=4, num_key_value_heads=2, **SHAPE
    )
    write_gguf(tmp_path / "tiny.gguf", model)
    logits = run(open_model(str(tmp_path / "tiny.gguf")), tp=2).prefill("a", TOKENS)
    torch.testing.assert_close(logits, logits_of(model, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_are_what_their_file_says(kind: str, tp: int, tmp_path: Path) -> None:
    model = make_tiny("llama GQA tied", **SHAPE)
    write_gguf(tmp_path / "tiny.gguf", model, GGMLQuantizationType[kind])
    logits = run(open_model(str(tmp_path / "tiny.gguf")), tp).prefill("a", TOKENS)
    torch.testing.assert_close(logits, logits_of(model, TOKENS), atol=1e-4, rtol=0)


READABLE = [
    kind
    for kind in GGMLQuantizationType
    if kind.name not in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0")
]


@pytest.mark.parametrize("kind", READABLE, ids=[kind.name for kind in READABLE])
def test_slices_of_every_type_are_slices_of_the_whole(kind: GGMLQuantizationType) -> None:
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    shape = (6, 4 * block_values)
    raw = np.random.default_rng(0).integers(0, 256, (6, 4 * block_bytes), np.uint8)
    stored = StoredTensor("t", shape, kind.name, Path("t"), 0, raw.size)
    with np.errstate(all="ignore"):
        if kind.name in ("F32", "F16"):
            whole = raw.view(np.float32 if kind.name == "F32" else np.float16)
        else:
            whole = dequantize(raw, kind)
        for rows, cols in [((0, 6), (0, shape[1])), ((2, 5), (1, shape[1] - 1)), ((5, 6), (3, 4))]:
            part = read_values(raw.reshape(-1), stored, slice(*rows), range(*cols))
            np.testing.assert_array_equal(part.float().numpy(), whole[slice(*rows), slice(*cols)])


@pytest.fixture(scope="module")
def smollm2() -> ModelSource:
    return open_model("smollm2")


def test_the_preset_smollm2_is_the_file_its_package_carries(smollm2: ModelSource) -> None:
    config = smollm2.config
    assert isinstance(config, DecoderConfig)
    assert (config.num_layers, config.num_query_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.head_dim, config.vocab_size, config.max_context) == (64, 49152, 8192)
    assert smollm2.weights_fingerprint().hex() == "4860a1dc54d2615e33f371dafd0fb75d"
    assert smollm2.cache_spec(16, "float16").bytes_per_block(3) == 16 * 23_040


def test_smollm2_continues_prompts_as_transformers_does(smollm2: ModelSource) -> None:
    oracle = smollm2_oracle()
    paged = run(smollm2)
    for name, prompt in [("a", [504, 3575, 282, 4649, 314]), ("b", list(range(1000, 1033)))]:
        rows = [paged.prefill(name, prompt, chunk=16)]
        tokens = [*prompt, int(rows[0][-1].argmax())]
        while len(tokens) < len(prompt) + 6:
            rows.append(paged.step({name: tokens[-1:]}))
            tokens.append(int(rows[-1].argmax()))
        expected = logits_of(oracle, tokens[:-1])
        torch.testing.assert_close(torch.cat(rows), expected, atol=2e-3, rtol=0)
        assert tokens[len(prompt) :] == expected[len(prompt) - 1 :].argmax(1).tolist()
