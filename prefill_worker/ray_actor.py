"""A prefill worker inside a Ray actor: Ray places it and starts it again, our lease finds it.

The worker runs in a thread of its own with its own event loop. When its life is over the whole
process ends, which Ray answers with a new one.
"""

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import Any

from prefill_worker.main import run
from prefill_worker.settings import PrefillSettings

READY_TIMEOUT_S = 300.0
FAILED_LINGER_S = 5.0


class PrefillActor:
    """`settings_json` is a PrefillSettings. Methods may be called at the same time."""

    def __init__(self, settings_json: str) -> None:
        self._settings = PrefillSettings.model_validate_json(settings_json)
        self._told = threading.Event()  # ready, or failed
        self._info: Mapping[str, Any] = {}
        self._failure: BaseException | None = None
        self._stopped = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def ready(self) -> dict[str, Any]:
        """Wait until the worker serves; raises what kept it from it."""
        if not self._told.wait(READY_TIMEOUT_S):
            raise TimeoutError(f"{self._settings.name} is not ready after {READY_TIMEOUT_S:g} s")
        if self._failure is not None:
            raise self._failure
        return dict(self._info)

    def ping(self) -> bool:
        return self._thread.is_alive()

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Drain and leave the index; returns when the worker is gone."""
        self._stopped.set()
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._serving = self._loop.create_task(run(self._settings, self._on_ready))
        try:
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = error
            served = self._told.is_set()
            self._told.set()
            if not served:
                self._stopped.wait(FAILED_LINGER_S)  # long enough for `ready` to say why
            if not self._stopped.is_set():
                os._exit(1)  # only a new process can serve again; Ray starts it

    def _on_ready(self, info: Mapping[str, Any]) -> None:
        self._info = info
        self._told.set()

    def _cancel(self) -> None:
        self._serving.cancel()
