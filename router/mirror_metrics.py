"""How fresh the mirror of the index is, and what went wrong on the way, as of a scrape."""

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from prefix_index.mirror import Mirror, MirrorCounts

GAUGES = {
    "age_seconds": "Since the index last answered: what it has heard since is not known here.",
    "workers": "Workers with a live lease.",
    "blocks": "Different blocks held by any worker.",
    "workers_behind": "Workers of which not all news had arrived when the index was last surveyed.",
}
COUNTERS = {
    "changes": "Changes read from the index's stream.",
    "gaps": "Events found missing.",
    "reloads": "Workers whose entries were read anew as a whole.",
    "doubts": "Workers whose entries in the index contradicted their fingerprint.",
    "garbage": "Things in the index that nobody of ours can have written.",
    "failures": "Times the index was unavailable.",
}


class MirrorCollector(Collector):
    def __init__(self, mirror: Mirror) -> None:
        assert COUNTERS.keys() == {field.name for field in fields(MirrorCounts)}
        self._mirror = mirror

    def collect(self) -> Iterator[Metric]:
        mirror = self._mirror
        values = (
            mirror.age_s if mirror.ready else 0.0,
            len(mirror.workers()),
            mirror.num_blocks,
            mirror.num_behind,
        )
        for (name, text), value in zip(GAUGES.items(), values, strict=True):
            yield GaugeMetricFamily(f"kvferry_mirror_{name}", text, value)
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvferry_mirror_{name}", text, getattr(mirror.counts, name))


def watch_mirror(registry: CollectorRegistry, mirror: Mirror) -> None:
    registry.register(MirrorCollector(mirror))
