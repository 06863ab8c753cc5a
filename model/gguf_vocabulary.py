"""The vocabulary inside a GGUF file's metadata, turned into a `tokenizer.json` document.

Two families of vocabulary serve the models we run. `gpt2`: byte-level BPE, merges listed in the
file. `llama`: SentencePiece's BPE, where a piece's score is the rank of the merge that makes it,
spaces are written as a low block, and what no piece covers falls back to one piece per byte. In a
`llama` vocabulary a space goes before the text and, as llama.cpp reads such files and as Llama 2
was trained, before what follows a control token.
"""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum

from model.fields import Fields
from model.split_rules import SPLIT_RULES, SplitRule
from model.vocabulary import AddedToken, Json, Vocabulary, bpe_model, byte_level, document

LOW_BLOCK = "\u2581"  # SentencePiece's visible space
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
MAX_TOKEN_ID = (1 << 32) - 1


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, as the GGUF format numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf_vocabulary(metadata: Mapping[str, object], origin: str) -> Vocabulary:
    """Raises BadModelFile naming the key that is missing or that we cannot follow."""
    fields = Fields(origin, metadata)
    kind = fields.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise fields.wrong("tokenizer.ggml.model", f"is {kind!r}; known kinds are gpt2 and llama")
    tokens = _Tokens(fields, in_pieces=kind == "llama")
    if kind == "llama":
        return _piece_vocabulary(fields, tokens)
    return _byte_level_vocabulary(fields, tokens)


class _Tokens:
    """The token list with the roles that the file, or a well-known name, gives its entries."""

    def __init__(self, fields: Fields, *, in_pieces: bool) -> None:
        self.names = list(_texts(fields, "tokenizer.ggml.tokens"))
        if not self.names:
            raise fields.wrong("tokenizer.ggml.tokens", "is missing or empty")
        kinds = _numbers(fields, "tokenizer.ggml.token_type", len(self.names))
        self.types = [int(kind) for kind in kinds] or [int(TokenType.NORMAL)] * len(self.names)
        self.bos = self._role(fields, "bos_token_id")
        self.unk = self._role(fields, "unknown_token_id")
        self.pad = self._role(fields, "padding_token_id")
        eos = self._role(fields, "eos_token_id")
        ends = [eos, self._role(fields, "eot_token_id"), self._role(fields, "eom_token_id")]
        if in_pieces:
            self._respell_user_tokens()
        self.vocab = self._numbered()
        named = [self.vocab.get(name) for name in END_OF_TURN]
        ends += [i for i in named if i is not None and self.types[i] == TokenType.CONTROL]
        self.eos = tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))

    def added(self, merges: list[list[str]]) -> list[AddedToken]:
        """What is matched whole: control tokens, and tokens that the model's makers added.

        A file may forget to type the tokens that begin and end a text as control tokens, or use
        an ordinary one for them; those that no text is made of are control tokens.
        """
        ordinary = {left + right for left, right in merges}
        unmade = {
            token_id
            for token_id in (self.bos, *self.eos)
            if token_id is not None
            and len(self.names[token_id]) > 1
            and self.names[token_id] not in ordinary
        }
        added = []
        for token_id, (name, kind) in enumerate(zip(self.names, self.types, strict=True)):
            special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in unmade
            if special or kind == TokenType.USER_DEFINED:
                added.append(AddedToken(token_id, name, special))
        return added

    def _role(self, fields: Fields, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}"
        if key not in fields:
            return None
        token_id = fields.integer(key, 0, MAX_TOKEN_ID)
        if token_id == MAX_TOKEN_ID:  # how some writers say "none"
            return None
        if token_id >= len(self.names):
            raise fields.wrong(key, f"is {token_id}, outside the {len(self.names)} tokens")
        return token_id

    def _respell_user_tokens(self) -> None:
        """They are matched in the text as it was written, with its real spaces."""
        for token_id, kind in enumerate(self.types):
            if kind == TokenType.USER_DEFINED:
                self.names[token_id] = self.names[token_id].replace(LOW_BLOCK, " ")

    def _numbered(self) -> dict[str, int]:
        vocab: dict[str, int] = {}
        for token_id, name in enumerate(self.names):
            unique = name if name and name not in vocab else f"[unused {token_id}]"
            self.names[token_id] = unique
            vocab[unique] = token_id
        return vocab


