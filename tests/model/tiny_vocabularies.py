"""Small vocabularies of every kind, as the metadata of GGUF files."""

from collections.abc import Mapping

from model.gguf_vocabulary import TokenType
from model.tokenizer import Tokenizer, from_gguf
from model.vocabulary import byte_spelling

PIECE_WORDS = ["▁h", "el", "lo", "▁hel", "▁hello", "▁▁", "ell", "▁w", "or", "ld", "▁wor", "▁world"]
PIECE_LETTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz", "é", "。"]


def piece_metadata(**changes: object) -> dict[str, object]:
    """A SentencePiece vocabulary: earlier words have better scores, as its trainer gives them."""
    controls = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    user = {"<think>": TokenType.USER_DEFINED, "▁▁▁▁": TokenType.USER_DEFINED}
    byte_pieces = {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    pieces = dict.fromkeys([*PIECE_WORDS, *PIECE_LETTERS], TokenType.NORMAL)
    tokens = controls | byte_pieces | pieces | user
    first = len(controls) + len(byte_pieces)
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [int(kind) for kind in tokens.values()],
        "tokenizer.ggml.scores": [float(min(0, first - i)) for i in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return changed(metadata, changes)


def byte_level_metadata(pre: str, merges: list[str], /, **changes: object) -> dict[str, object]:
    """Every byte, what the merges make of them, and two control tokens."""
    made = ["".join(merge.split(" ")) for merge in merges]
    tokens = [*byte_spelling().values(), *dict.fromkeys(made), "<|end|>", "<|im_start|>"]
    controls = [int(TokenType.CONTROL)] * 2
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(TokenType.NORMAL)] * (len(tokens) - 2) + controls,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }
    return changed(metadata, changes)


def changed(metadata: dict[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """`tokenizer.ggml.` goes before each name; None takes the key away."""
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def piece_tokenizer(**changes: object) -> Tokenizer:
    return from_gguf(piece_metadata(**changes), "tiny.gguf")


def byte_level_tokenizer(pre: str, merges: list[str], /, **changes: object) -> Tokenizer:
    return from_gguf(byte_level_metadata(pre, merges, **changes), "tiny.gguf")
