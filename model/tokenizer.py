"""Text to token ids and back, the same ids wherever the vocabulary came from.

Text from outside never becomes a control token: `<|im_end|>` in it is ten characters like any
others. This holds by construction, not by a flag: text is encoded by a twin of the vocabulary whose
control tokens carry secret names, drawn when the process starts and never shown. A chat template's
own control tokens are written under these names, between contents left as they are, and the whole
is encoded at once, so that words and merges run across the seams as they did in training.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import Tokenizer as Codec

from model.detokenizer import Detokenizer
from model.errors import BadModelFile
from model.gguf_vocabulary import read_gguf_vocabulary
from model.hf_vocabulary import read_hf_vocabulary
from model.token_bytes import LeadingSpace, token_bytes
from model.vocabulary import (
    AddedToken,
    Json,
    Vocabulary,
    bpe_model,
    byte_level,
    byte_spelling,
    document,
    merge_pair,
)

NAME_MARK = "\uf8f0"  # private use: no vocabulary and no normalizer knows it
BYTE_CONTROLS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class InvalidText(ValueError):
    """What should be text is not Unicode; the message names the position."""


@dataclass(frozen=True, slots=True)
class Control:
    """A control token in a scaffold, by its name in the vocabulary."""

    name: str


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The control tokens by name, and those with a role."""

    names: tuple[str, ...]
    bos: str | None = None
    eos: str | None = None
    unk: str | None = None
    pad: str | None = None


class Tokenizer:
    """Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._codec = _codec(vocabulary.document, vocabulary.origin)
        self._secret_names = _secret_names(vocabulary.document)
        sealed = _sealed(vocabulary.document, self._secret_names)
        self._sealed = _codec(sealed, vocabulary.origin)
        self._token_bytes = token_bytes(vocabulary.document.get("decoder"), vocabulary.origin)
        self._added_ids = frozenset(
            self._codec.token_to_id(token["content"]) for token in _added(vocabulary.document)
        )
        self._control_ids = frozenset(self._id(name) for name in self._secret_names)
        self._bytes_by_id: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    @property
    def bos_token_id(self) -> int | None:
        return self._vocabulary.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return next(iter(self._vocabulary.eos_token_ids), None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a text, as far as the vocabulary's files say."""
        return self._vocabulary.eos_token_ids

    @property
    def adds_bos(self) -> bool:
        """Whether the model expects a plain prompt to begin with BOS."""
        return self._vocabulary.adds_bos

    @property
    def chat_template(self) -> str | None:
        return self._vocabulary.chat_template

    @property
    def leading_space(self) -> LeadingSpace:
        return self._token_bytes.leading_space

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        vocabulary = self._vocabulary
        return SpecialTokens(
            names=tuple(self._secret_names),
            bos=self.token(vocabulary.bos_token_id),
            eos=self.token(self.eos_token_id),
            unk=self.token(vocabulary.unk_token_id),
            pad=self.token(vocabulary.pad_token_id),
        )

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes, the same in every process, for everything that decides the ids of a text."""
        vocabulary = self._vocabulary
        deciding = [vocabulary.document, vocabulary.bos_token_id, vocabulary.adds_bos]
        written = json.dumps(deciding, sort_keys=True, separators=(",", ":")).encode()
        return hashlib.blake2b(written, digest_size=16, person=b"kvferry tokens").digest()

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Control tokens named in the text stay plain characters.

        `add_bos` puts BOS in front if, and only if, the model expects a prompt to begin with it.
        """
        check_text(text)
        ids = _encoded(self._sealed, text)
        return [*self._bos(), *ids] if add_bos else ids

    def encode_special(self, text: str) -> list[int]:
        """Control tokens named in the text are recognised: for text that we wrote ourselves."""
        check_text(text)
        return _encoded(self._codec, text)

    def encode_scaffold(self, parts: Iterable[str | Control]) -> list[int]:
        """Plain text with control tokens only where a `Control` stands."""
        return _encoded(self._sealed, "".join(map(self._written, parts)))

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        stream = Detokenizer(self, skip_special=skip_special)
        return stream.push(token_ids) + stream.flush()

    def is_control(self, token_id: int) -> bool:
        return token_id in self._control_ids

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        token_id: int | None = self._codec.token_to_id(token)
        return token_id

    def token(self, token_id: int | None) -> str | None:
        """The vocabulary's spelling of a token; None when it has none."""
        if token_id is None or not 0 <= token_id < 1 << 32:
            return None
        token: str | None = self._codec.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for in a text; nothing for an id the vocabulary does not name."""
        known = self._bytes_by_id.get(token_id)
        if known is None:
            token = self.token(token_id)
            added = token_id in self._added_ids
            known = b"" if token is None else self._token_bytes.of(token, added=added)
            self._bytes_by_id[token_id] = known
        return known

    def _bos(self) -> list[int]:
        bos = self._vocabulary.bos_token_id
        return [bos] if self._vocabulary.adds_bos and bos is not None else []

    def _written(self, part: str | Control) -> str:
        if isinstance(part, Control):
            return self._secret_names[part.name]
        check_text(part)
        return part

    def _id(self, name: str) -> int:
        token_id = self.token_id(name)
        sealed_id = self._sealed.token_to_id(self._secret_names[name])
        assert token_id is not None and sealed_id == token_id, name
        return token_id


def from_gguf(source: GGUFReader | Mapping[str, object], origin: str = "GGUF") -> Tokenizer:
    """From metadata as `gguf` or `model.gguf_file` reads it; `origin` names the file in errors."""
    if isinstance(source, GGUFReader):
        wanted = {key: each for key, each in source.fields.items() if key.startswith("tokenizer.")}
        source = {key: each.contents() for key, each in wanted.items()}
    return Tokenizer(read_gguf_vocabulary(source, origin))


def from_hf(folder: Path) -> Tokenizer:
    return Tokenizer(read_hf_vocabulary(folder))


def byte_tokenizer() -> Tokenizer:
    """The checksum model's: ids 0 to 255 are bytes, then come four control tokens."""
    vocab = {character: byte for byte, character in sorted(byte_spelling().items())}
    added = [AddedToken(256 + i, name, special=True) for i, name in enumerate(BYTE_CONTROLS)]
    vocab |= {token.content: token.token_id for token in added}
    written = document(
        model=bpe_model(vocab, []),
        pre_tokenizer=byte_level(splits_words=False),
        decoder=byte_level(splits_words=False),
        added=added,
    )
    return Tokenizer(
        Vocabulary(
            origin="byte tokenizer",
            document=written,
            size=len(vocab),
            bos_token_id=256,
            eos_token_ids=(257,),
            chat_template=CHATML,
        )
    )


