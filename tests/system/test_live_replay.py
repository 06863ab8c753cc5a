"""A live cluster serves a trace: it reuses what a replay says, and every request is accounted for.

The size that CI can afford; `make bench-serve` compares four workers of 500 blocks over a recorded
trace and holds them to 5 %.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from rich.console import Console

from engine.clock import MonotonicClock
from kvferry.cluster import Cluster, running_cluster
from kvferry.replay.trace import Trace, read_trace
from kvferry.serve_bench.command import Plan, serve
from kvferry.serve_bench.doors import HttpDoor, Keys
from kvferry.serve_bench.side_by_side import compared
from kvferry.serve_bench.workload import Workload
from kvferry.settings import Settings, load
from kvferry.stats import hit_rate_of, read_metrics
from tests.kvferry.replay.traces import write_conversations
from tests.system.live_cluster import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

QUIET = Console(file=open(os.devnull, "w"))  # noqa: SIM115


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return load(
        flags={
            "model": "checksum",
            "launcher": "local",
            "num_prefill": 3,
            "num_decode": 1,
            "state_dir": tmp_path_factory.mktemp("state"),
            "router": {
                "http_port": free_port(),
                "grpc_port": free_port(),
                "fetch_blocks": False,  # what a fetch takes nobody has measured before
            },
            "prefill": {"num_blocks": 64},
            "decode": {"num_blocks": 128, "tp": 1},
        }
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(settings: Settings) -> AsyncIterator[Cluster]:
    async with running_cluster(settings, lambda _event: None, MonotonicClock()) as cluster:
        yield cluster


def conversations(folder: Path, sessions: int) -> Trace:
    """512-token blocks as blocks of 16, twelve requests a second."""
    path = write_conversations(folder / "t.jsonl", sessions=sessions)
    return read_trace(path).shrunk(32).at_rate(12.0)


async def prompt_tokens(cluster: Cluster) -> int:
    """That the router has counted so far."""
    text = await asyncio.to_thread(read_metrics, cluster.record.http_url)
    return hit_rate_of(text).prompt


async def test_a_live_cluster_reuses_what_a_replay_predicts(
    cluster: Cluster, settings: Settings, tmp_path: Path
) -> None:
    trace = conversations(tmp_path, sessions=16)
    pair = await compared(cluster, settings, trace, 0, MonotonicClock(), QUIET)
    assert pair.live.failed == {} and len(pair.live.served) == 80
    assert pair.live.split_is_known, "the router has counted the very same tokens"
    pair.live.hit_rate.check()
    assert pair.live.hit_rate.oracle == pair.replayed.hit_rate.oracle, "equal blocks are equal"
    live, replayed = pair.rates
    assert live == pytest.approx(replayed, rel=0.25), "over seeds it is within 5 %"


async def test_the_openai_door_serves_the_same_prompts(
    cluster: Cluster, settings: Settings, tmp_path: Path
) -> None:
    """Asked a second time over the other door, all but each prompt's end is reused."""
    trace = conversations(tmp_path, sessions=2).at_rate(10.0)
    plan = Plan(Workload(trace, 256, seed=7), warm_up=2, timeout_s=20.0)
    door = partial(HttpDoor, cluster.record.http_url, "", Keys({}))
    first, second = [
        await serve(plan, door, cluster.record.http_url, MonotonicClock(), QUIET) for _ in range(2)
    ]
    assert [len(first.served), len(second.served)] == [10, 10]
    assert second.cached_tokens > first.cached_tokens
    assert all(reply.num_tokens > 0 and reply.ttft_ms > 0 for reply in second.served)


async def test_ctrl_c_ends_a_run_with_an_account_of_what_there_was(
    cluster: Cluster, settings: Settings, tmp_path: Path
) -> None:
    conversations(tmp_path, sessions=24)
    before = await prompt_tokens(cluster)
    command = [sys.executable, "-m", "kvferry", "bench", "serve", str(tmp_path / "t.jsonl")]
    command += ["--shrink", "32", "--rate", "5", "--warm-up", "1", "--seed", "9"]
    command += ["--state-dir", str(settings.state_dir), "--out", str(tmp_path / "serve.json")]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(20):
        while await prompt_tokens(cluster) < before + 1000:
            await asyncio.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, _ = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 130 and b"stopped after" in said, said.decode()
    found = json.loads((tmp_path / "serve.json").read_text())
    assert 0 < found["served"] <= found["sent"] < found["planned"] == 120
    assert set(found["failed"]) <= {"STOPPED"} and found["speeds"]["prefill_ms_per_token"] > 0
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
