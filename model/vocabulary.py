"""What a checkpoint says about its tokens, in one form whatever file said it."""

from dataclasses import dataclass

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token matched whole, before the text is cut into words."""

    token_id: int
    content: str
    special: bool  # a control token: dropped from decoded text, never made from a user's text

    def to_json(self) -> Json:
        return {
            "id": self.token_id,
            "content": self.content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": self.special,
        }


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A `tokenizer.json` document and what such a document does not say."""

    origin: str
    document: Json
    size: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # any of them ends a text; the first is `eos_token`
    unk_token_id: int | None = None
    pad_token_id: int | None = None
    adds_bos: bool = False  # the model was trained on texts that begin with BOS
    chat_template: str | None = None


def document(
    *,
    model: Json,
    decoder: Json,
    added: list[AddedToken],
    normalizer: Json | None = None,
    pre_tokenizer: Json | None = None,
) -> Json:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token.to_json() for token in added],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def bpe_model(
    vocab: dict[str, int],
    merges: list[list[str]],
    *,
    unk_token: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unk_token is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def byte_level(*, splits_words: bool) -> Json:
    """Bytes spelled as printable characters, after GPT-2's word pattern if `splits_words`."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": splits_words,
    }


def byte_spelling() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's alphabet)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = {byte: chr(byte) for byte in printable}
    hidden = [byte for byte in range(256) if byte not in spelling]
    spelling.update({byte: chr(0x100 + index) for index, byte in enumerate(hidden)})
    return spelling


def merge_pair(merge: object) -> tuple[str, str]:
    """The two tokens of a merge, which a `tokenizer.json` writes as a list or with a space."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else list_of(merge)
    return str(left), str(right)


def list_of(value: object) -> list[object]:
    """A JSON list, or an empty one where there is none."""
    return value if isinstance(value, list) else []


def merged_tokens(model: Json) -> set[str]:
    """The tokens that a byte-pair model makes of others, and so of ordinary text."""
    return {"".join(merge_pair(merge)) for merge in list_of(model.get("merges"))}
