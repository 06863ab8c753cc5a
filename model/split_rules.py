"""How each kind of byte-level vocabulary cuts text into words before merging.

A GGUF file names the kind in `tokenizer.ggml.pre`; the rules behind the names are those of the
tokenizers the kinds were trained with, as their `tokenizer.json` files state them. Ids differ from
the trained ones where a wrong rule is used: a vocabulary of kind `smollm` cuts off each digit
first, so that in "\\n\\n1." the two newlines are one token.
"""

from dataclasses import dataclass

from model.vocabulary import Json, byte_level

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
TEKKEN_WORDS = "|".join(CASED_WORD) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class SplitRule:
    pre_tokenizer: Json
    normalizer: Json | None = None
    ignore_merges: bool = False  # a word that is itself a token is taken whole
    adds_bos: bool = False  # unless the file says otherwise


def _words(pattern: str) -> Json:
    split: Json = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, byte_level(splits_words=False)]}


def _each_digit_apart() -> Json:
    digits: Json = {"type": "Digits", "individual_digits": True}
    return {"type": "Sequence", "pretokenizers": [digits, byte_level(splits_words=True)]}


GPT2 = SplitRule(byte_level(splits_words=True))
DIGITS = SplitRule(_each_digit_apart())
LLAMA3 = SplitRule(_words(LLAMA3_WORDS), ignore_merges=True, adds_bos=True)
LLAMA3_MERGING = SplitRule(_words(LLAMA3_WORDS))
QWEN2 = SplitRule(_words(QWEN2_WORDS), normalizer={"type": "NFC"})
QWEN2_UNNORMALIZED = SplitRule(_words(QWEN2_WORDS))
TEKKEN = SplitRule(_words(TEKKEN_WORDS), ignore_merges=True)

SPLIT_RULES: dict[str, SplitRule] = {
    "default": GPT2,
    "gpt-2": GPT2,
    "olmo": GPT2,
    "phi-2": GPT2,
    "smollm": DIGITS,
    "codeshell": DIGITS,
    "refact": DIGITS,
    "starcoder": DIGITS,
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "falcon3": LLAMA3,
    "dbrx": LLAMA3_MERGING,
    "smaug-bpe": LLAMA3_MERGING,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2_UNNORMALIZED,
    "stablelm2": QWEN2_UNNORMALIZED,
    "tekken": TEKKEN,
}
