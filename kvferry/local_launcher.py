"""Parts as plain child processes: watched, restarted when they die, and ended by their own pids.

A child is told its settings by a private file and answers over a pipe, one line of JSON:
`{"ready": {...}}` once it serves, or `{"error": "..."}` before it gives up (with `"in_log": true`
when the log says more). Children sit in
sessions of their own, so that Ctrl-C reaches only us, and die with us however we die.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.clock import Clock
from kvferry.die_with_parent import wrap
from kvferry.errors import PartFailed
from kvferry.launcher import Part, PartEvent, PartState, Reporter, cause_of_death
from kvferry.settings import child_environment
from kvferry.state import write_private

CommandOf = Callable[[Part, Path, int], list[str]]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, in seconds."""

    start: float = 180.0
    stop: float = 20.0  # after SIGTERM, before SIGKILL
    first_backoff: float = 0.5
    max_backoff: float = 10.0
    settled: float = 30.0  # a life this long makes the next death the first one again


def role_command(part: Part, settings_file: Path, ready_fd: int) -> list[str]:
    """The command that pods run too, with our pipe as an extra."""
    command = [sys.executable, "-P", "-m", "kvferry", part.role.value, "-c", str(settings_file)]
    return [*command, "--ready-fd", str(ready_fd)]


class LocalLauncher:
    def __init__(
        self,
        state_dir: Path,
        report: Reporter,
        clock: Clock,
        patience: Patience | None = None,
        command_of: CommandOf = role_command,
    ) -> None:
        self._state_dir = state_dir
        self._report = report
        self._clock = clock
        self._patience = patience or Patience()
        self._command_of = command_of
        self._handles: list[LocalHandle] = []

    async def start(self, part: Part) -> "LocalHandle":
        handle = LocalHandle(
            part, self._state_dir, self._report, self._clock, self._patience, self._command_of
        )
        self._handles.append(handle)
        await handle.start()
        return handle

    async def stop(self) -> None:
        await asyncio.gather(*(handle.stop() for handle in self._handles))
        self._handles.clear()


class LocalHandle:
    """One part through all its lives."""

    def __init__(
        self,
        part: Part,
        state_dir: Path,
        report: Reporter,
        clock: Clock,
        patience: Patience,
        command_of: CommandOf,
    ) -> None:
        self._part = part
        self._state_dir = state_dir
        self._report = report
        self._clock = clock
        self._patience = patience
        self._command_of = command_of
        self._process: asyncio.subprocess.Process | None = None
        self._info: Mapping[str, Any] = {}
        self._ready = False
        self._watch: asyncio.Task[None] | None = None

    @property
    def part(self) -> Part:
        return self._part

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def alive(self) -> bool:
        return self._ready and self.pid is not None

    @property
    def info(self) -> Mapping[str, Any]:
        return self._info

    @property
    def log_file(self) -> Path:
        return self._state_dir / "logs" / f"{self._part.name}.log"

    async def start(self) -> None:
        """Begin the first life and, once it is ready, the watch over the ones to come."""
        self.log_file.unlink(missing_ok=True)
        try:
            await self._begin_life()
        except PartFailed as failure:
            self._tell(PartState.FAILED, text=str(failure))
            await self._end_process(0)
            raise
        except BaseException:
            await self._end_process(0)
            raise
        self._watch = asyncio.create_task(self._keep_alive(), name=f"watch {self._part.name}")

    async def stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        seconds = await self._end_process(self._patience.stop)
        self._tell(PartState.STOPPED, seconds)

    async def _keep_alive(self) -> None:
        backoff = self._patience.first_backoff
        while True:
            assert self._process is not None
            born = self._clock.now()
            status = await self._process.wait()
            was_ready, self._ready = self._ready, False
            lived = self._clock.now() - born
            if was_ready and lived >= self._patience.settled:
                backoff = self._patience.first_backoff
            cause = cause_of_death(status)
            if status > 0:  # it said why
                cause = f"{cause} (see {self.log_file})"
            if was_ready:  # else its start was told as failed, and its end is our doing
                self._tell(PartState.DIED, lived, cause)
            await self._clock.sleep(backoff)
            backoff = min(2 * backoff, self._patience.max_backoff)
            try:
                await self._begin_life()
            except PartFailed as failure:
                self._tell(PartState.FAILED, text=f"{failure}; trying again in {backoff:g} s")
                await self._end_process(0)

    async def _begin_life(self) -> None:
        """Spawn the process and wait for its word. Raises PartFailed."""
        self._tell(PartState.STARTING)
        born = self._clock.now()
        read_fd, write_fd = os.pipe()
        try:
            await self._spawn(write_fd)
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        word = await self._first_line(read_fd)
        if "ready" not in word:
            raise PartFailed(f"{self._part.name} did not start: {await self._why(word)}")
        self._info = word["ready"]
        self._ready = True
        self._tell(PartState.READY, self._clock.now() - born, info=self._info)

    async def _spawn(self, write_fd: int) -> None:
        settings_file = self._state_dir / "parts" / f"{self._part.name}.json"
        content = {self._part.role.value: self._part.settings.model_dump(mode="json")}
        write_private(settings_file, json.dumps(content, indent=2) + "\n")
        command = self._command_of(self._part, settings_file, write_fd)
        with self.log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *wrap(command, os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
                env=child_environment(),
                start_new_session=True,
            )

    async def _first_line(self, read_fd: int) -> dict[str, Any]:
        """The child's word, or {} when it ends or dawdles without one."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
        )
        try:
            async with asyncio.timeout(self._patience.start):
                word = json.loads(await reader.readline() or b"{}")
        except TimeoutError:
            return {"error": f"not ready after {self._patience.start:g} s"}
        finally:
            transport.close()
        assert isinstance(word, dict)
        return word

    async def _why(self, word: Mapping[str, Any]) -> str:
        if "error" in word:
            return (
                f"{word['error']} (see {self.log_file})" if "in_log" in word else str(word["error"])
            )
        assert self._process is not None
        async with asyncio.timeout(self._patience.stop):
            status = await self._process.wait()
        lines = self.log_file.read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it said nothing"
        return f"{cause_of_death(status)}: {last} (see {self.log_file})"

    async def _end_process(self, grace_s: float) -> float:
        """SIGTERM, and SIGKILL when that is not enough; returns the seconds it took.

        Without grace SIGKILL at once, for one that never served and has nothing to finish.
        """
        process, asked = self._process, self._clock.now()
        self._ready = False
        if process is None or process.returncode is not None:
            return 0.0
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            if grace_s > 0:
                process.terminate()
                async with asyncio.timeout(grace_s):
                    await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        return self._clock.now() - asked

    def _tell(
        self,
        state: PartState,
        seconds: float = 0.0,
        text: str = "",
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self._report(PartEvent(self._part.name, state, seconds, text, info or {}))