def check_text(text: str) -> None:
    """Raises InvalidText for a lone surrogate, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = f"U+{ord(text[error.start]):04X}"
        raise InvalidText(f"character {error.start} is the lone surrogate {lone}") from None


def text_from_utf8(data: bytes) -> str:
    """Raises InvalidText naming the first byte that is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        broken = f"0x{data[error.start]:02X}"
        raise InvalidText(f"byte {error.start} ({broken}) is not UTF-8: {error.reason}") from None


def _encoded(codec: Codec, text: str) -> list[int]:
    # Of the library's calls, the one for batches lets other threads run: a prompt of 28,000 tokens
    # takes 0.3 s, and whoever shares the interpreter would stand still for as long.
    (found,) = codec.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = found.ids
    return ids


def _codec(written: Json, origin: str) -> Codec:
    try:
        return Codec.from_str(json.dumps(written))
    except Exception as error:  # whatever the library raises; it has no type of its own
        raise BadModelFile(f"{origin}: the vocabulary does not load: {error}") from None


def _added(written: Json) -> list[dict[str, Any]]:
    added = written["added_tokens"]
    assert isinstance(added, list)
    return added


def _secret_names(written: Json) -> dict[str, str]:
    """One for each control token: none begins another, and none can be guessed.

    A single character of the model's alphabet is never one: without it, text could not be spelled.
    """
    nonce = secrets.token_hex(16)
    alphabet = {token for token in _model(written)["vocab"] if len(token) == 1}
    names = [token["content"] for token in _added(written) if token["special"]]
    sealed = [name for name in dict.fromkeys(names) if name not in alphabet]
    return {name: f"{NAME_MARK}{nonce}{index:06d}" for index, name in enumerate(sealed)}


def _sealed(written: Json, secret_names: dict[str, str]) -> Json:
    """The same vocabulary with its control tokens under other names, each with its own id."""
    model = dict(_model(written))
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {secret_names.get(token, token): i for token, i in vocab.items()}
    else:  # Unigram lists its pieces with their scores
        model["vocab"] = [[secret_names.get(token, token), score] for token, score in vocab]
    if "merges" in model:
        model["merges"] = [each for each in model["merges"] if _is_plain(each, secret_names)]
    unk = model.get("unk_token")
    if isinstance(unk, str):
        model["unk_token"] = secret_names.get(unk, unk)
    added = [
        token | {"content": secret_names.get(token["content"], token["content"])}
        for token in _added(written)
    ]
    return written | {"model": model, "added_tokens": added, "post_processor": None}


def _is_plain(merge: object, secret_names: dict[str, str]) -> bool:
    """Whether a merge neither uses nor makes a control token."""
    left, right = merge_pair(merge)
    return not any(token in secret_names for token in (left, right, left + right))


def _model(written: Json) -> dict[str, Any]:
    model = written["model"]
    assert isinstance(model, dict)
    return model
