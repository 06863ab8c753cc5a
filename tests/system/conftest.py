"""Every test of workers in this process ends with an audit of all their ledgers."""

from collections.abc import Iterator

import pytest

from kvcache.ledger import Ledger
from kvferry.audit.audit import audit
from tests.system import in_process
from transport.orders import Identity
from worker.ledgers import open_ledger
from worker.settings import WorkerSettings


@pytest.fixture(autouse=True)
def audited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: list[Ledger] = []

    def open_and_keep(settings: WorkerSettings, identity: Identity, role: str) -> Ledger:
        opened.append(open_ledger(settings, identity, role))
        return opened[-1]

    monkeypatch.setattr(in_process, "open_ledger", open_and_keep)
    yield
    audit([ledger.extract() for ledger in opened], at_rest=True).check()
