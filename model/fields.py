"""Reading a checkpoint's own description of itself, which may say anything."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from model.errors import BadModelFile

MISSING = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """The metadata of one file; every failure is a BadModelFile naming the file and the key."""

    origin: str
    values: Mapping[str, object]

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: object = MISSING) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"is {_shown(value)}, not a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: object = MISSING) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, f"is {_shown(value)}, not a number")
        if not (math.isfinite(value) and low <= value <= high):
            raise self.wrong(key, f"is {_shown(value)}, not a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"is {_shown(value)}, not true or false")
        return value

    def text(self, key: str, default: object = MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, f"is {_shown(value)}, not text")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """One number or a list of them; nothing when the key is absent."""
        value = self._get(key, [])
        listed = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
            raise self.wrong(key, f"is {_shown(value)}, not whole numbers")
        return tuple(listed)

    def table(self, key: str) -> "Fields":
        """A nested table; an empty one when the key is absent."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, f"is {_shown(value)}, not a table")
        return Fields(f"{self.origin}: {key}", value)

    def wrong(self, key: str, problem: str) -> BadModelFile:
        return BadModelFile(f"{self.origin}: {key} {problem}")

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is MISSING:
            raise self.wrong(key, "is missing")
        return default


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
