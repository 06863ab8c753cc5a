"""One role in the foreground: what pods run, and what the local launcher starts.

SIGTERM and SIGINT cancel the role's `run`, which drains and leaves the index; a second one ends
the process at once. With `ready_fd`, one line of JSON on that descriptor says how the start went.
"""

import asyncio
import importlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from kvferry.errors import CommandError
from kvferry.launcher import Role
from kvferry.settings import Settings
from kvferry.stop import Stop


class OnReady(Protocol):
    """Called once, when the role serves; `info` is what a person may want to know about it."""

    def __call__(self, info: Mapping[str, Any] | None = None) -> None: ...


Run = Callable[[Any, OnReady], Awaitable[None]]

_MODULES = {  # each has `async run(settings, on_ready)`; imported only for the role that runs
    Role.ROUTER: "router.main",
    Role.PREFILL: "prefill_worker.main",
    Role.DECODE: "decode_worker.main",
}


def run_role(role: Role, settings: Settings, ready_fd: int | None = None) -> int:
    """Serve until told to stop; the exit status."""
    say = _Word(ready_fd)
    try:
        run = _entry_point(role)
        section = getattr(settings, role.value)
        name = getattr(section, "name", role.value)
        asyncio.run(_serve(run, section, _Announcement(name, say)))
    except CommandError as error:
        return _give_up(str(error), say)
    except Exception as error:
        if not is_expected(error):
            say({"error": f"{type(error).__name__}: {error}", "in_log": True})
            raise
        return _give_up(" ".join(str(error).split()), say)
    return 0


def is_expected(error: Exception) -> bool:
    """Whether the message alone tells a person what to do: no traceback is owed."""
    named = {"BadModelFile", "CannotStart", "IndexUnavailable", "WorkerLost"}
    return isinstance(error, OSError) or bool(named & {kind.__name__ for kind in type(error).mro()})


def _entry_point(role: Role) -> Run:
    module = importlib.import_module(_MODULES[role])
    run: Run = module.run
    return run


async def _serve(run: Run, section: Any, on_ready: OnReady) -> None:
    loop = asyncio.get_running_loop()
    serving = asyncio.ensure_future(run(section, on_ready))
    stop = Stop(loop, serving.cancel)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await serving
    except asyncio.CancelledError:
        if not stop.told:
            raise


class _Word:
    """The one line that the process which started us waits for."""

    def __init__(self, ready_fd: int | None) -> None:
        self._ready_fd = ready_fd

    def __call__(self, word: Mapping[str, Any]) -> None:
        if self._ready_fd is not None:
            fd, self._ready_fd = self._ready_fd, None
            with os.fdopen(fd, "w") as pipe:
                pipe.write(json.dumps(word, default=str) + "\n")


class _Announcement:
    """What a role does when it is ready: one line for people, one word for our parent."""

    def __init__(self, name: str, say: _Word) -> None:
        self._name = name
        self._say = say

    def __call__(self, info: Mapping[str, Any] | None = None) -> None:
        details = describe(info or {})
        print(f"{self._name} ready: {details}" if details else f"{self._name} ready", flush=True)
        self._say({"ready": dict(info or {})})


def describe(info: Mapping[str, Any]) -> str:
    """A part's own summary, or else whatever it said."""
    return str(info.get("summary") or ", ".join(f"{key} {value}" for key, value in info.items()))


def _give_up(sentence: str, say: _Word) -> int:
    say({"error": sentence})
    print(f"kvferry: {sentence}", file=sys.stderr, flush=True)
    return 1
