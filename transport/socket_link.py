"""A link whose frames and payloads ride a socket of the pair, beside the stream that opened it.

The control stream says hello and welcome, notices when the other end dies, and says at the end why
it ended; the socket carries all the rest, in order. Either one failing ends both.
"""

import asyncio
import contextlib
from collections import deque

from protos.transfer_pb2 import Frame
from transport import link
from transport.frame_socket import FrameSocket, parse_frame
from transport.link import Ending, Fill, Link, LinkClosed, NeverComes
from transport.pieces import staged

MAX_AHEAD = 4  # messages read before they are wanted, so that the next payload is under way
LAST_WORDS_S = 1.0  # for one half of a link to end after the other has

Payload = link.Payload | asyncio.Future[memoryview]  # one that is to come keeps its place


class SocketLink:
    """Either end. `tcp_wire` uses it as it is; the others send payloads another way."""

    def __init__(self, control: Link, stream: FrameSocket) -> None:
        self.hello = control.hello
        self.welcome = control.welcome
        self._control = control
        self._stream = stream
        self._end = Ending()
        self._ahead: deque[tuple[Frame, Payload]] = deque()
        self._stirred: asyncio.Future[None] | None = None  # of whoever waits in `recv`
        self._socket_end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch())
        self._minder = asyncio.create_task(self._mind())
        stream.start(self._take, self._socket_ended)

    @property
    def num_bytes_read(self) -> int:
        return self._stream.num_bytes_read

    @property
    def tells_ahead(self) -> bool:
        return self._stream.unread

    def load(self, num_bytes: int, fill: Fill) -> "asyncio.Future[None]":
        self._end.check()
        return self._stream.load(num_bytes, fill)

    async def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        self._end.check()
        if payload is not None:  # built elsewhere, which only tests and faulty wires do

            def copy(room: memoryview) -> Frame:
                room[:] = payload
                return frame

            await asyncio.shield(self.load(payload.nbytes, copy))
            return
        sent = self._stream.send(frame.SerializeToString())
        if sent is not None:
            await sent

    def post(self, frame: Frame) -> bool:
        self._end.check()
        return self._stream.send_at_once(frame.SerializeToString())

    async def recv(self) -> tuple[Frame, memoryview | None]:
        while True:
            frame, payload = await self.recv_unread()
            if payload is None or isinstance(payload, memoryview):
                return frame, payload
            with contextlib.suppress(NeverComes):
                return await self._end.unless(staged(frame, payload))

    async def recv_unread(self) -> tuple[Frame, link.Payload]:
        """As `recv`, with a payload that is still to be read if the socket leaves them so."""
        while not self._ahead:  # what was sent before the end still arrives
            self._end.check()
            self._stirred = asyncio.get_running_loop().create_future()
            await self._stirred
        if len(self._ahead) <= MAX_AHEAD:
            self._stream.resume()
        frame, payload = self._ahead.popleft()
        if not isinstance(payload, asyncio.Future):
            return frame, payload
        try:
            return frame, await self._end.unless(payload)
        except RuntimeError as error:
            reason = f"a payload did not come: {error}"
            await self.close(reason)
            raise LinkClosed(reason) from error

    async def close(self, reason: str) -> None:
        self._stream.finish_sending()
        await self._control.close(reason)
        self._over(reason)
        tasks = (self._minder, self._watcher)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, frame: bytes, num_bytes: int, place: int, payload: link.Payload) -> None:
        """A message has come. Raises LinkClosed for one that makes no sense."""
        self._put_ahead(parse_frame(frame), payload)

    def _put_ahead(self, frame: Frame, payload: Payload) -> None:
        self._ahead.append((frame, payload))
        if len(self._ahead) >= MAX_AHEAD:
            self._stream.pause()
        self._stir()

    def _stir(self) -> None:
        if self._stirred is not None and not self._stirred.done():
            self._stirred.set_result(None)

    def _socket_ended(self, reason: str) -> None:
        if not self._socket_end.done():
            self._socket_end.set_result(reason)

    async def _watch(self) -> str:
        """Until the control stream ends."""
        try:
            await self._control.recv()
        except LinkClosed as closed:
            return str(closed)
        return "a frame came on the control stream, where none belongs any more"

    async def _mind(self) -> None:
        """End the link when either half has ended; the control stream knows best why."""
        halves: list[asyncio.Future[str]] = [self._socket_end, self._watcher]
        await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
        self._stream.finish_sending()
        await asyncio.wait(halves, timeout=LAST_WORDS_S)
        if self._watcher.done():
            self._over(self._watcher.result())
        else:
            self._over(self._socket_end.result())
            await self._control.close(self._socket_end.result())

    def _over(self, reason: str) -> None:
        self._end.come(reason)
        self._stream.close()
        self._stir()
