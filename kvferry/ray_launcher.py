"""Prefill workers as Ray actors; every other part as the local launcher starts it.

We start a Ray of our own on loopback, with a token that only this run knows, place each worker by
the custom resource `prefill`, and leave it to Ray to start a dead one again. Whether a worker can
be used is not asked of Ray: its own lease in the index says so, and says it sooner.

Ray is started, used to make actors, and shut down on one thread that lives as long as the launcher:
Ray's processes are tied to the thread that started them, and none of this may hold up our event
loop. Questions to actors are awaited on the loop itself.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from engine.clock import Clock
from kvferry.errors import PartFailed
from kvferry.launcher import Handle, Part, PartEvent, PartState, Reporter, Role
from kvferry.local_launcher import LocalLauncher, Patience
from kvferry.state import write_private

T = TypeVar("T")

PING_EVERY_S = 1.0
OBJECT_STORE_BYTES = 100 << 20  # nothing of ours goes through it


class RayLauncher:
    def __init__(
        self,
        num_prefill: int,
        local: LocalLauncher,
        report: Reporter,
        clock: Clock,
        patience: Patience | None = None,
        actor_class: type | None = None,
    ) -> None:
        self._num_prefill = num_prefill
        self._local = local
        self._report = report
        self._clock = clock
        self._patience = patience or Patience()
        self._actor_class = actor_class  # None: prefill_worker's, imported when Ray is there
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._starting: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self._handles: list[RayHandle] = []

    async def start(self, part: Part) -> Handle:
        if part.role is not Role.PREFILL:
            return await self._local.start(part)
        await self._start_ray()
        actor = await self._call(_create_actor, part, self._actor_class)
        handle = RayHandle(part, actor, self._call, self._report, self._clock, self._patience)
        self._handles.append(handle)
        await handle.start()
        return handle

    async def stop(self) -> None:
        await asyncio.gather(*(handle.stop() for handle in self._handles))
        self._handles.clear()
        if self._starting is not None:
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, PartFailed):
                await self._starting
            await self._call(_shut_down)
            self._report(PartEvent("ray", PartState.STOPPED))
            for key in _ray_environment(Path()):
                os.environ.pop(key, None)
        self._thread.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        await self._local.stop()

    async def _start_ray(self) -> None:
        """Once, however many parts ask at the same time."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._init_ray(), name="start ray")
        await asyncio.shield(self._starting)

    async def _init_ray(self) -> None:
        self._report(PartEvent("ray", PartState.STARTING))
        born = self._clock.now()
        self._folder = Path(tempfile.mkdtemp(prefix="kvferry-ray-"))  # short: it holds unix sockets
        token = self._folder / "token"
        write_private(token, secrets.token_hex(32))
        os.environ.update(_ray_environment(token))
        try:
            version = await self._call(_init, self._folder / "session", self._num_prefill)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            text = f"Ray did not start ({reason}): try --launcher local"
            self._report(PartEvent("ray", PartState.FAILED, text=text))
            raise PartFailed(text) from error
        info = {"summary": f"{version}, {self._num_prefill} x prefill, token auth"}
        self._report(PartEvent("ray", PartState.READY, self._clock.now() - born, info=info))

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class RayHandle:
    """One actor through all its lives: the name stays, the process changes."""

    def __init__(
        self,
        part: Part,
        actor: Any,
        call: Callable[..., Any],
        report: Reporter,
        clock: Clock,
        patience: Patience,
    ) -> None:
        self._part = part
        self._actor = actor
        self._call = call
        self._report = report
        self._clock = clock
        self._patience = patience
        self._pid: int | None = None
        self._info: Mapping[str, Any] = {}
        self._died_at = 0.0
        self._watch: asyncio.Task[None] | None = None

    @property
    def part(self) -> Part:
        return self._part

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def alive(self) -> bool:
        return self._pid is not None

    @property
    def info(self) -> Mapping[str, Any]:
        return self._info

    async def start(self) -> None:
        self._tell(PartState.STARTING)
        born = self._clock.now()
        try:
            await self._become_ready(self._patience.start)
        except Exception as error:
            text = f"{self._part.name} did not start: {_reason(error)}"
            self._tell(PartState.FAILED, text=text)
            await self._call(_kill, self._actor)
            raise PartFailed(text) from error
        self._tell(PartState.READY, self._clock.now() - born, info=self._info)
        self._watch = asyncio.create_task(self._follow_lives(), name=f"watch {self._part.name}")

    async def stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        asked = self._clock.now()
        with contextlib.suppress(Exception):  # let it end what it has, if it can still be asked to
            await _ask(self._actor, "stop", self._patience.stop)
        await self._call(_kill, self._actor)
        self._pid = None
        self._tell(PartState.STOPPED, self._clock.now() - asked)

    async def _become_ready(self, timeout_s: float) -> None:
        self._info = await _ask(self._actor, "ready", timeout_s)
        self._pid = await _ask(self._actor, "pid", timeout_s)

    async def _follow_lives(self) -> None:
        while True:
            await self._clock.sleep(PING_EVERY_S)
            try:
                pid = await _ask(self._actor, "pid", 5.0)
            except TimeoutError:  # slow is not dead
                continue
            except Exception:
                self._note_death()
                continue
            if pid != self._pid:
                self._note_death()  # it may have died and come back between two looks
                await self._welcome_back()

    def _note_death(self) -> None:
        if self._pid is not None:
            self._tell(PartState.DIED, text=f"process {self._pid} is gone")
            self._pid = None
            self._died_at = self._clock.now()

    async def _welcome_back(self) -> None:
        with contextlib.suppress(Exception):  # not yet: the next look tries again
            await self._become_ready(self._patience.start)
            self._tell(PartState.READY, self._clock.now() - self._died_at, info=self._info)

    def _tell(
        self,
        state: PartState,
        seconds: float = 0.0,
        text: str = "",
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self._report(PartEvent(self._part.name, state, seconds, text, info or {}))


def _ray_environment(token: Path) -> dict[str, str]:
    """What Ray's processes, and its part in ours, take from the environment alone."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        # On every platform, in spite of its name: Ray for one host stays on loopback. Else it takes
        # the loopback address that we give for one of the host's own, and listens on all of them.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def _init(folder: Path, num_prefill: int) -> str:
    import ray
    import ray._private.ray_constants
    import ray._private.worker
    import ray._raylet
    import ray.job_config

    # It would print at length, into our terminal, what our own line about a death says.
    ray._private.worker.listen_error_messages = lambda worker, stopped: None
    job: Any = ray.job_config.JobConfig()
    # It would let its workers import from where we stand, before anything that is installed.
    job._runtime_env_has_working_dir = lambda: True
    # Ray may have been imported before our environment was set.
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    inner: Any = ray._raylet
    inner.Config.initialize("")
    inner.AuthenticationTokenLoader.instance().reset_cache()
    ray.init(
        address="local",
        namespace="kvferry",
        job_config=job,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
        num_cpus=num_prefill,
        resources={"prefill": num_prefill},
        object_store_memory=OBJECT_STORE_BYTES,
    )
    return f"ray {ray.__version__}"


def _create_actor(part: Part, actor_class: type | None) -> Any:
    import ray

    if actor_class is None:
        from prefill_worker.ray_actor import PrefillActor

        actor_class = PrefillActor
    on_gpu = getattr(part.settings, "device", "cpu") == "cuda"
    return (
        ray.remote(actor_class)
        .options(
            name=part.name,
            resources={"prefill": 1},
            num_cpus=0,
            num_gpus=getattr(part.settings, "tp", 1) if on_gpu else 0,
            max_restarts=-1,
            max_concurrency=4,
        )
        .remote(part.settings.model_dump_json())
    )


async def _ask(actor: Any, method: str, timeout_s: float) -> Any:
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(getattr(actor, method).remote().future())


def _kill(actor: Any) -> None:
    import ray

    with contextlib.suppress(Exception):
        ray.kill(actor, no_restart=True)


def _shut_down() -> None:
    import ray

    ray.shutdown()


def _reason(error: Exception) -> str:
    """The last line of what Ray or the worker said: the sentence, without the remote traceback."""
    lines = str(error).strip().splitlines()
    if isinstance(error, TimeoutError) or not lines:
        return "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    return re.sub(r"^[\w.]+(Error|Exception|File|Settings|Failed): ", "", lines[-1].strip())
