"""`kvferry audit` over real processes: under load, with cancels, and after a death."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from rich.console import Console

from engine.clock import MonotonicClock
from kvferry.audit.audit import audit
from kvferry.audit.command import read_files, run_live
from kvferry.audit.live import read_workers
from kvferry.audit.report import Report
from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from prefill_worker.settings import PrefillSettings
from prefix_index.redis_index import RedisIndex
from tests.system.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("audit")
    shared = {"num_blocks": 128, "ledger_dir": folder / "ledgers"}
    prefill = {"p0": shared, "p1": {**shared, "tp": 2}}
    async with live_cluster(folder, "checksum", prefill, {"d0": {**shared, "tp": 2}}) as made:
        yield made


@pytest.fixture
def ledger_dir(cluster: LiveCluster) -> Path:
    settings = cluster.handles["p0"].part.settings
    assert isinstance(settings, PrefillSettings) and settings.ledger_dir is not None
    return settings.ledger_dir


def prompt_of(seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(256) for _ in range(random.randrange(20, 300))]


async def one(cluster: LiveCluster, seed: int, *, cancel: bool = False) -> None:
    call = asyncio.create_task(
        cluster.generate(prompt_of(seed), max_tokens=8, temperature=0, ignore_eos=True)
    )
    if cancel:
        await asyncio.wait([call], timeout=Random(seed).random() * 0.3)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return
    want = checksum_continuation(ChecksumConfig(), prompt_of(seed), 8)
    assert (await call).output == want


async def live_report(cluster: LiveCluster, *files: Path, at_rest: bool = False) -> Report:
    index = RedisIndex(cluster.redis_url, MonotonicClock(), prefix=cluster.key_prefix)
    try:
        extracts, _ = await read_workers(await index.workers())
    finally:
        await index.close()
    alive = {extract.origin for extract in extracts}
    extracts += [each for each in read_files(files) if each.origin not in alive]
    report = audit(extracts, at_rest=at_rest)
    report.check()
    return report


async def test_books_balance_under_a_mixed_load_and_at_rest(cluster: LiveCluster) -> None:
    load = [asyncio.create_task(one(cluster, seed, cancel=seed % 3 == 0)) for seed in range(1, 40)]
    while not all(task.done() for task in load):
        await live_report(cluster)
        await asyncio.sleep(0.05)
    await asyncio.gather(*load)
    await cluster.settled()
    report = await live_report(cluster, at_rest=True)
    assert report.proved >= 10  # decode computes some prompts itself
    assert not report.one_sided
    assert {(line.origin.worker, line.origin.rank) for line in report.lines} == {
        ("p0", 0),
        ("p1", 0),
        ("p1", 1),
        ("d0", 0),
        ("d0", 1),
    }
    console = Console(record=True, width=120)
    assert await run_live(cluster.redis_url, cluster.key_prefix, [], console, at_rest=True)
    assert "no rule broken" in console.export_text()


async def test_files_alone_prove_the_same(cluster: LiveCluster, ledger_dir: Path) -> None:
    await cluster.settled()
    report = audit(read_files([ledger_dir]))
    report.check()
    assert report.proved >= 10  # decode computes some prompts itself


async def test_a_dead_side_is_missed_live_and_is_there_in_its_file(
    cluster: LiveCluster, ledger_dir: Path
) -> None:
    victim = cluster.handles["p0"].pid
    assert victim is not None
    load = [asyncio.create_task(one(cluster, seed)) for seed in range(100, 120)]
    await asyncio.sleep(0.2)
    os.kill(victim, signal.SIGKILL)
    await asyncio.gather(*load)
    await cluster.until_alive("p0", victim)
    await cluster.until_pairs(2)
    await cluster.settled()
    alone = await live_report(cluster)
    assert set(alone.one_sided.values()) == {"prefill rank 0"}
    with_file = await live_report(cluster, ledger_dir)
    assert not with_file.one_sided
    assert with_file.proved > alone.proved
    console = Console(record=True, width=120)
    assert await run_live(cluster.redis_url, cluster.key_prefix, [], console)
    assert "side missing" in console.export_text()
