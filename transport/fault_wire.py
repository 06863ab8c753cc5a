"""Any wire, with faults: what a test lets happen to the frames of a link.

`FaultConnector` is told by two functions what becomes of each frame. `FaultWire` draws it from a
seed (`transport.faults`): every promise of a wire (`transport.link`) may then be broken, but for
two. What both ends said when they met stays whole, and an end that comes, comes to both.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from protos.transfer_pb2 import Frame, Hello, Welcome
from transport.clock import Clock
from transport.faults import Faults, Kind
from transport.link import Connector, Link, LinkClosed, PoolShower

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


class FaultWire:
    """Links as `inner` makes them, with the faults of `faults`; no two links share a stall."""

    def __init__(
        self, inner: Connector, faults: Faults, clock: Clock, wait_s: float = 0.05
    ) -> None:
        self.faults = faults
        self._inner = inner
        self._clock = clock
        self._wait_s = wait_s  # that a delay or a stall lasts

    async def connect(self, address: str, hello: Hello) -> Link:
        link = await self._inner.connect(address, hello)
        weather = _Weather(self.faults, self._clock, self._wait_s)
        return FaultLink(link, _Way(weather, down=True), _Way(weather, down=False))


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

    @property
    def shows_pool(self) -> bool:
        return isinstance(self._inner, PoolShower) and self._inner.shows_pool

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


class _Weather:
    """What both directions of one link share."""

    def __init__(self, faults: Faults, clock: Clock, wait_s: float) -> None:
        self.faults = faults
        self.clock = clock
        self.wait_s = wait_s
        self.calm_at = clock.now()

    async def pass_by(self) -> None:
        while (left := self.calm_at - self.clock.now()) > 0:
            await self.clock.sleep(left)


class _Way:
    """One direction of a link. What is held back leaves after a few later frames."""

    def __init__(self, weather: _Weather, down: bool) -> None:
        self._weather = weather
        self._down = down
        self._gate = asyncio.Lock()  # frames pass it in the order in which they came
        self._held: list[tuple[int, Item]] = []  # how many more frames each lets by
        self._closed = False

    async def __call__(self, frame: Frame, payload: memoryview | None) -> list[Item]:
        async with self._gate:
            weather = self._weather
            kind, frame, payload = weather.faults.draw(self._down, frame, payload)
            if kind is Kind.STALL:
                weather.calm_at = weather.clock.now() + weather.wait_s
            elif kind is Kind.DELAY:
                await weather.clock.sleep(weather.wait_s)
            await weather.pass_by()
            return self._fate(kind, (frame, payload))

    def _fate(self, kind: Kind | None, item: Item) -> list[Item]:
        match kind:
            case Kind.REFUSE:
                raise OSError("the wire refused the frame")
            case Kind.CUT:
                raise Cut("the wire was cut")
            case Kind.HALF_CLOSE:
                self._closed = True
        if self._closed:
            return []
        if kind is Kind.DROP:
            return self._released()
        if kind is Kind.REORDER:
            self._held.append((self._weather.faults.random.randint(1, 3), item))
            return []
        return [*([item] * (1 + (kind is Kind.DUPLICATE))), *self._released()]

    def _released(self) -> list[Item]:
        """What has let by as many frames as it was to."""
        self._held = [(count - 1, item) for count, item in self._held]
        out = [item for count, item in self._held if count <= 0]
        self._held = [(count, item) for count, item in self._held if count > 0]
        return out
