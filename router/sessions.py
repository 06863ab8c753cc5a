"""Where the requests of a session went last.

The index tells who holds a prompt's blocks; a session says a little more: who holds, or is about
to, what nobody has announced yet, and who has just decoded the answer that the next prompt begins
with. A session belongs to its tenant: equal keys of two tenants are two sessions.
"""

from dataclasses import dataclass

from engine.clock import Clock


@dataclass(frozen=True, slots=True)
class Home:
    """The names of the workers; `prefill` is empty where decode computed the prompt."""

    prefill: str
    decode: str
    at: float


class Sessions:
    """Remembers the latest `max_sessions`, for `keep_s` after their last request."""

    def __init__(self, clock: Clock, keep_s: float = 600.0, max_sessions: int = 100_000) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._max_sessions = max_sessions
        self._homes: dict[tuple[bytes, str], Home] = {}  # the longest unused first

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, tenant_key: bytes, session: str) -> Home | None:
        found = self._homes.get((tenant_key, session)) if session else None
        if found is None or self._clock.now() - found.at > self._keep_s:
            return None
        return found

    def note(self, tenant_key: bytes, session: str, prefill: str, decode: str) -> None:
        if not session:
            return
        key = (tenant_key, session)
        self._homes.pop(key, None)
        self._homes[key] = Home(prefill, decode, self._clock.now())
        while len(self._homes) > self._max_sessions:
            del self._homes[next(iter(self._homes))]
