"""The bytes each token stands for, by the rules of the vocabulary's decoder.

A text is the bytes of its tokens, one after another, read as UTF-8; this is what makes decoding
exact a token at a time. Two families of decoder work so, and only they are accepted: byte-level
spelling (GPT-2's), and SentencePiece pieces with a low block for a space and `<0x0A>` for a byte.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from model.errors import BadModelFile
from model.vocabulary import Json, byte_spelling

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPELLED = {character: byte for byte, character in byte_spelling().items()}


class LeadingSpace(Enum):
    """What becomes of the space that a tokenizer put before the text."""

    KEPT = "kept"
    ONE_DROPPED = "one dropped"  # from the text
    FIRST_TOKEN = "first token"  # all those of the first token


@dataclass(frozen=True, slots=True)
class TokenBytes:
    byte_level: bool = False
    space: str = ""  # the character written for a space, if any
    byte_pieces: bool = False
    leading_space: LeadingSpace = LeadingSpace.KEPT

    def of(self, token: str, *, added: bool = False) -> bytes:
        if self.byte_level:
            codes = [SPELLED.get(character, -1) for character in token]
            return token.encode() if -1 in codes else bytes(codes)
        match = BYTE_PIECE.fullmatch(token) if self.byte_pieces and not added else None
        if match:
            return bytes([int(match[1], 16)])
        return (token.replace(self.space, " ") if self.space else token).encode()


def token_bytes(decoder: object, origin: str) -> TokenBytes:
    """The rules a `tokenizer.json` decoder states; BadModelFile if they are of another family."""
    steps = _steps(decoder)
    names = [str(step.get("type")) for step in steps]
    match names:
        case ["ByteLevel"]:
            return TokenBytes(byte_level=True)
        case ["Metaspace"]:
            keeps = steps[0].get("prepend_scheme") == "never"
            keeps = keeps or steps[0].get("add_prefix_space") is False
            leading = LeadingSpace.KEPT if keeps else LeadingSpace.FIRST_TOKEN
            return TokenBytes(space=str(steps[0].get("replacement")), leading_space=leading)
        case ["Replace", "ByteFallback", "Fuse"]:
            return TokenBytes(space=_replaced(steps[0], origin), byte_pieces=True)
        case ["Replace", "ByteFallback", "Fuse", "Strip"]:
            if (steps[3].get("content"), steps[3].get("start"), steps[3].get("stop")) == (
                " ",
                1,
                0,
            ):
                space = _replaced(steps[0], origin)
                return TokenBytes(
                    space=space, byte_pieces=True, leading_space=LeadingSpace.ONE_DROPPED
                )
    raise BadModelFile(f"{origin}: decoder {' + '.join(names) or 'null'} is not one we can stream")


def _steps(decoder: object) -> list[Json]:
    if not isinstance(decoder, Mapping):
        return []
    if decoder.get("type") != "Sequence":
        return [dict(decoder)]
    return [dict(step) for step in decoder.get("decoders", ())]


def _replaced(step: Json, origin: str) -> str:
    pattern = step.get("pattern")
    space = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not isinstance(space, str) or len(space) != 1 or step.get("content") != " ":
        raise BadModelFile(f"{origin}: decoder replaces {pattern!r} by {step.get('content')!r}")
    return space
