"""Every test of workers in this process ends with an audit of all their ledgers."""

from collections.abc import Iterator

import pytest

from kvferry.audit.audit import audit
from tests.system.kept_ledgers import kept_ledgers


@pytest.fixture(autouse=True)
def audited() -> Iterator[None]:
    with kept_ledgers() as ledgers:
        yield
    audit([ledger.extract() for ledger in ledgers], at_rest=True).check()
