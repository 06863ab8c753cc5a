"""A mapping whose values are found when they are asked for: of a thousand pairs, a choice needs
few.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar, overload

Key = TypeVar("Key")
Value = TypeVar("Value")
Other = TypeVar("Other")


class Lazily(Mapping[Key, Value]):
    """`find` says None of a key that has no value; it is asked once for each. `keys` are only gone
    through by who looks at all of them.
    """

    def __init__(self, keys: Callable[[], Iterable[Key]], find: Callable[[Key], Value | None]):
        self._keys = keys
        self._find = find
        self._found: dict[Key, Value | None] = {}

    def __getitem__(self, key: Key) -> Value:
        value = self._value(key)
        if value is None:
            raise KeyError(key)
        return value

    @overload
    def get(self, key: Key, /) -> Value | None: ...

    @overload
    def get(self, key: Key, /, default: Value | Other) -> Value | Other: ...

    def get(self, key: Key, /, default: Value | Other | None = None) -> Value | Other | None:
        """As a mapping's, without an exception for each key that has no value."""
        value = self._value(key)
        return default if value is None else value

    def _value(self, key: Key) -> Value | None:
        if key not in self._found:
            self._found[key] = self._find(key)
        return self._found[key]

    def __iter__(self) -> Iterator[Key]:
        return (key for key in self._keys() if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
