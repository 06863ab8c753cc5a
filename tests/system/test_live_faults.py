"""A cluster of processes whose wires are faulty on purpose: exact tokens, nothing left over."""

import asyncio
import io
import re
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import grpc.aio
import pytest
import pytest_asyncio
from rich.console import Console

from kvferry.ps import ps
from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from protos import inference_pb2 as pb
from tests.system.live_cluster import LiveCluster, live_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

FAULTS = (
    "duplicate=0.03 delay=0.02 "
    "truncate=0.05 flip=0.05 swap=0.05 stale=0.05 foreign=0.05 refuse@70 cut@90"
)

LEFT_ALONE = [
    re.compile(rf"{prefill} \(epoch \d+\) to d1: the wire {wire} is in quarantine since \d\d:")
    for prefill, wire in (("p0", "shm"), ("p1", "tcp"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faulty")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(folder: Path) -> AsyncIterator[LiveCluster]:
    """Nothing is too much damage for d0; d1 is as workers usually are."""
    shared = {"num_blocks": 256, "transfer_lease_s": 6.0}
    async with live_cluster(
        folder,
        "checksum",
        prefill={
            "p0": shared | {"tp": 2, "wires": ("shm",), "test_faults": f"seed=1 {FAULTS}"},
            "p1": shared | {"wires": ("tcp", "grpc"), "test_faults": f"seed=2 wire=tcp {FAULTS}"},
        },
        decode={"d0": shared | {"tp": 2, "max_damage_share": 1.0}, "d1": shared},
    ) as cluster:
        yield cluster


async def ask(cluster: LiveCluster, random: Random, pins: pb.Pins) -> pb.Journey | None:
    """How a prompt was served, with the right tokens; None where it was not."""
    prompt = [random.randrange(256) for _ in range(random.randrange(20, 200))]
    try:
        reply = await cluster.generate(prompt, pins, max_tokens=5, temperature=0, ignore_eos=True)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        return None
    assert reply.output == checksum_continuation(ChecksumConfig(), prompt, 5)
    return reply.usage.journey


async def test_requests_over_faulty_wires_are_answered_right_or_not_at_all(
    cluster: LiveCluster, folder: Path
) -> None:
    random, answered = Random(4), 0
    for start in range(0, 48, 8):
        pins = (pb.Pins(prefill=f"p{n % 2}", decode="d0") for n in range(start, start + 8))
        journeys = await asyncio.gather(*(ask(cluster, random, each) for each in pins))
        answered += sum(journey is not None for journey in journeys)
    assert answered >= 30  # a link that is cut takes with it whatever it carries
    books = await cluster.settled()
    for book in books.values():
        assert book.pool.free_blocks + book.pool.cached_blocks == book.pool.total_blocks
    said = [path.read_text() for path in (folder / "logs").rglob("*p[01]*") if path.is_file()]
    assert sum("wires_are_faulty_on_purpose" in text for text in said) >= 2


async def test_ps_says_which_wire_of_which_pair_is_in_quarantine_and_requests_go_on(
    cluster: LiveCluster, folder: Path
) -> None:
    random, shown = Random(5), ""
    async with asyncio.timeout(60):
        while not all(pair.search(shown) for pair in LEFT_ALONE):
            for prefill in ("p0", "p1"):
                await ask(cluster, random, pb.Pins(prefill=prefill, decode="d1"))
            shown = await shown_by_ps(cluster)
    assert "cells came damaged over tcp" in shown
    assert "p0 cannot serve d1: too much of what it sends comes damaged" in shown
    assert "to d0" not in shown

    async with asyncio.timeout(20):  # until the router has heard of it, too
        while True:
            journey = await ask(cluster, random, pb.Pins(prefill="p1", decode="d1"))
            assert journey is not None
            if journey.wire == "grpc":
                break
    for _ in range(5):
        journey = await ask(cluster, random, pb.Pins(decode="d1"))  # p0 would be as cheap
        assert journey is not None and journey.prefill != "p0"
    said = "".join(path.read_text() for path in (folder / "logs").rglob("*d1*") if path.is_file())
    assert "wire_quarantined" in said and "look at what carries tcp" in said


async def shown_by_ps(cluster: LiveCluster) -> str:
    console = Console(record=True, width=300, file=io.StringIO())
    await ps(cluster.redis_url, cluster.key_prefix, console)
    return console.export_text()
