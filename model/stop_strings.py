"""Ending a text before the first stop string, however the text is cut into deltas.

The text ends at the first moment it contains a stop. Of stops that become complete with the same
character the longest counts, so that no part of any of them is left standing. What could still
become a stop is held back, and nothing more.
"""

from collections.abc import Sequence


class StopStrings:
    """Feed `push` with deltas until it reports a match; call `flush` if it never did."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._stops = [_Stop(text) for text in dict.fromkeys(stops)]
        self._held = ""
        self._matched = False

    def push(self, delta: str) -> tuple[str, str | None]:
        """The text that is now safe to show, and the stop that ended it, if one did."""
        assert not self._matched, "text after its end"
        if not self._stops:
            return delta, None
        text = self._held + delta
        for end in range(len(self._held), len(text)):
            complete = [stop.text for stop in self._stops if stop.follow(text[end])]
            if complete:
                matched = max(complete, key=len)
                self._matched, self._held = True, ""
                return text[: end + 1 - len(matched)], matched
        return self._release(text)

    def flush(self) -> str:
        """What was held back: the text is over, so it was no stop."""
        text, self._held = self._held, ""
        return text

    def _release(self, text: str) -> tuple[str, None]:
        num_safe = len(text) - max(stop.num_matched for stop in self._stops)
        self._held = text[num_safe:]
        return text[:num_safe], None


class _Stop:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = _borders(text)

    def follow(self, character: str) -> bool:
        """Whether this character completes the stop."""
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched - 1]
        if self.text[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.text)


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return borders
