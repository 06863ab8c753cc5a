"""Text out of tokens as they come: every delta is whole characters, and nothing is said twice.

Bytes that could still become a character are held back; bytes that no longer can become U+FFFD,
one for each maximal broken sequence (the Unicode standard's recommended practice). The deltas of
any split of the tokens add up to `Tokenizer.decode` of all of them.
"""

import codecs
from collections.abc import Iterable
from typing import Protocol

from model.token_bytes import LeadingSpace


class Decodable(Protocol):
    """What of a tokenizer is needed to read its tokens."""

    @property
    def leading_space(self) -> LeadingSpace: ...

    def is_control(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Feed `push` with tokens; call `flush` once, after the last."""

    def __init__(
        self, tokenizer: Decodable, *, skip_special: bool = True, continues: bool = False
    ) -> None:
        """`continues`: the text goes on from a prompt, so that a leading space is part of it."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading = LeadingSpace.KEPT if continues else tokenizer.leading_space

    def push(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(self._bytes(token_id) for token_id in token_ids))

    def flush(self) -> str:
        """U+FFFD if the tokens ended inside a character, nothing otherwise."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special and self._tokenizer.is_control(token_id):
            return b""
        data = self._tokenizer.token_bytes(token_id)
        if self._leading is not LeadingSpace.KEPT and data:
            one = self._leading is LeadingSpace.ONE_DROPPED
            data = data.removeprefix(b" ") if one else data.replace(b" ", b"")
            self._leading = LeadingSpace.KEPT
        return data
