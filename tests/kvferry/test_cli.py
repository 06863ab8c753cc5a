import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.errors import CommandError
from kvferry.flags import flags_of

COMMANDS = {
    *("audit", "up", "demo", "ask", "chat", "ps", "stats", "plan", "replay", "router", "prefill"),
    *("decode", "bench", "lab", "capacity", "settings"),
}


def kvferry(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry", *arguments],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_command() -> None:
    shown = kvferry("--help")
    assert shown.returncode == 0
    assert {name for name in COMMANDS if f" {name} " in shown.stdout} == COMMANDS


def test_the_version_is_said() -> None:
    assert re.fullmatch(r"kvferry \d+\.\d+\.\d+\n", kvferry("--version").stdout)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_says_what_it_is_for(command: str) -> None:
    shown = kvferry(command, "--help")
    assert shown.returncode == 0
    assert f"Usage: kvferry {command}" in shown.stdout.replace("python -m kvferry", "kvferry")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["up", "-c", "none.yaml"], "cannot read the settings file none.yaml"),
        (["up", "--launcher", "docker"], "launcher = 'docker'"),
        (["up", "--decode-tp", "0"], "decode.tp = 0"),
        (["up", "--set", "decode.tpp=1"], "there is no setting decode.tpp"),
        (["decode", "--set", "nonsense"], "--set takes KEY=VALUE"),
        (["ask", "hello"], "no cluster is running: start one with `kvferry up`"),
        (["chat"], "no cluster is running: start one with `kvferry up`"),
        (
            ["ps"],
            "no cluster is running: start one with `kvferry up`, or say where one is with --r",
        ),
        (["stats"], "or say where one is with --http URL"),
        (["ask", "--grpc", "127.0.0.1:1", "--seed", "-1", "hello"], "seed must be a whole number"),
        (["ask", "--grpc", "127.0.0.1:1", "--max-tokens", "9" * 30, "hi"], "max_tokens must be a"),
        (["ask", "--grpc", "127.0.0.1:1", "--api-key", "a\nb", "hello"], "the API key must be of"),
        (["ask", "--grpc", "127.0.0.1:1", "hello"], "no router answers at 127.0.0.1:1"),
        (["replay", "trace.jsonl", "--out", "/proc/x/y.json"], "--out /proc/x/y.json cannot be"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    shown = kvferry(*arguments, KVFERRY_STATE_DIR=str(tmp_path / "state"))
    assert shown.returncode == 1
    assert sentence in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1
    assert "Traceback" not in shown.stderr


def test_raw_bytes_in_a_question_are_refused(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "kvferry", "ask", "--grpc", "127.0.0.1:1", b"\xff\xfe"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert shown.returncode == 1
    assert b"not valid UTF-8" in shown.stderr


def test_up_says_something_at_once_and_names_a_port_in_use(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "kvferry", "up", "--http-port", str(port)]
        asked = time.monotonic()
        process = subprocess.Popen(
            [*command, "--state-dir", str(tmp_path / "state")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith("kvferry  model smollm2")
        waited = time.monotonic() - asked
        _, stderr = process.communicate(timeout=60)
    assert waited < 3, "a second on an idle machine, and some more on a busy one"
    assert process.returncode == 1
    assert f"port {port} of 127.0.0.1 cannot be used" in stderr
    assert "--http-port" in stderr


def test_flags_go_into_their_sections_and_absent_ones_leave_no_trace() -> None:
    flags = flags_of(
        ["decode.num_blocks=64"], model="checksum", launcher=None, decode__tp=3, router__http_port=1
    )
    assert flags == {
        "model": "checksum",
        "decode": {"num_blocks": 64, "tp": 3},
        "router": {"http_port": 1},
    }
    with pytest.raises(CommandError, match="hides the flags"):
        flags_of(["decode=3"], decode__tp=1)


@pytest.mark.parametrize("option", ["--out", "--plot"])
@pytest.mark.parametrize("command", ["replay", "capacity", "bench transfer", "bench serve"])
def test_what_could_not_be_kept_is_refused_before_anything_runs(
    command: str, option: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "figures")
    line = [*command.split(), option, place]
    if command != "bench transfer":
        line.insert(len(command.split()), "no-such-trace.jsonl")
    result = CliRunner().invoke(app, line)
    assert isinstance(result.exception, CommandError)
    assert str(result.exception).startswith(f"{option} {place} cannot be written: ")


@pytest.mark.parametrize("address", ["", "nonsense", ":50051", "host:", "host:http", "host:70000"])
@pytest.mark.parametrize("command", [["ask", "hello"], ["chat"], ["bench", "serve", "TRACE"]])
def test_a_router_s_address_that_is_none_is_refused_before_anybody_is_asked(
    command: list[str], address: str
) -> None:
    result = CliRunner().invoke(app, [*command, "--grpc", address])
    assert str(result.exception) == (
        f"--grpc must be HOST:PORT, such as 127.0.0.1:50051, got {address!r}"
    )
