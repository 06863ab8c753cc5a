import json
from pathlib import Path
from typing import Any

import pytest

from model.config import (
    ChecksumConfig,
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    from_gguf,
    from_hf,
)
from model.errors import BadModelFile
from tests.model.tiny_checkpoints import save_tiny

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
GGUF = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 128,
    "llama.vocab_size": 100,
}

DIGEST = "5523e9c55f5f7ea191950d71fc0b7c7b"


def hf(**changed: Any) -> DecoderConfig:
    return from_hf(LLAMA | changed, "tiny")


def gguf(*tensors: str, **changed: Any) -> DecoderConfig:
    values = GGUF | {key.replace("__", "."): value for key, value in changed.items()}
    return from_gguf(values, frozenset({"output.weight", *tensors}), "tiny", "tiny.gguf")


def test_the_two_formats_describe_the_same_model() -> None:
    assert hf(rms_norm_eps=1e-5) == gguf()


def test_rope_is_read_from_old_and_new_configurations() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = hf(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    new = hf(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == new
    assert (new.rope_theta, new.rope_scaling) == (5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert hf(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == LinearScaling(2.0)
    linear = gguf(llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0)
    assert linear.rope_scaling == LinearScaling(2.0)
    assert hf(rope_scaling=None).rope_scaling is None


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is ['GPT2LMHeadModel']"),
        ({"architectures": None, "model_type": "gpt2"}, "architectures is None"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', not a whole number"),
        ({"hidden_size": 1 << 62}, "hidden_size is 4611686018427387904, not a whole number from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, not"),
        ({"vocab_size": -1}, "vocab_size is -1, not"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide"),
        ({"head_dim": 7}, "head_dim is 7; rope needs an even width"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a number from"),
        ({"rope_theta": 0}, "rope_theta is 0, not a number from"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu is served"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not true or false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": 3}, "rope_scaling is 3, not a table"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is present"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_key(
    changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(BadModelFile) as caught:
        hf(**changed)
    assert str(caught.value).startswith("config.json: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"general__architecture": "bert"}, "general.architecture is 'bert'"),
        ({"llama__block_count": None}, "block_count is missing"),
        ({"llama__expert_count": 8}, "expert_count is not 0"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count is 8, not the head's width 16"),
        ({"llama__attention__value_length": 8}, "attention.value_length is 8"),
        ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"llama__vocab_size": None}, "tokenizer.ggml.tokens is missing"),
        ({"llama__attention__head_count": [4, 4]}, "attention.head_count is [4, 4], not"),
    ],
)
def test_gguf_metadata_that_cannot_be_served_is_refused_by_key(
    changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(BadModelFile) as caught:
        gguf(**changed)
    assert str(caught.value).startswith("tiny.gguf: ")
    assert problem in str(caught.value)


def test_each_layer_has_the_window_that_transformers_gives_it() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert hf(**mistral, sliding_window=100).windows == (100, 100)
    assert hf(**mistral, sliding_window=100).max_context == 128
    assert hf(**mistral, sliding_window=None, max_position_embeddings=9000).windows == ()
    assert hf(**mistral, max_position_embeddings=9000).windows == (4096, 4096)
    qwen = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    assert hf(**qwen, sliding_window=100, max_window_layers=1).windows == (0, 100)
    assert hf(**qwen, sliding_window=100).windows == ()  # from layer 28 on
    mixed = ["sliding_attention", "full_attention"]
    assert hf(**qwen, sliding_window=100, layer_types=mixed).windows == (100, 0)


def test_a_window_that_no_layer_uses_or_no_context_fills_is_none() -> None:
    assert hf(sliding_window=100).windows == ()  # llama has none
    assert hf(architectures=["MistralForCausalLM"], sliding_window=128).windows == ()
    qwen: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100}
    assert hf(**qwen).windows == ()
    full = ["full_attention"] * 2
    assert hf(**qwen, use_sliding_window=True, layer_types=full).windows == ()


@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention", "chunked_attention"], 3])
def test_kinds_of_layers_that_are_not_known_are_refused_by_name(kinds: object) -> None:
    with pytest.raises(BadModelFile, match="layer_types is not a list of 2 of full_attention, sl"):
        hf(
            architectures=["Qwen3ForCausalLM"],
            use_sliding_window=True,
            sliding_window=100,
            layer_types=kinds,
        )


def test_a_gguf_s_window_caps_the_context_and_says_why() -> None:
    capped = gguf(llama__attention__sliding_window=64)
    assert capped.max_context == 64
    assert capped.context_note == (
        "context limited to the sliding window of 64 tokens (the checkpoint allows 128), "
        "because the file does not say which layers have it"
    )


def test_models_with_other_windows_are_other_models() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert len({hf(**mistral, sliding_window=w).digest() for w in (16, 32, None)}) == 3


def test_what_transformers_saves_is_what_is_read(tmp_path: Path) -> None:
    save_tiny("qwen3 biased tied", tmp_path)
    config = from_hf(json.loads((tmp_path / "config.json").read_text()), "tiny")
    assert config == DecoderConfig(
        name="tiny",
        architecture="qwen3",
        vocab_size=101,
        hidden_size=72,
        intermediate_size=40,
        num_layers=2,
        num_query_heads=9,
        num_kv_heads=3,
        head_dim=8,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        max_context=512,
        tied_embeddings=True,
        attention_bias=True,
        output_bias=True,
        mlp_bias=False,
        qk_norm=True,
    )


def test_optional_tensors_speak_for_themselves_in_a_gguf() -> None:
    plain, biased = (
        gguf(),
        gguf("blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"),
    )
    assert not (plain.attention_bias or plain.output_bias or plain.mlp_bias)
    assert biased.attention_bias and biased.output_bias and biased.mlp_bias
    assert from_gguf(GGUF, frozenset(), "tiny", "tiny.gguf").tied_embeddings


def test_the_digest_covers_what_is_computed_and_not_what_it_is_called() -> None:
    assert hf().digest() == from_hf(LLAMA, "another name").digest()
    assert hf().digest() != hf(rope_theta=5e5).digest()
    assert hf().digest().hex() == DIGEST
    assert ChecksumConfig().digest() != ChecksumConfig(weights_id=1).digest()
    assert ChecksumConfig().digest() == ChecksumConfig(name="other").digest()
