"""A wire inside one process: the executable definition of what the real wires must do."""

import asyncio
from collections import deque

from protos.transfer_pb2 import Frame, Hello, Welcome
from transport.link import Ending, LinkClosed, Listener

MAX_QUEUED = 64  # frames of one direction, before `send` waits


class _Way:
    """One direction of a link."""

    def __init__(self) -> None:
        self.frames: deque[tuple[Frame, memoryview | None]] = deque()
        self.moved = asyncio.Condition()

    async def put(self, frame: Frame, payload: memoryview | None) -> None:
        async with self.moved:
            await self.moved.wait_for(lambda: len(self.frames) < MAX_QUEUED)
            self.frames.append((frame, payload))
            self.moved.notify_all()

    async def get(self) -> tuple[Frame, memoryview | None]:
        async with self.moved:
            await self.moved.wait_for(lambda: self.frames)
            self.moved.notify_all()
            return self.frames.popleft()


class LoopbackLink:
    def __init__(self, hello: Hello, welcome: Welcome, out: _Way, back: _Way, end: Ending) -> None:
        self.hello = hello
        self.welcome = welcome
        self._out = out
        self._back = back
        self._end = end

    async def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        self._end.check()
        copy = Frame()
        copy.CopyFrom(frame)
        await self._end.unless(self._out.put(copy, payload))

    async def recv(self) -> tuple[Frame, memoryview | None]:
        if self._back.frames:  # what was sent before the end still arrives
            return await self._back.get()
        return await self._end.unless(self._back.get())

    async def close(self, reason: str) -> None:
        self._end.come(reason)


class LoopbackWire:
    """The network of one process: a connector, and the addresses it can reach."""

    def __init__(self) -> None:
        self._listeners: dict[str, Listener] = {}
        self._served: dict[asyncio.Task[None], tuple[str, Ending]] = {}

    def listen(self, address: str, listener: Listener) -> None:
        """Take calls at `address`; links to a listener before this one are cut."""
        self.silence(address)
        self._listeners[address] = listener

    def silence(self, address: str) -> None:
        """Nobody listens at `address` any more, and its links are cut."""
        self._listeners.pop(address, None)
        for served_at, end in self._served.values():
            if served_at == address:
                end.come(f"{address} is gone")

    async def connect(self, address: str, hello: Hello) -> LoopbackLink:
        listener = self._listeners.get(address)
        if listener is None:
            raise LinkClosed(f"nobody listens at {address}")
        greeting = Hello()
        greeting.CopyFrom(hello)
        greeting.wire = greeting.wire or "loopback"
        welcome = listener.answer(greeting)
        there, back, end = _Way(), _Way(), Ending()
        far = LoopbackLink(greeting, welcome, back, there, end)
        task = asyncio.create_task(self._serve(listener, far, end))
        self._served[task] = (address, end)
        task.add_done_callback(lambda done: self._served.pop(done, None))
        return LoopbackLink(greeting, welcome, there, back, end)

    async def close(self) -> None:
        for address in list(self._listeners):
            self.silence(address)
        await asyncio.gather(*self._served, return_exceptions=True)

    async def _serve(self, listener: Listener, link: LoopbackLink, end: Ending) -> None:
        try:
            await listener.serve(link)
        finally:
            end.come("the other end stopped serving")
