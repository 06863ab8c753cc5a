"""The same tokenizer as transformers reads it: what ours is compared with."""

import copy
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import pre_tokenizers

from tests.model.smollm2 import smollm2_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True, slots=True)
class TransformersTokenizer:
    tokenizer: Any

    def plain_ids(self, text: str) -> list[int]:
        """Control tokens in the text left as text."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = True
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        backend.encode_special_tokens = False
        return ids

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def chat_ids(self, messages: list[dict[str, str]], generate: bool = True) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )
        return self.ids(text)

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text


@cache
def transformers_smollm2(*, splits_digits: bool) -> TransformersTokenizer:
    """With `splits_digits`, by the word rule of the model's own tokenizer.json."""
    tokenizer = _loaded()
    if splits_digits:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return TransformersTokenizer(tokenizer)


@cache
def _loaded() -> Any:
    from transformers import PreTrainedTokenizerFast  # what AutoTokenizer takes, in half the time

    path = smollm2_file()
    return PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
