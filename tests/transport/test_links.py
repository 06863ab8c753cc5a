"""What every wire promises, asked of each."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from protos.transfer_pb2 import Chunk, ChunkAck, Frame, Hello, SealAll, Welcome
from tests.transport.harness import (
    WIRES,
    Network,
    hello,
    network,
    num_open_files,
    settled_tasks,
    soon,
)
from transport.link import Link, LinkClosed, LinkRefused

pytestmark = pytest.mark.parametrize("wire", WIRES)


class Host:
    """A decode rank that keeps every link it is given until told otherwise."""

    def __init__(self, refusal: str = "") -> None:
        self.links: list[Link] = []
        self.closed: list[str] = []
        self._refusal = refusal
        self._leave = asyncio.Event()

    def answer(self, hello: Hello) -> Welcome:
        if self._refusal:
            raise LinkRefused(self._refusal)
        return Welcome(decode_epoch=4, decode_rank=2)

    async def serve(self, link: Link) -> None:
        self.links.append(link)
        await self._leave.wait()

    def leave(self) -> None:
        self._leave.set()


@pytest.fixture
async def net(wire: str) -> AsyncIterator[Network]:
    async with network(wire) as made:
        yield made


async def pair(net: Network, host: Host) -> tuple[Link, Link]:
    address = await net.listen(host)
    near = await net.connector().connect(address, hello(prefill_rank=3))
    await soon(lambda: bool(host.links))
    return near, host.links[-1]


def chunk(seq: int, payload: memoryview) -> Frame:
    return Frame(chunk=Chunk(seq=seq, payload_bytes=payload.nbytes))


async def test_both_ends_know_who_they_are(net: Network, wire: str) -> None:
    host = Host()
    near, far = await pair(net, host)
    for link in (near, far):
        assert (link.hello.prefill_worker, link.hello.prefill_rank) == ("prefill-0", 3)
        assert link.hello.wire == wire
        assert (link.welcome.decode_epoch, link.welcome.decode_rank) == (4, 2)
    host.leave()
    await near.close("done")


async def test_frames_and_payloads_arrive_in_order_and_unchanged(net: Network) -> None:
    host = Host()
    near, far = await pair(net, host)
    payloads = [memoryview(os.urandom(size)) for size in (1, 3, 1 << 20, 77, 4 << 20)]

    async def push() -> None:
        for seq, payload in enumerate(payloads):
            await near.send(chunk(seq, payload), payload)
            await near.send(Frame(seal_all=SealAll(num_chunks=seq)))

    pushing = asyncio.create_task(push())
    for seq, payload in enumerate(payloads):
        frame, received = await far.recv()
        assert (frame.chunk.seq, received) == (seq, payload)
        frame, received = await far.recv()
        assert (frame.seal_all.num_chunks, received) == (seq, None)
    await pushing
    host.leave()
    await near.close("done")


async def test_both_directions_carry_at_once(net: Network) -> None:
    host = Host()
    near, far = await pair(net, host)
    payload = memoryview(bytes(300_000))

    async def push() -> None:
        for seq in range(40):
            await near.send(chunk(seq, payload), payload)

    async def acknowledge() -> None:
        for seq in range(40):
            await far.recv()
            await far.send(Frame(chunk_ack=ChunkAck(seq=seq)))

    async def collect() -> list[int]:
        return [(await near.recv())[0].chunk_ack.seq for _ in range(40)]

    async with asyncio.timeout(20):
        _, _, acks = await asyncio.gather(push(), acknowledge(), collect())
    assert acks == list(range(40))
    host.leave()
    await near.close("done")


async def test_senders_that_overlap_do_not_mix_their_frames(net: Network) -> None:
    host = Host()
    near, far = await pair(net, host)
    payloads = [memoryview(bytes([seq]) * (1000 + seq)) for seq in range(30)]
    sends = [near.send(chunk(seq, payload), payload) for seq, payload in enumerate(payloads)]
    sending = asyncio.gather(*sends)
    for _ in range(30):
        frame, received = await far.recv()
        assert received == payloads[frame.chunk.seq]
    await sending
    host.leave()
    await near.close("done")


async def test_a_cancelled_send_leaves_the_link_whole(net: Network) -> None:
    host = Host()
    near, far = await pair(net, host)
    payload = memoryview(bytes(2 << 20))
    for seq in range(8):
        task = asyncio.create_task(near.send(chunk(seq, payload), payload))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    last = asyncio.create_task(near.send(Frame(seal_all=SealAll(num_chunks=9))))
    async with asyncio.timeout(10):
        frame, received = await far.recv()
        while frame.HasField("chunk"):
            assert received == payload
            frame, received = await far.recv()
    assert frame.seal_all.num_chunks == 9
    await last
    host.leave()
    await near.close("done")


@pytest.mark.parametrize("closer", ["prefill", "decode"])
async def test_closing_ends_both_ends(net: Network, closer: str) -> None:
    host = Host()
    near, far = await pair(net, host)
    waiting = [asyncio.create_task(link.recv()) for link in (near, far)]
    await asyncio.sleep(0.01)
    await (near if closer == "prefill" else far).close("enough")
    if closer == "decode":
        host.leave()
    async with asyncio.timeout(5):
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [LinkClosed, LinkClosed]
    host.leave()
    await soon(lambda: True)
    for link in (near, far):
        with pytest.raises(LinkClosed):
            await link.recv()
        with pytest.raises(LinkClosed):
            await link.send(Frame(seal_all=SealAll()))
    await near.close("again")


async def test_what_was_sent_before_the_end_still_arrives(net: Network) -> None:
    host = Host()
    near, far = await pair(net, host)
    await near.send(Frame(seal_all=SealAll(num_chunks=5)))
    closing = asyncio.create_task(near.close("done"))
    frame, _ = await far.recv()
    assert frame.seal_all.num_chunks == 5
    host.leave()
    await closing


async def test_the_other_end_says_why_it_left(net: Network) -> None:
    host = Host()
    near, far = await pair(net, host)
    await far.close("decode-0 stops")
    host.leave()
    with pytest.raises(LinkClosed, match="decode-0 stops"):
        await near.recv()
    await near.close("done")


async def test_a_listener_that_vanishes_ends_the_link(net: Network) -> None:
    host = Host()
    address = await net.listen(host)
    near = await net.connector().connect(address, hello())
    receiving = asyncio.create_task(near.recv())
    await soon(lambda: bool(host.links))
    host.leave()
    await net.silence(address)
    with pytest.raises(LinkClosed):
        async with asyncio.timeout(5):
            await receiving
    await near.close("done")


async def test_a_call_to_nobody_ends_with_a_reason(net: Network) -> None:
    host = Host()
    address = await net.listen(host)
    await net.silence(address)
    with pytest.raises(LinkClosed) as caught:
        async with asyncio.timeout(10):
            await net.connector().connect(address, hello())
    assert not isinstance(caught.value, LinkRefused)
    assert str(caught.value)


async def test_a_refused_call_says_why(net: Network) -> None:
    address = await net.listen(Host(refusal="no room for prefill-0"))
    with pytest.raises(LinkRefused, match="no room for prefill-0"):
        await net.connector().connect(address, hello())


async def test_a_slow_reader_does_not_block_the_loop(net: Network) -> None:
    host = Host()
    near, far = await pair(net, host)
    payload = memoryview(bytes(4 << 20))
    sends = [asyncio.create_task(near.send(chunk(i, payload), payload)) for i in range(12)]
    loop, longest, last = asyncio.get_running_loop(), 0.0, asyncio.get_running_loop().time()
    for _ in range(50):
        await asyncio.sleep(0.002)
        longest, last = max(longest, loop.time() - last), loop.time()
    for seq in range(12):
        frame, received = await far.recv()
        assert (frame.chunk.seq, received) == (seq, payload)
    await asyncio.gather(*sends)
    assert longest < 0.5
    host.leave()
    await near.close("done")


async def test_nothing_is_left_after_close(wire: str) -> None:
    async def live() -> None:
        async with network(wire) as net:
            host = Host()
            near, far = await pair(net, host)
            payload = memoryview(bytes(100_000))
            await near.send(chunk(0, payload), payload)
            await far.recv()
            host.leave()
            await near.close("done")

    await live()  # what grpc and torch open once, they keep
    tasks, files = await settled_tasks(), num_open_files()
    for _ in range(4):
        await live()
    assert await settled_tasks() == tasks
    await soon(lambda: num_open_files() <= files + 1)
