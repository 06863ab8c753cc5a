"""Telling a template's own control tokens from text that merely looks like them."""

import re
import secrets
from collections.abc import Iterable

from model.tokenizer import Control

STAND_INS = range(0xF0000, 0x10FFFE)  # the private-use planes
Part = str | Control


class ControlMarks:
    """Control tokens written as marks that nobody outside this process can write."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(filter(None, names), key=lambda name: (-len(name), name))
        self._number = {name: index for index, name in enumerate(self._names)}
        self._name_pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._nonce = f"\uf8f1{secrets.token_hex(16)}"
        self._mark_pattern = re.compile(rf"{self._nonce}(\d{{6}})")

    def mark(self, trusted: str) -> str:
        """Every control token named in text that we trust becomes a mark."""
        return self._name_pattern.sub(lambda match: self._mark(match[0]), trusted)

    def unmark(self, text: str) -> str:
        return self._mark_pattern.sub(lambda match: self._names[int(match[1])], text)

    def parts(self, text: str) -> list[Part]:
        """The text cut at its marks."""
        pieces = self._mark_pattern.split(text)
        return [
            Control(self._names[int(piece)]) if index % 2 else piece
            for index, piece in enumerate(pieces)
            if index % 2 or piece
        ]

    def names_in(self, parts: Iterable[Part]) -> set[str]:
        """The names that still stand in the text between the marks."""
        texts = (part for part in parts if isinstance(part, str))
        return {name for text in texts for name in self._name_pattern.findall(text)}

    def shadow(self, texts: Iterable[str]) -> "Shadow":
        """Stand-ins for the characters of these texts."""
        return Shadow(texts, also="".join(self._names))

    def _mark(self, name: str) -> str:
        return f"{self._nonce}{self._number[name]:06d}"


class Shadow:
    """Stand-ins for characters: what is covered can be recognised, and uncovered, afterwards.

    White space is left alone, so that a template may trim what it is given, unless it is in `also`.
    """

    def __init__(self, texts: Iterable[str], also: str) -> None:
        present = {character for text in texts for character in text}
        covered = [each for each in sorted(present) if not each.isspace() or each in also]
        stand_ins = (each for each in map(chr, STAND_INS) if each not in present)
        pairs = list(zip(covered, stand_ins, strict=False))
        self.suffices = len(pairs) == len(covered)
        self._cover = {ord(character): stand_in for character, stand_in in pairs}
        self._uncover = {ord(stand_in): character for character, stand_in in pairs}

    def cover(self, text: str) -> str:
        return text.translate(self._cover)

    def uncover(self, text: str) -> str:
        return text.translate(self._uncover)

    def broken(self, text: str, words: Iterable[str]) -> str:
        """The text with the first character of each of these words covered."""
        for word in sorted(words, key=len, reverse=True):
            text = text.replace(word, self.cover(word[0]) + word[1:])
        return text
