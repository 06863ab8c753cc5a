"""Writes a transformers model as a GGUF file, the way llama.cpp's converter does."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    path: Path,
    model: Any,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope_freqs: list[float] | None = None,
    fields: dict[str, int] | None = None,
) -> None:
    """Matrices are quantised, and `model` is given the values that they then have."""
    config = model.config
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_value_length(model.model.layers[0].self_attn.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, number in (fields or {}).items():
        writer.add_uint32(key, number)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, np.float32))
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, model.model.layers[0].self_attn.head_dim)
        kind = matrices if values.ndim == 2 else GGMLQuantizationType.F32
        raw = quantize(values, kind)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        stored = dequantize(raw, kind)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            stored = halves_apart(stored, model.model.layers[0].self_attn.head_dim)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    if name in WHOLE_NAMES:
        return WHOLE_NAMES[name]
    _, _, layer, part = name.split(".", 3)
    module, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"


def interleaved(rows: Any, head_dim: int) -> Any:
    """Rows i and i + D/2 of each head side by side, as GGUF's llama has them."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))


def halves_apart(rows: Any, head_dim: int) -> Any:
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))
