"""How fast a client wants its answer, and how much that matters to it."""

from dataclasses import dataclass

MAX_TARGET_MS = 86_400_000.0
MAX_PRIORITY = 100
MAX_SESSION_CHARS = 128


@dataclass(frozen=True, slots=True)
class Targets:
    """0 asks for nothing. A target that is missed makes a way dearer; `strict` makes it unusable,
    and a request without a usable way is refused at once.
    """

    ttft_ms: float = 0.0  # to the first token
    token_ms: float = 0.0  # each further one
    deadline_ms: float = 0.0  # to the first token, at the latest: strict in any case
    strict: bool = False


NO_TARGETS = Targets()
