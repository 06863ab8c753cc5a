"""Any wire, with faults: what a test lets happen to the frames of a link."""

from collections import deque
from collections.abc import Awaitable, Callable

from protos.transfer_pb2 import Frame, Hello, Welcome
from transport.link import Connector, Link, LinkClosed

Item = tuple[Frame, memoryview | None]
Fault = Callable[[Frame, memoryview | None], Awaitable[list[Item]]]


class Cut(Exception):
    """Raised by a fault: the wire is severed here."""


async def none(frame: Frame, payload: memoryview | None) -> list[Item]:
    return [(frame, payload)]


class FaultConnector:
    """Links as `inner` makes them; each fault says what becomes of a frame: none, one or more.

    `outgoing` sees what prefill sends, `incoming` what decode answers.
    """

    def __init__(self, inner: Connector, outgoing: Fault = none, incoming: Fault = none) -> None:
        self._inner = inner
        self._outgoing = outgoing
        self._incoming = incoming

    async def connect(self, address: str, hello: Hello) -> Link:
        return FaultLink(await self._inner.connect(address, hello), self._outgoing, self._incoming)


class FaultLink:
    def __init__(self, inner: Link, outgoing: Fault, incoming: Fault) -> None:
        self._inner = inner
        self._outgoing = outgoing
        self._incoming = incoming
        self._received: deque[Item] = deque()

    @property
    def hello(self) -> Hello:
        return self._inner.hello

    @property
    def welcome(self) -> Welcome:
        return self._inner.welcome

    async def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        for each in await self._apply(self._outgoing, frame, payload):
            await self._inner.send(*each)

    async def recv(self) -> Item:
        while not self._received:
            self._received += await self._apply(self._incoming, *await self._inner.recv())
        return self._received.popleft()

    async def close(self, reason: str) -> None:
        await self._inner.close(reason)

    async def _apply(self, fault: Fault, frame: Frame, payload: memoryview | None) -> list[Item]:
        try:
            return await fault(frame, payload)
        except Cut as cut:
            await self._inner.close(str(cut))
            raise LinkClosed(str(cut)) from cut
