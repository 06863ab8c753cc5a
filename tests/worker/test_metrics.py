"""What a worker shows Prometheus."""

from dataclasses import fields

from prometheus_client import generate_latest

from tests.engine.small_worker import SmallWorker
from transport.counts import TransferCounts
from worker.metrics import worker_registry


def test_every_count_of_the_rechecks_is_shown() -> None:
    worker = SmallWorker(recheck_share=1.0)
    prompt = list(range(70))
    worker.ask(prompt)
    worker.store.recheck(list(worker.pool.named()))
    worker.store.layer(0)[worker.pool.find(worker.engine.resident())[1], 0, 0, 0, 0] ^= 1
    worker.ask(prompt)
    registry = worker_registry(worker.engine, TransferCounts(), "d0", "checksum")
    lines = generate_latest(registry).decode().splitlines()
    labels = '{engine="d0",model_name="checksum"}'
    for name, value in (("rechecked", 4.0), ("rotten", 1.0), ("disowned", 2.0)):
        assert f"kvferry_blocks_{name}_total{labels} {value}" in lines


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
