"""What a prefill worker is told at start."""

from transport.config import TransportConfig
from worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """A prefill worker needs little beyond what every worker needs."""

    # On the shm wire: decode workers read cells out of its pool, which then lies in memory that
    # they map; else they get copies. On a CPU only.
    show_pool: bool = True

    @property
    def shows_pool(self) -> bool:
        return self.show_pool and "shm" in self.wires and self.device == "cpu"

    def transport(self) -> TransportConfig:
        """The numbers of this worker's end of its transfers, and of its fetches."""
        return TransportConfig(**self.any_transport())
