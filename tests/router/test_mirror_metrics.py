"""Whoever scrapes a router sees how stale its picture of the index is."""

import pytest
from prometheus_client import CollectorRegistry

from engine.clock import ManualClock
from prefix_index.index import EntriesPublished, IndexUnavailable
from prefix_index.mirror import Mirror
from router.mirror_metrics import watch_mirror
from tests.prefix_index.samples import stored, worker
from tests.prefix_index.test_mirror import WatchedIndex


async def test_age_and_lag_grow_while_the_index_is_silent() -> None:
    clock = ManualClock()
    index = WatchedIndex(clock)
    mirror, registry = Mirror(index, clock), CollectorRegistry()
    watch_mirror(registry, mirror)

    def shown(name: str) -> float | None:
        return registry.get_sample_value(f"kvferry_mirror_{name}")

    assert (shown("age_seconds"), shown("workers")) == (0.0, 0.0)
    await index.register(worker(), 60.0)
    await index.publish("w0", 1, stored(1, 2, 3))
    await mirror.step()
    assert (shown("age_seconds"), shown("workers"), shown("blocks")) == (0.0, 1.0, 3.0)
    index.swallow = EntriesPublished
    await index.publish("w0", 1, stored(4))
    await mirror.step()
    clock.advance(1.0)
    await mirror.step()
    assert (shown("workers_behind"), shown("blocks")) == (1.0, 3.0)
    index.unreachable = True
    clock.advance(7.0)
    with pytest.raises(IndexUnavailable):
        await mirror.step()
    assert shown("age_seconds") == 7.0
    index.unreachable = False
    await mirror.step()
    assert (shown("age_seconds"), shown("blocks")) == (0.0, 4.0)
    assert (shown("reloads_total"), shown("gaps_total")) == (2.0, 0.0)
