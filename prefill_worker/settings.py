"""What a prefill worker is told at start."""

from transport.config import TransportConfig
from worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """A prefill worker needs nothing beyond what every worker needs."""

    def transport(self) -> TransportConfig:
        """The numbers of this worker's end of its transfers, and of its fetches."""
        return TransportConfig(**self.any_transport())
