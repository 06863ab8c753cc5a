"""`kvferry up` and `kvferry demo` as a person runs them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.redis_server import free_port

pytestmark = pytest.mark.cluster

TIMEOUT_S = 180.0


class Up:
    """A running `kvferry up`, its output so far, and its children."""

    def __init__(self, folder: Path) -> None:
        self.state_dir = folder / "state"
        self._output = folder / "output"
        ports = ["--http-port", str(free_port(18000)), "--grpc-port", str(free_port(18001))]
        command = ["up", "--launcher", "local", "--model", "checksum", *ports]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvferry", *command, "--state-dir", self.state_dir],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=_folder_of_somebody(folder),
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str, count: int = 1) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.output.count(text) < count:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def children(self) -> dict[int, str]:
        """Every process that was given something under our state directory."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if f"{self.state_dir}/parts" in command:
                found[int(path.parent.name)] = command
        return found

    def kvferry(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "kvferry", *arguments, "--state-dir", str(self.state_dir)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def _folder_of_somebody(folder: Path) -> Path:
    """Who works on models has a package `model`, which must not be taken for ours."""
    theirs = folder / "theirs"
    (theirs / "model").mkdir(parents=True)
    (theirs / "model" / "__init__.py").write_text("raise SystemExit('not what was meant')\n")
    return theirs


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path)
    try:
        up.wait_for("ready  http://")
        yield up
    finally:
        up.process.kill()
        up.process.wait()


def _second_up(redis_url: str, folder: Path) -> str:
    """What a cluster of the same names is told that wants to share the Redis."""
    command = ["up", "--launcher", "local", "--model", "checksum", "--redis-url", redis_url]
    command += ["--http-port", "0", "--grpc-port", "0", "--state-dir", str(folder / "second")]
    command += ["--set", "prefill.lease_s=0.1", "--set", "decode.lease_s=0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", *command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr


def test_up_serves_keeps_others_out_survives_a_kill_and_stops_what_it_started(
    cluster: Up, tmp_path: Path
) -> None:
    assert "valkey" in cluster.output or "redis" in cluster.output
    for part in ("redis", "router", "prefill-0", "prefill-1", "decode-0"):
        assert f"✔ {part} " in cluster.output

    answer = cluster.kvferry("ask", "hello", "there", "--max-tokens", "4", "--explain")
    assert "decode-0" in answer
    assert "4 tokens" in answer
    workers = cluster.kvferry("ps")
    assert "every prefill worker can serve every decode worker" in workers

    url = json.loads((cluster.state_dir / "cluster.json").read_text())["redis_url"]
    refused = _second_up(url, tmp_path)
    assert "decode-0, prefill-0, prefill-1 of another cluster live in redis://" in refused
    assert "give this one a --set key_prefix=NAME of its own" in refused
    assert url not in refused  # it has a password
    assert "✘" not in cluster.output

    (decode,) = (pid for pid, line in cluster.children().items() if "decode-0.json" in line)
    os.kill(decode, signal.SIGKILL)
    cluster.wait_for("✘ decode-0")
    cluster.wait_for("✔ decode-0", count=2)
    cluster.kvferry("ask", "hello again", "--max-tokens", "4")

    assert len(cluster.children()) == 4
    cluster.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    cluster.process.send_signal(signal.SIGINT)  # as `timeout` does, and others that tell a group
    assert cluster.process.wait(TIMEOUT_S) == 0
    assert cluster.output.endswith("stopped\n")
    assert cluster.children() == {}


def test_nothing_outlives_an_up_that_was_killed(cluster: Up) -> None:
    assert len(cluster.children()) == 4
    cluster.process.kill()
    cluster.process.wait()
    deadline = time.monotonic() + 20
    while cluster.children():
        assert time.monotonic() < deadline, cluster.children()
        time.sleep(0.05)


@pytest.mark.timeout(600)
def test_the_demo_names_paris_reuses_the_shared_prompt_and_leaves_in_order() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "demo"],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "prompt tokens were not computed again" in done.stdout
    assert done.stdout.count("first token") == 3
    assert "Traceback" not in done.stdout + done.stderr