def _byte_level_vocabulary(fields: Fields, tokens: _Tokens) -> Vocabulary:
    rule = _split_rule(fields)
    merges = [_pair(fields, merge) for merge in _texts(fields, "tokenizer.ggml.merges")]
    _check_merges(fields, merges, tokens.vocab)
    written = document(
        model=bpe_model(tokens.vocab, merges, ignore_merges=rule.ignore_merges),
        normalizer=rule.normalizer,
        pre_tokenizer=rule.pre_tokenizer,
        decoder=byte_level(splits_words=True),
        added=tokens.added(merges),
    )
    return _vocabulary(fields, tokens, written, adds_bos=rule.adds_bos)


def _piece_vocabulary(fields: Fields, tokens: _Tokens) -> Vocabulary:
    scores = _numbers(fields, "tokenizer.ggml.scores", len(tokens.names))
    merges = [_pair(fields, merge) for merge in _texts(fields, "tokenizer.ggml.merges")]
    if not merges:
        if not scores:
            raise fields.wrong("tokenizer.ggml.scores", "is missing, and so are the merges")
        merges = merges_from_scores(tokens.vocab, tokens.types, scores)
    _check_merges(fields, merges, tokens.vocab)
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", default=True)
    unk = tokens.names[tokens.unk] if tokens.unk is not None else None
    written = document(
        model=bpe_model(tokens.vocab, merges, unk_token=unk, byte_fallback=True),
        normalizer=_visible_spaces(prefix),
        decoder=_from_pieces(prefix),
        added=tokens.added(merges),
    )
    return _vocabulary(fields, tokens, written, adds_bos=True)


def merges_from_scores(
    vocab: dict[str, int], types: Sequence[int], scores: Sequence[float]
) -> list[list[str]]:
    """Every way of making a piece of two pieces, those of the best-scored piece first."""
    ranked = sorted(
        (piece for piece, token_id in vocab.items() if types[token_id] == TokenType.NORMAL),
        key=lambda piece: (-scores[vocab[piece]], vocab[piece]),
    )
    merges: list[list[str]] = []
    for piece in ranked:
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges.extend([left, right] for left, right in pairs)
    return merges


def _vocabulary(fields: Fields, tokens: _Tokens, written: Json, adds_bos: bool) -> Vocabulary:
    template = "tokenizer.chat_template"
    adds = fields.flag("tokenizer.ggml.add_bos_token", default=adds_bos)
    return Vocabulary(
        origin=fields.origin,
        document=written,
        size=len(tokens.names),
        bos_token_id=tokens.bos,
        eos_token_ids=tokens.eos,
        unk_token_id=tokens.unk,
        pad_token_id=tokens.pad,
        adds_bos=adds and tokens.bos is not None,
        chat_template=fields.text(template) if template in fields else None,
    )


def _split_rule(fields: Fields) -> SplitRule:
    kind = fields.text("tokenizer.ggml.pre", default="default")
    if kind not in SPLIT_RULES:
        known = ", ".join(sorted(SPLIT_RULES))
        raise fields.wrong("tokenizer.ggml.pre", f"is {kind!r}; known kinds are {known}")
    return SPLIT_RULES[kind]


def _visible_spaces(prefix: bool) -> Json:
    replace: Json = {"type": "Replace", "pattern": {"String": " "}, "content": LOW_BLOCK}
    prepend: Json = {"type": "Prepend", "prepend": LOW_BLOCK}
    return {"type": "Sequence", "normalizers": [prepend, replace] if prefix else [replace]}


def _from_pieces(prefix: bool) -> Json:
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": LOW_BLOCK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _pair(fields: Fields, merge: str) -> list[str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise fields.wrong("tokenizer.ggml.merges", f"has {merge[:40]!r}, not a pair of tokens")
    return [left, right]


def _check_merges(fields: Fields, merges: list[list[str]], vocab: dict[str, int]) -> None:
    for left, right in merges:
        for token in (left, right, left + right):
            if token not in vocab:
                raise fields.wrong(
                    "tokenizer.ggml.merges", f"makes {token[:40]!r}, which is no token"
                )


def _texts(fields: Fields, key: str) -> list[str]:
    """The list of texts under `key`; empty when the key is absent."""
    found = fields.values.get(key, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise fields.wrong(key, "is not a list of texts")
    return found


def _numbers(fields: Fields, key: str, length: int) -> list[float]:
    """The list under `key`, one number for each token; empty when the key is absent."""
    found = fields.values.get(key)
    if found is None:
        return []
    listed = found if isinstance(found, list) else []
    numbers = [n for n in listed if isinstance(n, int | float) and not math.isnan(n)]
    if not len(numbers) == len(listed) == length:
        raise fields.wrong(key, f"is not a list of {length} numbers")
    return numbers
