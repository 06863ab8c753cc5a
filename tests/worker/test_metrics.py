"""What a worker shows Prometheus."""

from dataclasses import fields

from prometheus_client import generate_latest

from tests.engine.small_worker import SmallWorker
from transport.counts import TransferCounts
from worker.metrics import worker_registry


def test_every_count_of_the_transport_is_shown_as_it_is_when_scraped() -> None:
    counts = TransferCounts(completed=3)
    registry = worker_registry(SmallWorker().engine, counts, "d0", "checksum")
    counts.repaired_cells = 2
    lines = generate_latest(registry).decode().splitlines()
    labels = '{engine="d0",model_name="checksum"}'
    for field in fields(counts):
        value = float(getattr(counts, field.name))
        assert f"kvferry_transfer_{field.name}_total{labels} {value}" in lines
    assert f"kvferry_transfer_repaired_cells_total{labels} 2.0" in lines
