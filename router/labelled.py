"""Series by their labels: found without asking the metric each time, and forgotten with a worker.

A series that names a worker stays for `KEEP_S` after the worker has left, so that whoever scrapes
sees how it ended; then it goes: a fleet whose workers get new names would fill the page for ever.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, Summary

from engine.clock import Clock
from router.fleet import Fleet

KEEP_S = 600.0

Kind = TypeVar("Kind", Counter, Histogram, Summary)
_Key = tuple[Counter | Histogram | Summary, tuple[str, ...]]


class Labelled:
    """Of one registry, whose scrapes it is part of once it watches a fleet."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._series: dict[_Key, Counter | Histogram | Summary] = {}
        self._of_workers: dict[str, set[_Key]] = {}
        self._missing_since: dict[str, float] = {}

    def of(self, metric: Kind, *labels: str) -> Kind:
        key = (metric, labels)
        found = self._series.get(key)
        if found is None:
            labelled: Kind = metric.labels(*labels)
            found = self._series[key] = labelled
        return cast(Kind, found)

    def of_worker(self, worker: str, metric: Kind, *labels: str) -> Kind:
        self._of_workers.setdefault(worker, set()).add((metric, labels))
        return self.of(metric, *labels)

    def watch(self, fleet: Fleet, clock: Clock) -> None:
        """Look at each scrape who has left."""

        def look() -> None:
            self.forget((worker.name for worker in fleet.workers), clock.now())

        self._registry.register(_Departures(look))

    def forget(self, live: Iterable[str], now: float) -> None:
        """Drop the series of workers that have not been among the live ones for `KEEP_S`."""
        gone = self._of_workers.keys() - set(live)
        self._missing_since = {name: self._missing_since.get(name, now) for name in gone}
        for name, since in self._missing_since.items():
            if now - since >= KEEP_S:
                for metric, labels in self._of_workers.pop(name):
                    del self._series[metric, labels]
                    metric.remove(*labels)


class _Departures:
    """Has no numbers of its own."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        self._look()
        return ()
