"""The processes of one worker: rank 0 starts the others, meets them, watches them, ends them.

    start      a store on a loopback socket of ours; ranks 1.. spawned as `python -m MODULE`
    meet       small JSON notes through the store: settings one way, addresses the other
    connect    shared memory, as ranks without GPUs are on one host; else a process group of exactly
               these ranks, beside torch's global one
    watch      a rank that ends is noticed within a tenth of a second, and named
    stop       ranks that have not left by themselves are terminated, then killed, by their pid

A rank dies with rank 0, whatever happens to rank 0: the kernel kills it (PR_SET_PDEATHSIG). That
signal comes when the parent's *thread* ends, so the thread that spawns the ranks is the one that
watches them, for as long as they live.
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from kernels import host_exchange
from model.comm import Comm, GroupComm, SingleComm
from model.host_comm import HostComm

log = logging.getLogger(__name__)

Note = dict[str, Any]

_PR_SET_PDEATHSIG = 1
_MEMORY = "memory"  # the note that says where what the ranks share is
_LOOK_S = 0.02  # between looks for a note
_WATCH_S = 0.1  # between looks at the ranks


class RankLost(Exception):
    """A rank of this worker is gone; the group cannot go on."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    size: int
    backend: Literal["memory", "gloo", "nccl"] = "memory"  # gloo where there is no compiler
    host: str = "127.0.0.1"  # where the ranks of this one machine meet
    collective_timeout_s: float = 60.0  # a rank that computes this long without a word is lost


