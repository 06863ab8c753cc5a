"""What decides the arithmetic of a model, read from a checkpoint's own description.

One decoder serves Llama 2 and 3, Mistral, SmolLM2, Qwen2 and Qwen3: they differ in the fields of
`DecoderConfig` and in nothing else. What it cannot compute exactly is refused here, by name.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from model.fields import Fields

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # SmolLM2 and Mistral call themselves llama there

MAX_WIDTH = 1 << 20  # of any dimension but the vocabulary
MAX_VOCABULARY = 1 << 24
MAX_LAYERS = 1 << 12
MAX_HEADS = 1 << 12
MAX_CONTEXT = 1 << 27
HF_DEFAULT_WINDOW = 4096  # of transformers, where a config.json that may have one is silent


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int


RopeScaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    max_context: int
    tied_embeddings: bool
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False  # of the attention's output
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()  # newest tokens that each layer sees, 0: all; empty: all see all
    context_note: str = ""  # why max_context is less than the checkpoint's own, if it is

    def digest(self) -> bytes:
        """16 bytes over everything but the name and the note: equal ones compute alike."""
        none = () if self.windows else ("windows",)  # as before there were any
        return _digest(self, "name", "context_note", *none)


@dataclass(frozen=True, slots=True)
class ChecksumConfig:
    """The geometry of the checksum model; `weights_id` stands for its weights."""

    num_layers: int = 4
    num_query_heads: int = 9
    num_kv_heads: int = 3
    vocab_size: int = 512
    max_context: int = 8192
    weights_id: int = 0
    head_dim: int = 4
    name: str = "checksum"

    def digest(self) -> bytes:
        """16 bytes over everything but the name."""
        return _digest(self, "name")


def _digest(config: DecoderConfig | ChecksumConfig, *left_out: str) -> bytes:
    known = {key: value for key, value in asdict(config).items() if key not in left_out}
    text = json.dumps(known, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"kvferry.config").digest()


def from_hf(values: Mapping[str, object], name: str, origin: str = "config.json") -> DecoderConfig:
    """Read a Hugging Face `config.json`. Raises BadModelFile naming the key."""
    fields = Fields(origin, values)
    architecture = _hf_architecture(fields)
    _refuse_what_hf_can_ask(fields)
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_query_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    default_head_dim = 128 if architecture == "qwen3" else hidden_size // num_query_heads
    every_bias = architecture != "qwen2" and fields.flag("attention_bias", False)
    rope = fields.table("rope_parameters")
    config = DecoderConfig(
        name=name,
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_query_heads=num_query_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 1, MAX_HEADS, num_query_heads),
        head_dim=fields.integer("head_dim", 2, MAX_WIDTH, default_head_dim),
        rope_theta=(rope if "rope_theta" in rope else fields).number(
            "rope_theta", 1.0, 1e30, 10000.0
        ),
        rope_scaling=_hf_rope_scaling(fields),
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        max_context=fields.integer("max_position_embeddings", 1, MAX_CONTEXT),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=architecture == "qwen2" or every_bias,
        output_bias=every_bias,
        mlp_bias=architecture == "llama" and fields.flag("mlp_bias", False),
        qk_norm=architecture == "qwen3",
    )
    _check_heads(fields, config, "num_attention_heads", "num_key_value_heads", "head_dim")
    return replace(config, windows=_hf_windows(fields, config))


def _hf_architecture(fields: Fields) -> str:
    listed = fields.values.get("architectures")
    name = listed[0] if isinstance(listed, list) and len(listed) == 1 else None
    if name is None and fields.values.get("model_type") in HF_ARCHITECTURES.values():
        return fields.text("model_type")
    if not isinstance(name, str) or name not in HF_ARCHITECTURES:
        known = ", ".join(HF_ARCHITECTURES)
        raise fields.wrong("architectures", f"is {listed!r}; kvferry serves {known}")
    return HF_ARCHITECTURES[name]


def _refuse_what_hf_can_ask(fields: Fields) -> None:
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.wrong("hidden_act", f"is {fields.values['hidden_act']!r}; only silu is served")
    if fields.number("partial_rotary_factor", 0.0, 1e9, 1.0) != 1.0:
        raise fields.wrong("partial_rotary_factor", "is not 1; rope must cover the whole head")
    if "quantization_config" in fields:
        raise fields.wrong("quantization_config", "is present; give unquantised weights or a GGUF")


def _hf_rope_scaling(fields: Fields) -> RopeScaling | None:
    """`rope_parameters` of transformers 5, `rope_scaling` before it."""
    rope = fields.table("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor", 1.0, 1e6))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=rope.number("factor", 1.0, 1e6),
            low_freq_factor=rope.number("low_freq_factor", 1e-6, 1e6),
            high_freq_factor=rope.number("high_freq_factor", 1e-6, 1e6),
            original_max_context=rope.integer("original_max_position_embeddings", 1, MAX_CONTEXT),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise rope.wrong("high_freq_factor", "is not greater than low_freq_factor")
        return scaling
    raise rope.wrong("rope_type", f"is {kind!r}; default, linear and llama3 are served")


def _hf_windows(fields: Fields, config: DecoderConfig) -> tuple[int, ...]:
    """The sliding window of each layer, as transformers gives them out."""
    if config.architecture == "llama":
        return ()
    stated = fields.values.get("sliding_window", HF_DEFAULT_WINDOW)
    if stated is None:
        return ()
    if config.architecture == "mistral":
        slides = [True] * config.num_layers
    elif not fields.flag("use_sliding_window", False):
        return ()
    elif "layer_types" in fields:
        slides = _hf_sliding_layers(fields, config.num_layers)
    else:
        first = fields.integer("max_window_layers", 0, MAX_LAYERS, 28)
        slides = [layer >= first for layer in range(config.num_layers)]
    window = fields.integer("sliding_window", 1, MAX_CONTEXT, HF_DEFAULT_WINDOW)
    if window >= config.max_context or not any(slides):
        return ()
    return tuple(window if slide else 0 for slide in slides)


def _hf_sliding_layers(fields: Fields, num_layers: int) -> list[bool]:
    kinds = fields.values["layer_types"]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(known):
        raise fields.wrong("layer_types", f"is not a list of {num_layers} of {', '.join(known)}")
    return [kind == "sliding_attention" for kind in kinds]


def from_gguf(
    values: Mapping[str, object], tensor_names: frozenset[str], name: str, origin: str
) -> DecoderConfig:
    """Read a GGUF file's metadata; which optional tensors it carries says the rest."""
    fields = Fields(origin, values)
    architecture = fields.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise fields.wrong("general.architecture", f"is {architecture!r}; kvferry serves {known}")
    own = {
        key.removeprefix(architecture + "."): value
        for key, value in values.items()
        if key.startswith(architecture + ".")
    }
    part = Fields(f"{origin}: {architecture}", own)
    hidden_size = part.integer("embedding_length", 1, MAX_WIDTH)
    num_query_heads = part.integer("attention.head_count", 1, MAX_HEADS)
    head_dim = part.integer("attention.key_length", 2, MAX_WIDTH, hidden_size // num_query_heads)
    config = DecoderConfig(
        name=name,
        architecture=architecture,
        vocab_size=_gguf_vocab_size(fields, part),
        hidden_size=hidden_size,
        intermediate_size=part.integer("feed_forward_length", 1, MAX_WIDTH),
        num_layers=part.integer("block_count", 1, MAX_LAYERS),
        num_query_heads=num_query_heads,
        num_kv_heads=part.integer("attention.head_count_kv", 1, MAX_HEADS, num_query_heads),
        head_dim=head_dim,
        rope_theta=part.number("rope.freq_base", 1.0, 1e30, 10000.0),
        rope_scaling=_gguf_rope_scaling(part),
        rms_norm_eps=part.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        max_context=part.integer("context_length", 1, MAX_CONTEXT),
        tied_embeddings="output.weight" not in tensor_names,
        attention_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        qk_norm=architecture == "qwen3",
    )
    _check_heads(
        part, config, "attention.head_count", "attention.head_count_kv", "attention.key_length"
    )
    _refuse_what_gguf_can_ask(part, head_dim)
    window = part.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    return _within_window(config, window or None)


def _gguf_vocab_size(fields: Fields, part: Fields) -> int:
    tokens = fields.values.get("tokenizer.ggml.tokens")
    default = len(tokens) if isinstance(tokens, list) else None
    if default is None and "vocab_size" not in part:
        raise fields.wrong("tokenizer.ggml.tokens", "is missing")
    return part.integer("vocab_size", 1, MAX_VOCABULARY, default)


def _gguf_rope_scaling(part: Fields) -> RopeScaling | None:
    """Llama 3's scaling is not here: GGUF carries it as the tensor `rope_freqs.weight`."""
    kind = part.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return LinearScaling(part.number("rope.scaling.factor", 1.0, 1e6))
    raise part.wrong("rope.scaling.type", f"is {kind!r}; none and linear are served")


def _refuse_what_gguf_can_ask(part: Fields, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if part.integer(key, 1, MAX_WIDTH, head_dim) != head_dim:
            raise part.wrong(key, f"is {part.values[key]}, not the head's width {head_dim}")
    if part.integer("expert_count", 0, MAX_WIDTH, 0):
        raise part.wrong("expert_count", "is not 0; mixtures of experts are not served")


def _check_heads(fields: Fields, config: DecoderConfig, query: str, kv: str, width: str) -> None:
    if config.num_query_heads % config.num_kv_heads:
        raise fields.wrong(
            kv, f"is {config.num_kv_heads}, which does not divide {query} {config.num_query_heads}"
        )
    if config.head_dim % 2:
        raise fields.wrong(width, f"is {config.head_dim}; rope needs an even width")


def _within_window(config: DecoderConfig, window: int | None) -> DecoderConfig:
    """Up to its window a model with sliding attention computes as one without."""
    if window is None or window >= config.max_context:
        return config
    note = (
        f"context limited to the sliding window of {window} tokens (the checkpoint allows "
        f"{config.max_context}), because the file does not say which layers have it"
    )
    return replace(config, max_context=window, context_note=note)
