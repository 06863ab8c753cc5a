"""Tiny random models of every architecture, as transformers makes and saves them."""

from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 72,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

# architecture, query heads, KV heads, and what is special about it
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "llama MHA untied": ("Llama", 4, 4, {"head_dim": 12}),
    "llama GQA tied": ("Llama", 4, 2, {"head_dim": 16, "tie_word_embeddings": True}),
    "llama MQA": ("Llama", 4, 1, {"head_dim": 8}),
    "llama 3 rope": ("Llama", 6, 2, {"head_dim": 8, "rope_parameters": LLAMA3_ROPE}),
    "llama linear rope": ("Llama", 6, 2, {"head_dim": 8, "rope_parameters": LINEAR_ROPE}),
    "llama with every bias": (
        "Llama",
        6,
        3,
        {"head_dim": 8, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm2 geometry": ("Llama", 9, 3, {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("Mistral", 4, 2, {"head_dim": 12, "sliding_window": None}),
    "mistral with a window": ("Mistral", 4, 2, {"head_dim": 16, "sliding_window": 100}),
    "mistral past its window": ("Mistral", 4, 2, {"head_dim": 16, "sliding_window": 20}),
    "qwen2 past the window of one layer": (
        "Qwen2",
        6,
        2,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2 tied": ("Qwen2", 6, 2, {"tie_word_embeddings": True}),
    "qwen2 MQA untied": ("Qwen2", 4, 1, {}),
    "qwen3": ("Qwen3", 4, 2, {"head_dim": 16}),
    "qwen3 biased tied": (
        "Qwen3",
        9,
        3,
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


def make_tiny(case: str, **shape: Any) -> Any:
    """The model of one case, in evaluation mode; `shape` replaces what the case says."""
    architecture, num_query_heads, num_kv_heads, special = CASES[case]
    config_class = getattr(transformers, f"{architecture}Config")
    heads = {"num_attention_heads": num_query_heads, "num_key_value_heads": num_kv_heads}
    config = config_class(**SHAPE | special | heads | shape)
    torch.manual_seed(7)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.5 if parameter.dim() == 1 else 0.2  # norms and biases must not be trivial
            parameter.copy_(torch.randn_like(parameter) * spread + ("norm" in name))
    return model


def save_tiny(case: str, folder: Path, **save: Any) -> Any:
    model = make_tiny(case)
    model.save_pretrained(folder, **save)
    return model


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits
