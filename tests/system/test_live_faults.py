"""A cluster of processes whose wires are faulty on purpose: exact tokens, nothing left over."""

import asyncio
from pathlib import Path
from random import Random

import grpc.aio
import pytest

from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from protos import inference_pb2 as pb
from tests.system.live_cluster import live_cluster

pytestmark = pytest.mark.cluster

FAULTS = (
    "seed={seed} duplicate=0.03 delay=0.02 "
    "truncate=0.05 flip=0.05 swap=0.05 stale=0.05 foreign=0.05 refuse@70 cut@90"
)


async def test_requests_over_faulty_wires_are_answered_right_or_not_at_all(tmp_path: Path) -> None:
    shared = {"num_blocks": 256, "transfer_lease_s": 6.0}
    random = Random(4)
    async with live_cluster(
        tmp_path,
        "checksum",
        prefill={
            "p0": shared | {"tp": 2, "wires": ("shm",), "test_faults": FAULTS.format(seed=1)},
            "p1": shared | {"wires": ("tcp",), "test_faults": FAULTS.format(seed=2)},
        },
        decode={"d0": shared | {"tp": 2, "max_damage_share": 1.0}},  # no quarantine
    ) as cluster:

        async def ask(number: int) -> bool:
            prompt = [random.randrange(256) for _ in range(random.randrange(20, 200))]
            pins = pb.Pins(prefill=f"p{number % 2}")
            try:
                reply = await cluster.generate(
                    prompt, pins, max_tokens=5, temperature=0, ignore_eos=True
                )
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                return False
            assert reply.output == checksum_continuation(ChecksumConfig(), prompt, 5)
            return True

        answered = 0
        for start in range(0, 48, 8):
            asked = (ask(number) for number in range(start, start + 8))
            answered += sum(await asyncio.gather(*asked))
        assert answered >= 30  # a link that is cut takes with it whatever it carries
        books = await cluster.settled()
        for book in books.values():
            assert book.pool.free_blocks + book.pool.cached_blocks == book.pool.total_blocks
        said = [path.read_text() for path in (tmp_path / "logs").rglob("*p[01]*") if path.is_file()]
        assert sum("wires_are_faulty_on_purpose" in text for text in said) >= 2
