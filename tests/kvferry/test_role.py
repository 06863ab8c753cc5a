import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest

from kvferry import role as role_module
from kvferry.launcher import Role
from kvferry.role import describe, run_role
from kvferry.settings import load

Body = Callable[[Any, Any], Awaitable[None]]


class BadModelFile(Exception):
    """As model.errors has it: known by its name."""


class Stage:
    """`kvferry decode` with another body, and the pipe it answers over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, body: Body) -> None:
        module = ModuleType("fake_role")
        module.run = body  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_role", module)
        monkeypatch.setitem(role_module._MODULES, Role.DECODE, "fake_role")
        self._read_fd, self._write_fd = os.pipe()

    def run(self) -> int:
        return run_role(Role.DECODE, load(flags={"model": "checksum"}), self._write_fd)

    def word(self) -> dict[str, Any]:
        with os.fdopen(self._read_fd) as pipe:
            word = json.loads(pipe.readline())
            assert isinstance(word, dict)
            return word


def test_a_role_says_when_it_is_ready_and_leaves_in_order_at_sigterm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[str] = []

    async def body(settings: Any, on_ready: Any) -> None:
        on_ready({"summary": "64 blocks", "model": settings.model})
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # the same one, as `timeout` sends it to the group
            await asyncio.sleep(0.01)
            steps.append("drained")

    stage = Stage(monkeypatch, body)
    assert stage.run() == 0
    assert steps == ["drained"]
    assert stage.word() == {"ready": {"summary": "64 blocks", "model": "checksum"}}
    assert capsys.readouterr().out == "decode-0 ready: 64 blocks\n"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (BadModelFile("weights.gguf ends early"), "weights.gguf ends early"),
        (OSError(98, "Address already in use"), "[Errno 98] Address already in use"),
    ],
)
def test_what_a_person_can_put_right_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    sentence: str,
) -> None:
    async def body(settings: Any, on_ready: Any) -> None:
        raise error

    stage = Stage(monkeypatch, body)
    assert stage.run() == 1
    assert stage.word() == {"error": sentence}
    assert capsys.readouterr().err == f"kvferry: {sentence}\n"


def test_our_own_bug_keeps_its_traceback_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(settings: Any, on_ready: Any) -> None:
        raise KeyError("oops")

    stage = Stage(monkeypatch, body)
    with pytest.raises(KeyError):
        stage.run()
    assert stage.word() == {"error": "KeyError: 'oops'", "in_log": True}


def test_a_part_is_described_by_its_summary_or_else_by_all_it_said() -> None:
    assert describe({"summary": "tp 2", "pid": 7}) == "tp 2"
    assert describe({"pid": 7, "tp": 2}) == "pid 7, tp 2"
    assert describe({}) == ""
