import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pydantic import BaseModel

from engine.clock import MonotonicClock
from kvferry.die_with_parent import wrap
from kvferry.errors import PartFailed
from kvferry.launcher import Part, PartEvent, PartState, Role
from kvferry.local_launcher import LocalLauncher, Patience
from kvferry.state import open_state_dir

QUICK = Patience(start=10, stop=5, first_backoff=0.01, max_backoff=0.02)

SERVES = """
import json, os, signal, sys, time
settings = json.load(open(sys.argv[1]))
with os.fdopen(int(sys.argv[2]), "w") as pipe:
    pipe.write(json.dumps({"ready": {"pid": os.getpid(), "settings": settings}}) + "\\n")
time.sleep(600)
"""
REFUSES = """
import json, os, sys
with os.fdopen(int(sys.argv[2]), "w") as pipe:
    pipe.write(json.dumps({"error": "port 1 is in use"}) + "\\n")
sys.exit(1)
"""
CRASHES = "print('the weights are made of cheese'); raise SystemExit(7)"
IS_SILENT = "import time; time.sleep(600)"
IS_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVES


class Given(BaseModel):
    name: str
    secret: str = "s3cret"


class Stage:
    """A launcher whose parts are small scripts, and what it reported."""

    def __init__(self, folder: Path, script: str, patience: Patience = QUICK) -> None:
        open_state_dir(folder)
        self.folder = folder
        self.events: list[PartEvent] = []
        self.launcher = LocalLauncher(
            folder,
            self.events.append,
            MonotonicClock(),
            patience,
            lambda part, file, fd: [sys.executable, "-c", script, str(file), str(fd)],
        )

    def states(self, name: str) -> list[PartState]:
        return [event.state for event in self.events if event.name == name]

    async def until(self, name: str, states: list[PartState]) -> None:
        async with asyncio.timeout(10):
            while self.states(name) != states:
                await asyncio.sleep(0.01)


def part(name: str) -> Part:
    return Part(name, Role.PREFILL, Given(name=name))


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_part_gets_its_settings_by_a_private_file_and_says_when_it_is_ready(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, SERVES)
    handle = await stage.launcher.start(part("prefill-0"))
    assert handle.alive
    assert handle.info == {
        "pid": handle.pid,
        "settings": {"prefill": {"name": "prefill-0", "secret": "s3cret"}},
    }
    assert (tmp_path / "parts" / "prefill-0.json").stat().st_mode & 0o777 == 0o600
    await stage.launcher.stop()
    assert not handle.alive
    assert stage.states("prefill-0") == [PartState.STARTING, PartState.READY, PartState.STOPPED]


async def test_a_killed_part_begins_a_new_life(tmp_path: Path) -> None:
    stage = Stage(tmp_path, SERVES)
    handle = await stage.launcher.start(part("decode-0"))
    first = handle.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    lives = [PartState.STARTING, PartState.READY]
    await stage.until("decode-0", [*lives, PartState.DIED, *lives])
    died = stage.events[2]
    assert died.text == "killed by SIGKILL"
    assert handle.alive
    assert handle.pid != first
    await stage.launcher.stop()


async def test_stopping_ends_the_parts_started_here_and_nothing_else(tmp_path: Path) -> None:
    stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", IS_SILENT)
    stage = Stage(tmp_path, SERVES)
    handles = [await stage.launcher.start(part(name)) for name in ("a", "b")]
    pids = [handle.pid for handle in handles]
    await stage.launcher.stop()
    assert not any(runs(pid) for pid in pids if pid is not None)
    assert stranger.returncode is None
    stranger.kill()
    await stranger.wait()


async def test_a_part_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, IS_STUBBORN, Patience(start=10, stop=0.2))
    handle = await stage.launcher.start(part("a"))
    pid = handle.pid
    assert pid is not None
    await stage.launcher.stop()
    assert not runs(pid)


@pytest.mark.parametrize(
    ("script", "patience", "sentence"),
    [
        (REFUSES, QUICK, "router did not start: port 1 is in use"),
        (CRASHES, QUICK, "router did not start: ended with status 7: the weights are made of"),
        (IS_SILENT, Patience(start=0.3, stop=5), "router did not start: not ready after 0.3 s"),
    ],
)
async def test_a_first_start_that_fails_says_why_in_one_sentence_and_leaves_no_process(
    tmp_path: Path, script: str, patience: Patience, sentence: str
) -> None:
    stage = Stage(tmp_path, script, patience)
    with pytest.raises(PartFailed, match=sentence):
        await stage.launcher.start(part("router"))
    assert stage.states("router") == [PartState.STARTING, PartState.FAILED]
    await stage.launcher.stop()


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    report = tmp_path / "pid"
    script = f"import os, time; open({str(report)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    stage = Stage(tmp_path / "state", script)
    starting = asyncio.create_task(stage.launcher.start(part("a")))
    async with asyncio.timeout(10):
        while not report.exists() or not report.read_text():
            await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert not runs(int(report.read_text()))


def test_children_end_with_their_parent_however_it_ends() -> None:
    child = wrap([sys.executable, "-c", "import time; time.sleep(600)"], 0)
    code = textwrap.dedent(f"""
        import os, subprocess, time
        command = {child!r}
        command[command.index("0")] = str(os.getpid())
        print(subprocess.Popen(command).pid, flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert runs(pid)
    parent.kill()
    parent.wait()
    status = subprocess.run(
        [sys.executable, "-c", WAIT_UNTIL_GONE, str(pid)], check=False, timeout=20
    )
    assert status.returncode == 0


WAIT_UNTIL_GONE = """
import pathlib, sys, time
stat = pathlib.Path("/proc", sys.argv[1], "stat")
for _ in range(1000):
    if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
        sys.exit(0)
    time.sleep(0.01)
sys.exit(1)
"""
