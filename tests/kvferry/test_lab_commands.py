import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.errors import CommandError
from kvferry.lab.commands import own_options
from kvferry.lab.lab import read_record
from kvferry.lab.namespaces import why_no_namespaces
from kvferry.lab.netns import FOLDER

NO_NAMESPACES = why_no_namespaces()
needs_namespaces = pytest.mark.skipif(NO_NAMESPACES is not None, reason=str(NO_NAMESPACES))


def lab(state_dir: Path, command: str, *arguments: str) -> str:
    """What the command says, on either stream; in this process, which is much quicker."""
    line = ["lab", command, "--state-dir", str(state_dir), *arguments]
    result = CliRunner().invoke(app, line)
    if isinstance(result.exception, CommandError):
        return f"kvferry: {result.exception}"
    assert result.exit_code == 0
    return result.output


def lab_exec(state_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry", "lab", "exec", "--state-dir", str(state_dir), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextlib.contextmanager
def lab_up(
    state_dir: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A running `lab up`, and the address that it printed for each node."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvferry", "lab", "up", "--state-dir", str(state_dir), *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    hosts = {}
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(" ✔ "):
                _, node, host = line.split()
                hosts[node] = host
            if "stop  Ctrl-C" in line:
                break
        yield process, hosts
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()  # type: ignore[union-attr]


def test_what_cannot_be_done_is_said_in_one_sentence(tmp_path: Path) -> None:
    for arguments, sentence in (
        (["up", "--nodes", "1"], "a lab has 2 to 16 nodes"),
        (["up", "--kind", "vm"], "'vm' is no kind of lab: namespaces or proxy"),
        (["cut", "a", "b"], "no lab is running: start one with `kvferry lab up"),
        (["exec", "a", "true"], "no lab is running"),
        (["loss", "a", "b", "often"], "'often' is no loss"),
        (["exec", "a", "--verbose", "true"], "lab exec has no option --verbose"),
        (["exec", "a", "--state-dir"], "--state-dir needs a folder"),
        (["exec", "a", "--state-dir", "/nowhere", "--"], "say what to run"),
    ):
        said = lab(tmp_path, *arguments)
        assert said.startswith("kvferry: ") and sentence in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "folder", "command"),
    [
        (["--state-dir", "/x", "--", "ls", "-l"], Path("/x"), ["--", "ls", "-l"]),
        (["--state-dir=/x", "ls", "--state-dir", "y"], Path("/x"), ["ls", "--state-dir", "y"]),
        (["--", "ls", "--state-dir", "y"], None, ["--", "ls", "--state-dir", "y"]),
        (["ls", "-l"], None, ["ls", "-l"]),
    ],
)
def test_the_labs_options_come_before_the_command_and_the_commands_stay_its_own(
    words: list[str], folder: Path | None, command: list[str]
) -> None:
    assert own_options(words) == (folder, command)


def test_a_lab_of_proxies_is_shown_changed_and_ended_from_another_terminal(tmp_path: Path) -> None:
    with lab_up(tmp_path, "--kind", "proxy", "--link", "1gbit,5ms") as (process, hosts):
        assert hosts == {"a": "127.0.0.1", "b": "127.0.0.1"}
        assert "a lab already runs" in lab(tmp_path, "up", "--kind", "proxy")
        address = lab(tmp_path, "address", "a", "b", "7000").strip()
        assert address.startswith("127.0.0.1:") and address != "127.0.0.1:7000"
        assert lab(tmp_path, "address", "a", "b", "7000").strip() == address
        assert lab_exec(tmp_path, "a", "--", "echo", "-n", "hello").stdout == "hello"
        assert lab(tmp_path, "cut", "a", "b", "--one-way") == ""
        assert lab(tmp_path, "loss", "a", "b", "0.5%", "--one-way") == ""
        rows = [line.split() for line in lab(tmp_path, "show").splitlines()]
        assert ["a", "b", "1gbit,", "5", "ms,", "0.5%", "lost", "cut"] in [r[:8] for r in rows]
        assert ["b", "a", "1gbit,", "5", "ms", "whole"] in [row[:6] for row in rows]
        assert "there is no node c" in lab(tmp_path, "heal", "c")
        assert lab(tmp_path, "heal") == ""
        assert lab(tmp_path, "down") == "stopped\n"
        assert process.wait(10) == 0
    assert "none has left anything" in lab(tmp_path, "down")


@needs_namespaces
def test_a_lab_of_namespaces_runs_commands_inside_them_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    nodes = ("--nodes", "prefill,decode", "--link", "200mbit,5ms")
    with lab_up(tmp_path, *nodes) as (process, hosts):
        assert hosts == {"prefill": "10.97.0.1", "decode": "10.97.0.2"}
        names = read_record(tmp_path / "lab").namespaces.values()
        shown = lab_exec(tmp_path, "decode", "--", "ip", "-o", "link", "show", "up")
        assert "to-prefill" in shown.stdout and "mtu 9000" in shown.stdout
        assert lab_exec(tmp_path, "decode", "false").returncode == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    assert not [name for name in names if (FOLDER / name).exists()]


@needs_namespaces
def test_what_a_killed_lab_leaves_is_removed_by_down(tmp_path: Path) -> None:
    with lab_up(tmp_path, "--link", "1gbit,1ms") as (process, _):
        names = list(read_record(tmp_path / "lab").namespaces.values())
        process.kill()
        process.wait(10)
    assert all((FOLDER / name).exists() for name in names)
    assert "no lab is running" in lab(tmp_path, "show")
    assert lab(tmp_path, "down") == f"removed what a killed lab left: {', '.join(names)}\n"
    assert not [name for name in names if (FOLDER / name).exists()]


def test_without_the_tools_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("elsewhere no tool would help")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "which", lambda name: None)
        assert why_no_namespaces() == (
            "network namespaces need ip and tc: install with `apt-get install iproute2 nftables`"
        )
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_no_namespaces() == "network namespaces need root: start it with sudo"
