"""What a worker shows Prometheus, under the names that existing dashboards read and our own."""

from collections.abc import Iterable
from dataclasses import fields

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.engine import Engine
from transport.counts import TransferCounts
from transport.quarantine import Standing
from transport.watch import Watch

LABELS = ("model_name", "engine")
STANDINGS = (Standing.SOUND, Standing.ON_TRIAL, Standing.QUARANTINED)


def worker_registry(
    engine: Engine,
    transfers: TransferCounts,
    worker: str,
    model: str,
    watch: Watch | None = None,
) -> CollectorRegistry:
    """A registry of its own: two workers in one process do not mix.

    `transfers` and `watch` are rank 0's: what other ranks carry is not in it.
    """
    registry = CollectorRegistry()
    registry.register(_EngineCollector(engine, (model, worker)))
    registry.register(_TransferCollector(transfers, (model, worker)))
    if watch is not None:
        registry.register(_LinkCollector(watch, (model, worker)))
    return registry


class _EngineCollector(Collector):
    """Reads the engine when scraped, and keeps nothing."""

    def __init__(self, engine: Engine, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        books, stats, load = self._engine.books(), self._engine.stats(), self._engine.load()
        used = books.used_blocks / books.total_blocks
        yield self._gauge("vllm:num_requests_running", "Requests that run", books.running_requests)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait", books.waiting_requests)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", used)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the cache", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the cache", stats.cached_tokens),
            ("num_preemptions", "Requests sent back to the queue", stats.preemptions),
        ):
            yield self._counter(f"vllm:{name}", text, value)
        for state, blocks in (
            ("free", books.free_blocks),
            ("cached", books.cached_blocks),
            ("used", books.used_blocks - books.reserved_blocks),
            ("reserved", books.reserved_blocks),
            ("promised", books.promised_blocks),
        ):
            yield self._gauge(f"kvferry_blocks_{state}", f"KV blocks that are {state}", blocks)
        backlog_s = load.queued_tokens * load.prefill_ms_per_token / 1000
        yield self._gauge("kvferry_backlog_seconds", "Time the queued tokens will take", backlog_s)
        yield self._gauge("kvferry_requests_held", "Prompts not committed", books.held_requests)
        yield self._counter("kvferry_steps", "Steps of the engine", stats.steps)
        for name, text, value in (
            (
                "rechecked",
                "Cached blocks digested again before they were shared",
                stats.rechecked_blocks,
            ),
            ("rotten", "Cached blocks that had changed since", stats.rotten_blocks),
            (
                "disowned",
                "Cached blocks dropped because they follow such a one",
                stats.disowned_blocks,
            ),
        ):
            yield self._counter(f"kvferry_blocks_{name}", text, value)
        yield self._counter(
            "kvferry_requests_failed", "Requests that ended early", stats.failed_requests
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return _counter(name, text, value, self._labels)


class _TransferCollector(Collector):
    """Every count of rank 0's transport."""

    def __init__(self, counts: TransferCounts, labels: tuple[str, str]) -> None:
        self._counts = counts
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        for field in fields(self._counts):
            words = field.name.replace("_", " ")
            value = getattr(self._counts, field.name)
            name = f"kvferry_transfer_{field.name}"
            yield _counter(name, f"KV transfers of rank 0: {words}", value, self._labels)


class _LinkCollector(Collector):
    """What rank 0 holds against each link of each worker that sends or lends."""

    def __init__(self, watch: Watch, labels: tuple[str, str]) -> None:
        self._watch = watch
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        labels = (*LABELS, "prefill", "prefill_rank", "wire")
        standing = GaugeMetricFamily(
            "kvferry_link_standing", "0 sound, 1 on trial, 2 in quarantine", labels=labels
        )
        share = GaugeMetricFamily(
            "kvferry_link_damage_share", "Of a link's late cells that were damaged", labels=labels
        )
        for name, link in self._watch.links():
            values = (*self._labels, name.worker, str(name.rank), name.wire)
            standing.add_metric(values, STANDINGS.index(link.standing))
            share.add_metric(values, link.rate.share)
        yield standing
        yield share
        workers = GaugeMetricFamily(
            "kvferry_prefill_quarantined",
            "1 while no wire of a prefill worker is used",
            labels=(*LABELS, "prefill"),
        )
        for worker, left_s in self._watch.workers().items():
            workers.add_metric((*self._labels, worker), left_s > 0)
        yield workers


def _counter(name: str, text: str, value: float, labels: tuple[str, str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=LABELS)
    family.add_metric(labels, value)
    return family
