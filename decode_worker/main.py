"""A decode worker's rank 0, from its settings to its end."""

from decode_worker.settings import DecodeSettings
from decode_worker.side import DECODE
from worker.host import OnReady, run_worker


async def run(settings: DecodeSettings, on_ready: OnReady) -> None:
    """Serve until cancelled."""
    await run_worker(DECODE, settings, on_ready)
