import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from engine.clock import MonotonicClock
from kvferry.errors import PartFailed
from kvferry.launcher import Part, PartEvent, PartState, Role
from kvferry.local_launcher import LocalLauncher, Patience
from kvferry.ray_launcher import RayLauncher


class Given(BaseModel):
    name: str
    broken: bool = False


def actor_class() -> type:
    """Made here, so that Ray carries it by value: its workers cannot import this file."""

    class Worker:
        def __init__(self, settings_json: str) -> None:
            self.settings: dict[str, Any] = json.loads(settings_json)
            if self.settings["broken"]:
                raise ValueError("the weights are made of cheese")

        def ready(self) -> dict[str, Any]:
            return {"name": self.settings["name"], "token": os.environ["RAY_AUTH_MODE"]}

        def pid(self) -> int:
            return os.getpid()

        def stop(self) -> None:
            return None

    return Worker


class Stage:
    def __init__(self, folder: Path) -> None:
        self.events: list[PartEvent] = []
        clock, patience = MonotonicClock(), Patience(start=60, stop=5)
        local = LocalLauncher(folder, self.events.append, clock, patience)
        self.launcher = RayLauncher(
            2, local, self.events.append, clock, patience, actor_class=actor_class()
        )

    async def until(self, name: str, state: PartState, count: int) -> None:
        async with asyncio.timeout(60):
            while [(e.name, e.state) for e in self.events].count((name, state)) < count:
                await asyncio.sleep(0.05)


def part(name: str, *, broken: bool = False) -> Part:
    return Part(name, Role.PREFILL, Given(name=name, broken=broken))


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


LISTENS = "0A"
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def heard_beyond_loopback() -> list[str]:
    """Where Ray's processes, and Ray's part in ours, listen for other hosts: the kernel's lists."""
    token = f"RAY_AUTH_TOKEN_PATH={os.environ['RAY_AUTH_TOKEN_PATH']}".encode()
    inodes, num_processes = set(), 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if token in (folder / "environ").read_bytes() or folder.name == str(os.getpid()):
                num_processes += 1
                for fd in (folder / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    assert num_processes > 4  # its head, its node and two workers besides us
    rows = [line.split() for name in ("tcp", "tcp6") for line in _lines(f"/proc/net/{name}")]
    places = [row[1] for row in rows if row[3] == LISTENS and row[9] in inodes]
    assert places
    return [place for place in places if place.split(":")[0] not in LOOPBACK]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()[1:] if Path(path).exists() else []


async def test_ray_places_workers_brings_a_killed_one_back_and_ends_with_the_launcher(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    handles = await asyncio.gather(
        *(stage.launcher.start(part(name)) for name in ("prefill-0", "prefill-1"))
    )
    assert handles[0].info == {"name": "prefill-0", "token": "token"}
    first, other = handles[0].pid, handles[1].pid
    assert first is not None
    assert other is not None
    assert first != other
    assert heard_beyond_loopback() == []

    os.kill(first, signal.SIGKILL)
    await stage.until("prefill-0", PartState.DIED, 1)
    await stage.until("prefill-0", PartState.READY, 2)
    assert handles[0].pid != first
    assert handles[1].pid == other

    last = handles[0].pid
    await stage.launcher.stop()
    assert last is not None
    async with asyncio.timeout(10):
        while runs(last) or runs(other):
            await asyncio.sleep(0.05)
    assert "RAY_AUTH_MODE" not in os.environ


async def test_a_worker_that_cannot_start_says_why_and_a_second_ray_may_follow_the_first(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    with pytest.raises(PartFailed, match="prefill-0 did not start: the weights are made of cheese"):
        await stage.launcher.start(part("prefill-0", broken=True))
    await stage.launcher.stop()
