"""The ledger of one rank's process, as its settings want it."""

from kvcache.ledger import Ledger
from kvcache.ledger_pages import PageConfig
from kvcache.ledger_row import Origin
from transport.orders import Identity
from worker.settings import WorkerSettings


def open_ledger(settings: WorkerSettings, identity: Identity, role: str) -> Ledger:
    """Raises OSError where the folder cannot be written to."""
    me = identity
    origin = Origin(me.worker, me.instance, me.epoch, role, me.rank, settings.tp)
    return Ledger(origin, PageConfig(folder=settings.ledger_dir, num_kept=settings.ledger_pages))
