"""The benchmarks of the router and its index run to their end, on worlds of a few seconds."""

import sys

import pytest

from bench import ceiling, index, route, routers
from kvferry.bench_report import Row
from kvferry.index_bench.processes import first_line, process
from kvferry.index_bench.prompts import Size

SMALL = Size(num_workers=4, num_blocks=4096)


def figures(rows: list[Row]) -> dict[str, float]:
    assert all(each.ours > 0 for each in rows if "added" not in each.what), rows
    return {each.what: each.ours for each in rows}


async def test_route_decides_beside_a_stream_of_events() -> None:
    found = figures(await route.measure(SMALL, runs=1, arrivals=20))
    assert len(found) == 12
    assert found["a decision, everything running, p50"] < 50


async def test_index_recovers_and_its_table_is_compact(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(index.table_rows(Size(8, 30_000), {}))
    (entry_bytes,) = (found[what] for what in found if "bytes an entry" in what)
    assert 20 < entry_bytes < 64
    assert len(figures(await index.through_redis(SMALL, runs=1))) == 5
    assert "announced anew after a wipe" in capsys.readouterr().out, "rows come as they are found"


async def test_ceiling_asks_a_real_router_and_a_relay() -> None:
    assert len(figures(await ceiling.run(runs=1, seconds=0.05))) == 8


async def test_routers_are_asked_over_http_before_backends_that_answer_at_once() -> None:
    async with process(sys.executable, "-m", "kvferry.index_bench.backends") as backends:
        first, second = (await first_line(backends))["urls"]
        names = {"kvferry": first, "another": second}
        found = await routers.measure(names, first, runs=1, seconds=0.05)
    assert [each.what for each in found if each.unit != "ms" and each.ours > 0] == [
        "1,024 characters, 16 at a time",
        "8,000 characters, 16 at a time",
    ]
