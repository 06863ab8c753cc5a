"""How long a link may take nothing, with everybody waiting in line."""

import asyncio

import pytest

from protos.transfer_pb2 import Frame, Hello, Renew, Welcome
from transport.link import Ending, LinkClosed, Payload
from transport.port import Port


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


async def test_a_slow_link_that_moves_is_kept_however_long_the_line_is() -> None:
    link = SlowLink(0.03)
    port = Port(link, send_timeout_s=0.15)
    running = asyncio.create_task(port.run(ignore))
    line = [port._send(Frame(renew=Renew()), None) for _ in range(15)]
    await asyncio.gather(*line)
    assert port.open and not link.reasons
    await link.close("done")
    await running
