"""The messages of a chat as plain JSON values, checked before a template sees them."""

import re
from collections.abc import Callable, Mapping, Sequence

from model.tokenizer import InvalidText, check_text

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_DEPTH = 64
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")

Message = dict[str, object]


class InvalidChat(ValueError):
    """The messages are not a chat; the message names the first one that is wrong, and how."""


def plain_messages(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """A copy made of JSON types only, parts of text joined, absent values left out."""
    if not messages:
        raise InvalidChat("messages is empty; at least one is needed")
    return [_plain_message(f"messages[{i}]", each) for i, each in enumerate(messages)]


def plain(path: str, value: object, depth: int = 0) -> object:
    """A copy made of JSON types only; InvalidChat and InvalidText name the place by `path`."""
    if depth > MAX_DEPTH:
        raise InvalidChat(f"{path} is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _plain_text(path, value)
    if isinstance(value, Mapping):
        return {
            _plain_text(path, key): plain(f"{path}.{key}", item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(f"{path}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    raise InvalidChat(f"{path} is a {type(value).__name__}, which is not JSON")


def rewritten(value: object, rewrite: Callable[[str], str]) -> object:
    """The same value with every text rewritten that a client chose: not roles, not field names."""
    if isinstance(value, str):
        return rewrite(value)
    if isinstance(value, list):
        return [rewritten(item, rewrite) for item in value]
    if isinstance(value, dict):
        return {
            key if WORD.fullmatch(key) else rewrite(key): rewritten(item, rewrite)
            for key, item in value.items()
        }
    return value


def rewritten_messages(messages: list[Message], rewrite: Callable[[str], str]) -> list[Message]:
    return [
        {
            key: value if key == "role" else rewritten(value, rewrite)
            for key, value in message.items()
        }
        for message in messages
    ]


def texts(value: object) -> list[str]:
    """Every text in a plain value, field names included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in texts(item))]
    return []


def _plain_message(path: str, message: Mapping[str, object]) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidChat(f"{path} is a {type(message).__name__}, not an object")
    copy = plain(path, {key: value for key, value in message.items() if value is not None})
    assert isinstance(copy, dict)
    if copy.get("role") not in ROLES:
        shown = repr(copy.get("role"))[:60]
        raise InvalidChat(f"{path}.role is {shown}; known roles are {', '.join(ROLES)}")
    content = copy.get("content")
    if isinstance(content, list):
        copy["content"] = _joined_parts(f"{path}.content", content)
    elif not isinstance(content, str) and (content is not None or not copy.get("tool_calls")):
        raise InvalidChat(f"{path}.content is missing or not text")
    return copy


def _joined_parts(path: str, parts: list[object]) -> str:
    lines = []
    for i, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("type") != "text"):
            raise InvalidChat(f"{path}[{i}] is not a part of type text, the only one served")
        lines.append(text)
    return "\n".join(lines)


def _plain_text(path: str, text: object) -> str:
    if not isinstance(text, str):
        raise InvalidChat(f"{path} has a field name that is not text")
    try:
        check_text(text)
    except InvalidText as error:
        raise InvalidText(f"{ascii(path)[1:-1]}: {error}") from None
    return str(text)
