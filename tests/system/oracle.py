"""transformers in fp32 on the same file, asked whether greedy tokens are what the model says."""

import os
from functools import cache
from typing import Any

import torch

from tests.model.smollm2 import smollm2_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")

NEAR_TIE = 1e-3  # where the two best logits are closer, either token is right


@cache
def _model() -> Any:
    from transformers import AutoModelForCausalLM

    file = smollm2_file()
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()


@torch.inference_mode()
def greedy_differences(prompt: tuple[int, ...], output: tuple[int, ...]) -> list[str]:
    """Each output token that is not the likeliest after what stands before it, ties apart."""
    ids = torch.tensor([[*prompt, *output[:-1]]])
    logits = _model()(ids, logits_to_keep=len(output)).logits[0]
    best = logits.max(dim=-1)
    wrong = []
    for index, token_id in enumerate(output):
        gap = float(best.values[index] - logits[index, token_id])
        if gap >= NEAR_TIE:
            right = int(best.indices[index])
            wrong.append(f"token {index} is {token_id}, not {right}, which is {gap:.4f} above it")
    return wrong
