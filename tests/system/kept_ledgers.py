"""The ledgers of workers in this process, kept so that they can be audited when all is over."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvcache.ledger import Ledger
from tests.system import in_process
from transport.orders import Identity
from worker.ledgers import open_ledger
from worker.settings import WorkerSettings


@contextmanager
def kept_ledgers() -> Iterator[list[Ledger]]:
    """Of all workers that start meanwhile."""
    opened: list[Ledger] = []

    def open_and_keep(settings: WorkerSettings, identity: Identity, role: str) -> Ledger:
        opened.append(open_ledger(settings, identity, role))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_process, "open_ledger", open_and_keep)
        yield opened
