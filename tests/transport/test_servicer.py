"""What a stranger may send to a decode rank, and what it gets for it."""

import errno
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from protos.transfer_pb2 import Chunk, Frame, Hello, Open, ShipmentKey
from protos.transfer_pb2_grpc import TransferStub
from tests.transport.harness import Cluster, cluster, hello, network, served
from transport.grpc_options import channel_options
from transport.link import Link, LinkClosed
from transport.servicer import TransferServicer


@pytest.fixture
async def group() -> AsyncIterator[Cluster]:
    async with network("grpc") as net, cluster(net) as made:
        yield made


async def answer(group: Cluster, *frames: Frame) -> tuple[grpc.StatusCode, str]:
    """How the stream ends that begins with these frames."""
    address = group.decode.addresses[0]
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        call = TransferStub(channel).Link()
        for frame in frames:
            await call.write(frame)
        await call.done_writing()
        while isinstance(await call.read(), Frame):
            pass  # until gRPC's EOF
        return await call.code(), await call.details()


async def refusal(group: Cluster, *frames: Frame) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(group, *frames)
    return caught.value.code().name, caught.value.details() or ""


async def test_the_first_frame_must_be_a_hello(group: Cluster) -> None:
    frame = Frame(open=Open(num_tokens=4))
    assert await refusal(group, frame) == (
        "FAILED_PRECONDITION",
        "the first frame is open, not a hello",
    )


async def test_an_unknown_wire_is_refused_with_those_there_are(group: Cluster) -> None:
    code, reason = await refusal(group, Frame(hello=hello(wire="pigeon")))
    assert code == "FAILED_PRECONDITION"
    assert reason.startswith("no wire 'pigeon' here; there are gloo, grpc")


async def test_a_stranger_is_told_what_does_not_match(group: Cluster) -> None:
    code, reason = await refusal(group, Frame(hello=hello(wire="grpc", decode_instance="d9")))
    assert code == "FAILED_PRECONDITION"
    assert "asks for instance d9, but this is decode-0 rank 0" in reason


async def test_a_group_that_cannot_be_met_is_refused(group: Cluster) -> None:
    code, reason = await refusal(group, Frame(hello=hello(wire="gloo", rendezvous="nowhere")))
    assert code == "UNAVAILABLE"
    assert "'nowhere' is not host:port/name" in reason


async def test_a_wire_that_cannot_be_made_here_is_said_to_be() -> None:
    class Full:
        async def accept(self, control: Link) -> Link:
            raise OSError(errno.EMFILE, "Too many open files")

    async with network("grpc") as net, cluster(net) as group:
        servicer = TransferServicer(group.decode.receivers[0], {"tcp": Full()})
        async with served(servicer.add_to) as address:
            with pytest.raises(LinkClosed, match=r"no tcp link can be made here: .*open files"):
                await net.connector_of("tcp").connect(address, hello())


async def test_frames_that_mean_nothing_do_no_harm(group: Cluster) -> None:
    key = ShipmentKey(transfer_id=bytes(5000), attempt=1, prefill_epoch=1, decode_epoch=1)
    nonsense = [
        Frame(),
        Frame(key=key),
        Frame(hello=hello(wire="grpc")),
        Frame(key=key, hello=Hello()),
        Frame(key=key, chunk=Chunk(seq=2**32 - 1, payload_bytes=2**64 - 1, payload=b"x")),
        Frame(chunk=Chunk()),
    ]
    code, _ = await answer(group, Frame(hello=hello(wire="grpc")), *nonsense)
    assert code is grpc.StatusCode.OK
    await group.carry(9, [1, 2, 3], [4, 5, 6])
    group.check_blocks(9, [1, 2, 3], [4, 5, 6])
