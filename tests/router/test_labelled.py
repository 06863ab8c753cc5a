"""What is counted of workers that have left does not stay for ever."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.labelled import KEEP_S, Labelled


def page(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def test_a_workers_series_go_some_time_after_it_has_left() -> None:
    registry = CollectorRegistry()
    failures = Counter("failures", "By worker.", ["worker", "code"], registry=registry)
    ratio = Histogram("ratio", "By worker.", ["what", "worker"], registry=registry)
    labelled = Labelled(registry)
    for name in ("stays", "leaves"):
        labelled.of_worker(name, failures, name, "UNAVAILABLE").inc()
        labelled.of_worker(name, ratio, "first token", name).observe(1.0)
    labelled.forget(["stays"], now=100.0)
    assert page(registry).count('worker="leaves"') > 2
    labelled.forget(["stays"], now=100.0 + KEEP_S)
    assert 'worker="leaves"' not in page(registry)
    assert page(registry).count('worker="stays"') > 2


def test_a_worker_that_comes_back_keeps_what_was_counted_of_it() -> None:
    registry = CollectorRegistry()
    failures = Counter("failures", "By worker.", ["worker"], registry=registry)
    labelled = Labelled(registry)
    labelled.of_worker("w", failures, "w").inc()
    labelled.forget([], now=0.0)
    labelled.forget(["w"], now=KEEP_S - 1)
    labelled.forget([], now=KEEP_S)
    labelled.forget([], now=2 * KEEP_S - 1)
    labelled.of_worker("w", failures, "w").inc()
    assert 'failures_total{worker="w"} 2.0' in page(registry)
    labelled.forget([], now=2 * KEEP_S)
    labelled.of_worker("w", failures, "w").inc()
    assert 'failures_total{worker="w"} 1.0' in page(registry)
