"""Only who was invited gets in."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from protos.transfer_pb2 import Frame, Hello, Meet
from tests.transport.harness import SPEC, Network, hello, network, num_open_files, soon
from transport.link import Link, LinkClosed
from transport.loopback_wire import LoopbackWire
from transport.meeting import await_caller, call, listen_tcp, listen_unix
from transport.shm_wire import ShmAcceptor, host_id

LISTENERS = {"tcp": lambda: listen_tcp("127.0.0.1"), "unix": listen_unix}


class Keeper:
    def __init__(self) -> None:
        self.links: list[Link] = []
        self.leave = asyncio.Event()

    def answer(self, hello: Hello):  # type: ignore[no-untyped-def]
        from protos.transfer_pb2 import Welcome

        return Welcome(decode_epoch=1)

    async def serve(self, link: Link) -> None:
        self.links.append(link)
        await self.leave.wait()


@pytest.fixture
async def controls() -> AsyncIterator[tuple[Link, Link]]:
    wire, keeper = LoopbackWire(), Keeper()
    wire.listen("here:1", keeper)
    near = await wire.connect("here:1", hello())
    await soon(lambda: bool(keeper.links))
    yield near, keeper.links[0]
    keeper.leave.set()
    await wire.close()


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if host == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + port)
        return sock
    return socket.create_connection((host, int(port)))


@pytest.mark.parametrize("kind", LISTENERS)
async def test_both_ends_find_each_other(kind: str, controls: tuple[Link, Link]) -> None:
    near, far = controls
    ours, theirs = await asyncio.gather(call(near, 5), await_caller(far, LISTENERS[kind](), 5))
    with ours, theirs:
        await asyncio.get_running_loop().sock_sendall(ours, b"x")
        assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b"x"


@pytest.mark.parametrize("kind", LISTENERS)
async def test_strangers_are_turned_away_and_hold_nobody_up(
    kind: str, controls: tuple[Link, Link]
) -> None:
    near, far = controls
    waiting = asyncio.create_task(await_caller(far, LISTENERS[kind](), 5))
    frame, _ = await near.recv()
    silent, wrong, right = (dial(frame.meet.address) for _ in range(3))
    with silent, wrong, right:
        wrong.sendall(bytes(32))
        wrong.settimeout(5)
        assert await asyncio.to_thread(wrong.recv, 1) == b""
        right.sendall(frame.meet.ticket)
        with await waiting:
            assert await asyncio.to_thread(right.recv, 32) == frame.meet.proof
            with pytest.raises(OSError):
                dial(frame.meet.address)


async def test_nobody_who_comes_ends_the_wait_with_a_reason(controls: tuple[Link, Link]) -> None:
    _, far = controls
    with pytest.raises(LinkClosed, match=r"nobody came to 127\.0\.0\.1:"):
        await await_caller(far, listen_tcp("127.0.0.1"), 0.05)


async def test_someone_else_at_the_address_is_noticed(controls: tuple[Link, Link]) -> None:
    near, far = controls
    with listen_tcp("127.0.0.1") as impostor:
        address = f"127.0.0.1:{impostor.getsockname()[1]}"
        meet = Meet(address=address, ticket=b"t" * 32, proof=b"p" * 32)
        await far.send(Frame(meet=meet))
        calling = asyncio.create_task(call(near, 5))
        sock, _ = await asyncio.to_thread(impostor.accept)
        with sock:
            sock.sendall(b"q" * 32)
            with pytest.raises(LinkClosed, match="nobody we know is at"):
                await calling


async def test_two_hosts_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from transport import shm_wire

    class Host(Keeper):
        pass

    async with network("shm") as net:
        address = await net.listen(Host())
        ids = iter(["here", "there", "there", "there"])
        monkeypatch.setattr(shm_wire, "host_id", lambda: next(ids))
        with pytest.raises(LinkClosed, match="no memory to share: this is host there, not here"):
            await net.connector().connect(address, hello())


async def links_of(net: Network) -> tuple[Link, Link, Keeper]:
    keeper = Keeper()
    address = await net.listen(keeper)
    near = await net.connector().connect(address, hello())
    await soon(lambda: bool(keeper.links))
    return near, keeper.links[0], keeper


async def test_a_caller_that_leaves_before_it_shows_its_pool_leaves_nothing_open(
    controls: tuple[Link, Link],
) -> None:
    near, far = controls
    far.hello.rendezvous = host_id()
    far.hello.pool.num_blocks = 1
    before = num_open_files()
    accepting = asyncio.create_task(ShmAcceptor(timeout_s=5, spec=SPEC).accept(far))
    with await call(near, 5) as sock:
        await asyncio.get_running_loop().sock_recv(sock, 1)  # the ring has come
    with pytest.raises(LinkClosed, match="no memory to share: 0 descriptors"):
        await accepting
    del accepting
    await soon(lambda: num_open_files() == before)


@pytest.mark.parametrize("wire", ["tcp", "shm"])
async def test_a_cut_socket_ends_both_ends_though_the_control_stream_lives(wire: str) -> None:
    async with network(wire) as net:
        near, far, keeper = await links_of(net)
        near._stream._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        for link in (near, far):
            with pytest.raises(LinkClosed):
                async with asyncio.timeout(5):
                    await link.recv()
        keeper.leave.set()
        await near.close("done")


@pytest.mark.parametrize("wire", ["tcp", "shm"])
async def test_bytes_that_are_no_message_end_the_link(wire: str) -> None:
    async with network(wire) as net:
        near, far, keeper = await links_of(net)
        near._stream._sock.sendall(b"\xff" * 64)  # type: ignore[attr-defined]
        with pytest.raises(LinkClosed):
            async with asyncio.timeout(5):
                await far.recv()
        keeper.leave.set()
        await near.close("done")
