"""A prefill worker's rank 0, from its settings to its end."""

from prefill_worker.settings import PrefillSettings
from prefill_worker.side import PREFILL
from worker.host import OnReady, run_worker


async def run(settings: PrefillSettings, on_ready: OnReady) -> None:
    """Serve until cancelled."""
    await run_worker(PREFILL, settings, on_ready)
