"""What a prefill worker is told at start."""

from worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """A prefill worker needs nothing beyond what every worker needs."""
