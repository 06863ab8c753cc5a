"""Prompts that all tenants may share: the operator says which, never a request.

Sharing tells a tenant, by the time it takes, that others sent the same. Of a text that the operator
has made public that is no secret, and of what follows it in a prompt nothing is shared.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

ENOUGH_TO_TELL = 16  # tokens by which most prompts differ


class Encodes(Protocol):
    """The part of a served model that this needs."""

    def encode_text(self, text: str) -> list[int]: ...

    def encode_chat(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool
    ) -> list[int]: ...


class PublicPrompts:
    def __init__(self, prompts: Iterable[Sequence[int]] = ()) -> None:
        self._prompts = [tuple(prompt) for prompt in prompts]

    @classmethod
    def of(cls, model: Encodes, texts: Iterable[str]) -> "PublicPrompts":
        """Each text as a completion begins with it, and as a chat whose system message it is."""
        known = list(texts)
        return cls(
            [*map(model.encode_text, known), *(_as_system_message(model, each) for each in known)]
        )

    def num_shared(self, prompt: Sequence[int]) -> int:
        """How many of its tokens, from the first on, are those of a public prompt."""
        return max((_common(prompt, each) for each in self._prompts), default=0)


def _as_system_message(model: Encodes, text: str) -> Sequence[int]:
    """What two chats have in common that differ in what the user says; nothing where the model's
    template takes no system message.
    """
    system = {"role": "system", "content": text}
    try:
        one, two = (
            model.encode_chat([system, {"role": "user", "content": said}], True) for said in "xy"
        )
    except ValueError:
        return ()
    return one[: _common(one, two)]


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """The length of their common beginning."""
    shorter = min(len(one), len(two))
    first = min(shorter, ENOUGH_TO_TELL)
    if tuple(one[:first]) == tuple(two[:first]):
        first = shorter
    pairs = zip(one[:first], two[:first], strict=True)
    return next((at for at, (mine, yours) in enumerate(pairs) if mine != yours), first)
