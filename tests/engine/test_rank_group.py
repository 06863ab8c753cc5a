"""Ranks as processes: they meet, they follow, and a death is noticed and named."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from engine.clock import MonotonicClock
from engine.rank_group import GroupConfig, RankGroup, RankLost
from model.checksum_reference import checksum_continuation
from model.comm import SingleComm
from tests.engine.small_worker import CONFIG, SmallWorker

MODULE = "tests.engine.rank_process"


@contextmanager
def worker_of(size: int, deaths: list[Exception]) -> Iterator[tuple[SmallWorker, RankGroup]]:
    worker: SmallWorker | None = None

    def lost(reason: str) -> None:
        if worker is not None:
            worker.engine.lose(reason)

    group = RankGroup(GroupConfig(size), MODULE, ["--flavour", "test"], on_lost=lost)
    group.start()
    try:
        group.publish("settings", {"size": size, "num_blocks": 64})
        for rank in range(1, size):
            note = group.wait(f"rank/{rank}", timeout_s=60)
            assert note == {"rank": rank, "arguments": ["--flavour", "test"]}
        comm = group.connect()
        worker = SmallWorker(comm=comm, lost_rank=group.lost, on_death=deaths.append)
        worker.engine.start()
        yield worker, group
        assert worker.engine.stop()
    finally:
        group.stop()


def test_processes_follow_and_the_death_of_one_ends_every_request_within_3_s() -> None:
    deaths: list[Exception] = []
    clock = MonotonicClock()
    with worker_of(2, deaths) as (worker, group):
        heard = worker.add([1] * 50, 20)
        heard.wait()
        assert heard.text == checksum_continuation(CONFIG, [1] * 50, 20)
        assert_all_on_loopback([os.getpid(), *group.pids])
        running = [worker.add([i] * 20, 900) for i in range(1, 4)]
        while worker.engine.stats().generated_tokens < 30:
            threading.Event().wait(0.005)
        (pid,) = group.pids
        killed = clock.now()
        os.kill(pid, signal.SIGKILL)
        for heard in running:
            heard.wait(3.0)
            assert heard.failure is not None
            assert heard.failure.code == "UNAVAILABLE"
        assert clock.now() - killed < 3.0
        sentence = f"rank 1 (pid {pid}) was ended by signal 9"
        assert [str(death) for death in deaths] == [sentence]
        assert isinstance(deaths[0], RankLost)
        with pytest.raises(RankLost, match="was ended by signal 9"):
            group.check()


def assert_all_on_loopback(pids: list[int]) -> None:
    """Every IPv4 and IPv6 socket of these processes has 127.0.0.1 as its own address."""
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        inodes = set()
        for name in os.listdir(folder):
            with suppress(FileNotFoundError):  # the listing's own, or one closed meanwhile
                link = os.readlink(f"{folder}/{name}")
                inodes |= {link[8:-1]} if link.startswith("socket:[") else set()
        assert inodes
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes:
                    assert fields[1].partition(":")[0].endswith("0100007F"), line


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_an_engine_that_waits_for_a_hung_rank_is_free_once_the_group_is_stopped() -> None:
    deaths: list[Exception] = []
    with worker_of(2, deaths) as (worker, group):
        worker.add([1] * 20, 900)
        while worker.engine.stats().generated_tokens < 5:
            threading.Event().wait(0.005)
        os.kill(group.pids[0], signal.SIGSTOP)
        stopped = MonotonicClock().now()
        group.stop(grace_s=0.0)
        assert worker.engine.stop()
        assert MonotonicClock().now() - stopped < 5
        assert len(deaths) == 1


def test_idle_processes_leave_when_told_and_are_not_missed() -> None:
    deaths: list[Exception] = []
    with worker_of(3, deaths) as (_, group):
        pids = group.pids
        assert all(map(is_running, pids))
    assert deaths == []
    assert not any(map(is_running, pids))
    assert group.lost() is None


def test_a_rank_that_falls_at_once_is_named_and_not_waited_for() -> None:
    told: list[str] = []
    group = RankGroup(GroupConfig(2), MODULE, ["--fall-at-once"], on_lost=told.append)
    group.start()
    try:
        with pytest.raises(RankLost, match=r"rank 1 \(pid \d+\) exited with status 3"):
            group.wait("rank/1", timeout_s=60)
    finally:
        group.stop()
    assert len(told) <= 1


def test_a_rank_that_never_speaks_is_waited_for_no_longer_than_said_and_then_ended() -> None:
    group = RankGroup(GroupConfig(2), MODULE)
    group.start()
    with pytest.raises(TimeoutError, match=r"nobody published 'rank/1' within 0.1 s"):
        group.wait("rank/1", timeout_s=0.1)  # it waits for settings, which never come
    (pid,) = group.pids
    group.stop(grace_s=0.0)
    assert not is_running(pid)


def test_a_group_of_one_has_no_processes() -> None:
    group = RankGroup(GroupConfig(1), MODULE)
    group.start()
    assert isinstance(group.connect(), SingleComm)
    assert (group.pids, group.lost()) == ((), None)
    group.stop()


LEADER = """
import sys, threading
from engine.rank_group import GroupConfig, RankGroup
group = RankGroup(GroupConfig(2), "tests.engine.rank_process")
starter = threading.Thread(target=group.start)
starter.start()
starter.join()  # a rank lives as long as rank 0, not as the thread that asked for it
group.publish("settings", {"size": 2, "num_blocks": 8})
group.wait("rank/1", 60)
print(*group.pids, flush=True)
sys.stdin.read()
"""


def test_ranks_die_with_rank_0_however_it_dies() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert leader.stdout is not None
    pid = int(leader.stdout.readline())
    assert is_running(pid)
    leader.kill()
    leader.wait()
    for _ in range(300):
        if not is_running(pid):
            return
        threading.Event().wait(0.01)
    raise AssertionError("rank 1 has outlived rank 0 by 3 s")
