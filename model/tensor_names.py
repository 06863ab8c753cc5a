"""Which tensors a decoder is made of, what each file format calls them, and their shapes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from model.config import DecoderConfig
from model.errors import BadModelFile
from model.safetensors_files import ITEM_BYTES
from model.stored_tensor import StoredTensor

WHOLE_MODEL = {  # role: (Hugging Face's name, GGUF's name)
    "embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm": ("model.norm.weight", "output_norm.weight"),
    "lm_head": ("lm_head.weight", "output.weight"),
}
PER_LAYER = {
    "attention_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "q": ("self_attn.q_proj.weight", "attn_q.weight"),
    "k": ("self_attn.k_proj.weight", "attn_k.weight"),
    "v": ("self_attn.v_proj.weight", "attn_v.weight"),
    "o": ("self_attn.o_proj.weight", "attn_output.weight"),
    "q_bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "k_bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "v_bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "o_bias": ("self_attn.o_proj.bias", "attn_output.bias"),
    "q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "mlp_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "down": ("mlp.down_proj.weight", "ffn_down.weight"),
    "gate_bias": ("mlp.gate_proj.bias", "ffn_gate.bias"),
    "up_bias": ("mlp.up_proj.bias", "ffn_up.bias"),
    "down_bias": ("mlp.down_proj.bias", "ffn_down.bias"),
}
LAYER_PREFIXES = ("model.layers.{}.", "blk.{}.")
ROPE_FREQS = "rope_freqs.weight"  # GGUF's form of llama3's rope scaling: a divisor per frequency


@dataclass(frozen=True, slots=True)
class TensorSet:
    """The tensors of one checkpoint by role; `of(role, layer)` never fails once it is made."""

    tensors: Mapping[tuple[str, int | None], StoredTensor]
    rope_freqs: StoredTensor | None
    from_gguf: bool

    def of(self, role: str, layer: int | None = None) -> StoredTensor:
        return self.tensors[role, layer]


def select_tensors(
    config: DecoderConfig, stored: Mapping[str, StoredTensor], origin: str, from_gguf: bool
) -> TensorSet:
    """Find every tensor `config` needs.

    Raises BadModelFile for one that is missing, of another shape or of a type that cannot be read,
    and for one that `config` does not explain: leaving it out would be silently wrong.
    """
    chosen: dict[tuple[str, int | None], StoredTensor] = {}
    for role, layer, shape in _expected(config):
        name = _name(role, layer, from_gguf)
        tensor = stored.get(name)
        if tensor is None:
            raise BadModelFile(f"{origin} lacks tensor {name}")
        if tensor.shape != shape:
            raise BadModelFile(
                f"{origin}: tensor {name} has shape {list(tensor.shape)}, "
                f"but the configuration says {list(shape)}"
            )
        _check_type(tensor, origin, from_gguf)
        chosen[role, layer] = tensor
    rope_freqs = stored.get(ROPE_FREQS) if from_gguf else None
    if rope_freqs is not None and rope_freqs.shape != (config.head_dim // 2,):
        raise BadModelFile(f"{origin}: tensor {ROPE_FREQS} has shape {list(rope_freqs.shape)}")
    used = {tensor.name for tensor in chosen.values()}
    for name in stored:
        if name not in used and name != ROPE_FREQS and not _may_be_ignored(name):
            raise BadModelFile(
                f"{origin} holds tensor {name}, which no {config.architecture} model of this "
                f"configuration has"
            )
    return TensorSet(chosen, rope_freqs, from_gguf)


def _expected(config: DecoderConfig) -> Iterator[tuple[str, int | None, tuple[int, ...]]]:
    hidden, middle = config.hidden_size, config.intermediate_size
    query, kv = (n * config.head_dim for n in (config.num_query_heads, config.num_kv_heads))
    yield "embedding", None, (config.vocab_size, hidden)
    yield "final_norm", None, (hidden,)
    if not config.tied_embeddings:
        yield "lm_head", None, (config.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "q": (query, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, query),
        "mlp_norm": (hidden,),
        "gate": (middle, hidden),
        "up": (middle, hidden),
        "down": (hidden, middle),
    }
    if config.attention_bias:
        shapes |= {"q_bias": (query,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.output_bias:
        shapes |= {"o_bias": (hidden,)}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.mlp_bias:
        shapes |= {"gate_bias": (middle,), "up_bias": (middle,), "down_bias": (hidden,)}
    for layer in range(config.num_layers):
        for role, shape in shapes.items():
            yield role, layer, shape


def _name(role: str, layer: int | None, from_gguf: bool) -> str:
    if layer is None:
        return WHOLE_MODEL[role][from_gguf]
    return LAYER_PREFIXES[from_gguf].format(layer) + PER_LAYER[role][from_gguf]


def _may_be_ignored(name: str) -> bool:
    """Old checkpoints store what rope computes; tied ones may store the embedding twice."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _check_type(tensor: StoredTensor, origin: str, from_gguf: bool) -> None:
    readable = _can_dequantise(tensor.type) if from_gguf else tensor.type in ITEM_BYTES
    if not readable:
        raise BadModelFile(f"{origin}: tensor {tensor.name} is of type {tensor.type}, not readable")


@cache
def _can_dequantise(type_name: str) -> bool:
    quantization = GGMLQuantizationType[type_name]
    if type_name in ("F32", "F16"):
        return True
    try:
        block = np.zeros((1, GGML_QUANT_SIZES[quantization][1]), np.uint8)
        dequantize(block, quantization)
    except NotImplementedError:
        return False
    return True
