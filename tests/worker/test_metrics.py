"""What a worker shows Prometheus."""

from dataclasses import dataclass, fields
from typing import cast

from prometheus_client import generate_latest

from engine.clock import ManualClock
from protos.transfer_pb2 import Hello
from tests.engine.small_worker import SmallWorker
from transport.config import TransportConfig
from transport.counts import TransferCounts
from transport.link import Link
from transport.orders import Identity
from transport.port import Port
from transport.watch import Watch
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


@dataclass
class FakeLink:
    hello: Hello


async def test_every_link_shows_how_it_stands_and_how_much_it_damages() -> None:
    counts = TransferCounts()
    config = TransportConfig(suspect_wires=2)
    watch = Watch(Identity("d0", "i", 1, 0), ManualClock(), config, counts)
    for wire, num_bad in (("shm", 5), ("tcp", 5), ("gloo", 0)):
        hello = Hello(prefill_worker="p0", prefill_epoch=1, prefill_rank=2, wire=wire)
        port = Port(cast(Link, FakeLink(hello)), send_timeout_s=1.0)
        for _ in range(10):
            watch.landed(port, 10, num_bad)
    registry = worker_registry(SmallWorker().engine, counts, "d0", "checksum", watch)
    text = generate_latest(registry).decode()
    labels = 'engine="d0",model_name="checksum",prefill="p0"'
    shown = dict(shm=(2.0, 0.5), tcp=(2.0, 0.5), gloo=(0.0, 0.0))
    for wire, (standing, share) in shown.items():
        link = f'{labels},prefill_rank="2",wire="{wire}"'
        assert f"kvferry_link_standing{{{link}}} {standing}" in text
        assert f"kvferry_link_damage_share{{{link}}} {share}" in text
    assert f"kvferry_prefill_quarantined{{{labels}}} 1.0" in text
    assert 'kvferry_transfer_wires_quarantined_total{engine="d0",model_name="checksum"} 2.0' in text
    assert "kvferry_transfer_workers_quarantined_total" in text
