"""How long a link may take nothing, with everybody waiting in line."""

import asyncio

import pytest

from protos.transfer_pb2 import Frame, Hello, Renew, SealAll, Welcome
from tests.transport.broken import failures
from tests.transport.harness import cluster, network, soon
from transport.copiers import Copiers
from transport.link import Ending, LinkClosed, Payload, Pouring
from transport.port import MAX_POSTED, Port


class SlowLink:
    """Takes one frame at a time, each for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.hello, self.welcome = Hello(), Welcome()
        self.reasons: list[str] = []
        self._seconds = seconds
        self._line = asyncio.Lock()
        self._end = Ending()

    async def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        async with self._line:
            await self._end.unless(asyncio.sleep(self._seconds))

    async def recv(self) -> tuple[Frame, memoryview | None]:
        raise LinkClosed(await self._end.wait())

    async def close(self, reason: str) -> None:
        self.reasons.append(reason)
        self._end.come(reason)


class Trickle(SlowLink):
    """Pours one payload, and never ends; it says that some of it leaves for `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(60)
        self._until = asyncio.get_running_loop().time() + seconds

    @property
    def num_bytes_written(self) -> int:
        return int(1000 * min(asyncio.get_running_loop().time(), self._until))

    @property
    def reach(self) -> int:
        return 0

    def pour(self, pouring: Pouring) -> "asyncio.Future[None]":
        return asyncio.ensure_future(self._end.unless(asyncio.sleep(60)))


async def ignore(frame: Frame, payload: Payload) -> None:
    pass


async def test_a_link_over_which_nothing_leaves_is_closed() -> None:
    link = SlowLink(60)
    port = Port(link, send_timeout_s=0.1)
    port.post(Frame(renew=Renew()))
    async with asyncio.timeout(5):
        reason = await port.run(ignore)
    assert reason == "no frame left in 0.1 s"
    assert not port.open
    with pytest.raises(LinkClosed):
        await link.send(Frame())


async def test_a_payload_that_leaves_slowly_closes_its_link_only_when_no_more_of_it_leaves() -> (
    None
):
    loop = asyncio.get_running_loop()
    began, link = loop.time(), Trickle(1.0)
    port, copiers = Port(link, send_timeout_s=0.3), Copiers(1, "unused")
    running = asyncio.create_task(port.run(ignore))
    pouring = Pouring(Frame(), 1, 1, lambda outlet: None)
    leaving = asyncio.create_task(port.load(1, lambda room: None, lambda: pouring, copiers))
    async with asyncio.timeout(10):
        assert await running == "no frame left in 0.3 s"
    assert loop.time() - began >= 1.0
    await asyncio.gather(leaving, return_exceptions=True)


async def test_a_link_whose_other_end_does_not_read_is_closed_before_much_waits_for_it() -> None:
    link = SlowLink(60)
    port = Port(link, send_timeout_s=60)
    running = asyncio.create_task(port.run(ignore))
    for _ in range(3 * MAX_POSTED):
        port.post(Frame(renew=Renew()))
    async with asyncio.timeout(5):
        assert await running == "4096 frames were not read"
    assert len(port._posted) <= MAX_POSTED


async def test_a_frame_that_cannot_be_handled_ends_the_link_and_both_ends_know_why() -> None:
    async def stumble(port: Port, frame: Frame, payload: Payload) -> None:
        raise KeyError(5)

    async with network("grpc") as net, cluster(net) as group:
        (shipper,), (receiver,) = group.prefill.shippers, group.decode.receivers
        receiver._frames.handle = stumble  # type: ignore[method-assign]
        (failure,) = await failures(*group.ship(group.key(), 18))
        assert failure.code == "UNAVAILABLE"
        assert "a frame could not be handled: KeyError(5)" in failure.reason
        assert shipper.open_shipments == 0


async def test_a_slow_link_that_moves_is_kept_however_long_the_line_is() -> None:
    link = SlowLink(0.03)
    port = Port(link, send_timeout_s=0.15)
    running = asyncio.create_task(port.run(ignore))
    line = [port._send(Frame(renew=Renew()), None) for _ in range(15)]
    await asyncio.gather(*line)
    assert port.open and not link.reasons
    await link.close("done")
    await running


class QuickLink(SlowLink):
    """Takes a small frame at once, when it is free."""

    def __init__(self) -> None:
        super().__init__(0)
        self.free = True
        self.left: list[int] = []

    def post(self, frame: Frame) -> bool:
        if self.free:
            self.left.append(frame.seal_all.num_chunks)
        return self.free

    async def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        self.left.append(frame.seal_all.num_chunks)


async def test_what_a_link_takes_at_once_leaves_at_once_and_never_before_what_waits() -> None:
    link = QuickLink()
    port = Port(link, send_timeout_s=5)
    frames = [Frame(seal_all=SealAll(num_chunks=number)) for number in range(4)]
    port.post(frames[0])
    assert link.left == [0]
    link.free = False
    port.post(frames[1])
    link.free = True
    port.post(frames[2])
    assert link.left == [0]
    running = asyncio.create_task(port.run(ignore))
    await soon(lambda: link.left == [0, 1, 2])
    port.post(frames[3])
    assert link.left == [0, 1, 2, 3]
    await link.close("done")
    await running