class _Board:
    """Notes that the ranks leave for one another."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def publish(self, key: str, note: Note) -> None:
        self._store.set(f"note/{key}", json.dumps(note))

    def wait(self, key: str, timeout_s: float, check: Callable[[], None]) -> Note:
        """The note under `key`, once it is there; TimeoutError, or whatever `check` raises."""
        name = f"note/{key}"
        pause = threading.Event()
        for _ in range(max(1, round(timeout_s / _LOOK_S))):
            if self._store.check([name]):
                note: Note = json.loads(self._store.get(name))
                return note
            check()
            pause.wait(_LOOK_S)
        raise TimeoutError(f"nobody published {key!r} within {timeout_s:g} s")


class RankGroup:
    """Rank 0's hold on the others. A group of one has no store and no processes."""

    def __init__(
        self,
        config: GroupConfig,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`module` is run as `python -m module *arguments --rank R --store HOST:PORT --parent PID`,
        with `environment` added to ours; it calls `join` first. `on_lost` is called at most once,
        on the watching thread.
        """
        self._config = config
        self._module = module
        self._arguments = tuple(arguments)
        self._environment = dict(environment or {})
        self._on_lost = on_lost
        self._store: Store | None = None
        self._comm: Comm | None = None
        self._memory: int | None = None  # the descriptor of what the ranks share
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watcher: threading.Thread | None = None
        self._spawned = threading.Event()
        self._stopping = threading.Event()
        self._lost: str | None = None
        self._failure: OSError | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Of ranks 1 and up."""
        return tuple(process.pid for process in self._processes)

    def start(self) -> None:
        """Spawn the other ranks. Raises OSError if the machine refuses."""
        if self._config.size == 1:
            return
        listener = socket.create_server((self._config.host, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            self._config.host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._config.collective_timeout_s),
            master_listen_fd=listener.detach(),  # by itself it would listen on every interface
        )
        address = f"{self._config.host}:{port}"
        self._watcher = threading.Thread(
            target=self._spawn_and_watch, args=(address,), name="rank-watch", daemon=True
        )
        self._watcher.start()
        self._spawned.wait()
        if self._failure is not None:
            raise self._failure

    def publish(self, key: str, note: Note) -> None:
        if self._store is not None:
            _Board(self._store).publish(key, note)

    def wait(self, key: str, timeout_s: float) -> Note:
        """A rank's note. Raises RankLost if a rank ends first, TimeoutError after `timeout_s`."""
        assert self._store is not None, "a group of one waits for nobody"
        return _Board(self._store).wait(key, timeout_s, self.check)

    def connect(self, device: torch.device | str = "cpu") -> Comm:
        """Form the group; every rank calls this at about the same time."""
        if self._store is None:
            return SingleComm()
        self.check()
        self._comm = self._in_memory()
        if self._comm is None:
            self._comm = GroupComm(_process_group(self._config, self._store, 0), device)
        return self._comm

    def _in_memory(self) -> HostComm | None:
        """Tell the others where the shared memory is, or that there is none."""
        exchange = host_exchange.load() if self._config.backend == "memory" else None
        if exchange is None:
            if self._config.backend == "memory":
                log.warning("no C compiler: ranks exchange over loopback sockets, which is slower")
            self.publish(_MEMORY, {})
            return None
        size = self._config.size
        memory, self._memory = HostComm.make_memory(size)
        self.publish(_MEMORY, {"pid": os.getpid(), "descriptor": self._memory})
        return HostComm(exchange, memory, 0, size, self._config.collective_timeout_s)

    def lost(self) -> str | None:
        """Which rank is gone and how, if one is."""
        if self._lost is None and not self._stopping.is_set():
            endings = (_ending(rank, process) for rank, process in enumerate(self._processes, 1))
            self._lost = next(filter(None, endings), None)
        return self._lost

    def check(self) -> None:
        """Raise RankLost if a rank is gone."""
        reason = self.lost()
        if reason is not None:
            raise RankLost(reason)

    def stop(self, grace_s: float = 3.0) -> None:
        """End the ranks. They have `grace_s` to leave by themselves (they do when told by the
        engine's last plan), and a second more after SIGTERM.
        """
        self._stopping.set()
        _end(self._processes, grace_s)
        if self._comm is not None:
            self._comm.abort()  # our own engine may wait for one of them
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None
        self._comm = None
        self._store = None

    def _spawn_and_watch(self, address: str) -> None:
        try:
            for rank in range(1, self._config.size):
                self._processes.append(self._spawn(rank, address))
        except OSError as error:
            self._failure = error
            self._stopping.set()
            for process in self._processes:
                process.kill()
        self._spawned.set()
        while not self._stopping.wait(_WATCH_S):
            if self.lost() is not None:
                self._report()
                break
        for process in self._processes:
            process.wait()  # this thread must not end before they do

    def _spawn(self, rank: int, address: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", self._module, *self._arguments]
        command += ["--rank", str(rank), "--store", address, "--parent", str(os.getpid())]
        paths = [path or os.getcwd() for path in sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **self._environment}
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for rank 0, which then ends the others in order
        )

    def _report(self) -> None:
        assert self._lost is not None
        log.error("%s", self._lost)
        self._on_lost(self._lost)
        if self._comm is not None:
            self._comm.abort()


@dataclass(frozen=True, slots=True)
class RankSeat:
    """What a rank above 0 knows when it starts."""

    rank: int
    store: Store

    def publish(self, key: str, note: Note) -> None:
        _Board(self.store).publish(key, note)

    def wait(self, key: str, timeout_s: float) -> Note:
        """Rank 0's note, or another's; TimeoutError after `timeout_s`."""
        return _Board(self.store).wait(key, timeout_s, lambda: None)

    def connect(self, config: GroupConfig, device: torch.device | str = "cpu") -> Comm:
        """Form the group; every rank calls this at about the same time."""
        where = self.wait(_MEMORY, config.collective_timeout_s)
        exchange = host_exchange.load() if where else None
        if exchange is None:
            assert not where, "rank 0 has compiled what this rank cannot load"
            return GroupComm(_process_group(config, self.store, self.rank), device)
        memory = HostComm.map_memory(where["pid"], where["descriptor"], config.size)
        return HostComm(exchange, memory, self.rank, config.size, config.collective_timeout_s)


def join(arguments: Sequence[str], timeout_s: float = 60.0) -> tuple[RankSeat, list[str]]:
    """The first thing a spawned rank does: tie its life to rank 0's, and find the store.

    Takes the command line; returns the seat, and the arguments that are the module's own.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--parent", type=int, required=True)
    known, rest = parser.parse_known_args(arguments)
    die_with(known.parent)
    host, _, port = known.store.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, int(port), is_master=False, timeout=timeout)
    return RankSeat(known.rank, store), rest


def die_with(parent_pid: int) -> None:
    """Have this process killed when its parent ends; exit now if it has already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_outlive_not, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:
        raise SystemExit(f"rank 0 (pid {parent_pid}) is gone already")


def _outlive_not(parent_pid: int) -> None:
    """Where the kernel has no such signal: look, and end this process."""
    pause = threading.Event()
    while os.getppid() == parent_pid:
        pause.wait(_WATCH_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _process_group(config: GroupConfig, store: Store, rank: int) -> dist.ProcessGroup:
    """A group object of its own: torch's global group stays as it is."""
    timeout = timedelta(seconds=config.collective_timeout_s)
    prefix = PrefixStore("ranks", store)
    if config.backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(prefix, rank, config.size, nccl))
    gloo: Any = dist.ProcessGroupGloo  # its options are missing from torch's stubs
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=config.host)]
    options._timeout = timeout
    return cast(dist.ProcessGroup, gloo(prefix, rank, config.size, options))


def _ending(rank: int, process: "subprocess.Popen[bytes]") -> str | None:
    status = process.poll()
    if status is None:
        return None
    how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
    return f"rank {rank} (pid {process.pid}) {how}"


def _end(processes: "Sequence[subprocess.Popen[bytes]]", grace_s: float) -> None:
    """Wait, then ask, then insist; all of them at the same time."""
    pause = threading.Event()
    left = list(processes)
    for ask, patience_s in ((None, grace_s), (signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0)):
        for process in left:
            if ask is not None:
                process.send_signal(ask)
        for _ in range(round(patience_s / _LOOK_S) + 1):
            left = [process for process in left if process.poll() is None]
            if not left:
                return
            pause.wait(_LOOK_S)
    log.error("processes %s do not end", [process.pid for process in left])
