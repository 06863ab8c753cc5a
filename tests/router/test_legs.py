"""What the two calls of an attempt are asked for."""

from dataclasses import replace

import grpc.aio

from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.legs import Work
from router.worker import Worker
from tests.prefix_index.samples import worker as record
from transport.orders import Holder


async def test_both_legs_are_asked_for_the_same_work() -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:9")
    prefill, decode = (Worker(record(name), channel, unfit="") for name in ("p0", "d0"))
    asked = wpb.WorkRequest(
        request_id="r.1",
        prompt=range(1000),
        sampling=pb.SamplingParams(max_tokens=3, stop=["x"]),
        tenant_key=b"k" * 32,
        eos_token_ids=[2, 5],
        num_public_tokens=16,
    )
    assert len(asked.ListFields()) == len(asked.DESCRIPTOR.fields), "a field is not set here"
    work = Work(asked, prefill, decode, ("tcp",), b"t" * 16, 1)
    assert work.decode_request().work == asked
    assert work.prefill_request().work == asked
    await channel.close(None)


async def test_decode_is_told_every_rank_of_whoever_else_holds_blocks_of_the_prompt() -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:9")
    prefill, decode = (Worker(record(name), channel, unfit="") for name in ("p0", "d0"))
    other = replace(record("p1", epoch=3), rank_addresses=("here:1", "here:2"))
    work = Work(wpb.WorkRequest(), prefill, decode, ("tcp",), b"t" * 16, 1, holders=(other,))
    (told,) = work.decode_request().holders
    holder = Holder.from_proto(told)
    assert holder.instance == "p1-3"
    lenders = [holder.lender(head, asker=0) for head in range(4)]
    assert [each and (each.rank, each.address) for each in lenders] == [
        (0, "here:1"),
        (0, "here:1"),
        (1, "here:2"),
        None,
    ]
    await channel.close(None)
