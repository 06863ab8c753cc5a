"""A link whose frames and payloads ride a socket of the pair, beside the stream that opened it.

The control stream says hello and welcome, notices when the other end dies, and says at the end why
it ended; the socket carries all the rest, in order. Either one failing ends both.
"""

import asyncio

from protos.transfer_pb2 import Frame
from transport.frame_socket import FrameSocket, Message, parse_frame
from transport.link import Ending, Link, LinkClosed

MAX_AHEAD = 4  # messages read before they are wanted, so that the next payload is under way
LAST_WORDS_S = 1.0  # for one half of a link to end after the other has


class SocketLink:
    """Either end. `tcp_wire` uses it as it is; `shm_wire` sends payloads another way."""

    def __init__(self, control: Link, stream: FrameSocket) -> None:
        self.hello = control.hello
        self.welcome = control.welcome
        self._control = control
        self._stream = stream
        self._end = Ending()
        self._ahead: asyncio.Queue[tuple[Frame, memoryview | None]] = asyncio.Queue(MAX_AHEAD)
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())
        self._minder = asyncio.create_task(self._mind())

    async def lend(self, num_bytes: int) -> memoryview | None:
        return self._stream.stage(num_bytes)

    async def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        self._end.check()
        # To its end, even if the caller is cancelled: half a message would shift all that follow.
        await self._end.unless(self._put(frame, payload), abandon=True)

    async def recv(self) -> tuple[Frame, memoryview | None]:
        if not self._ahead.empty():  # what was sent before the end still arrives
            return self._ahead.get_nowait()
        return await self._end.unless(self._ahead.get())

    async def close(self, reason: str) -> None:
        self._stream.finish_sending()
        await self._control.close(reason)
        self._over(reason)
        tasks = (self._minder, self._reader, self._watcher)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _put(self, frame: Frame, payload: memoryview | None) -> None:
        num_bytes = payload.nbytes if payload is not None else 0
        await self._stream.send(frame.SerializeToString(), num_bytes, payload=payload)

    async def _take(self, message: Message) -> tuple[Frame, memoryview | None] | None:
        """What a message means to who receives; None for one that is between the links only."""
        frame, _, _, payload = message
        return parse_frame(frame), payload

    async def _read(self) -> str:
        """Until the socket ends."""
        try:
            while True:
                item = await self._take(await self._stream.receive())
                if item is not None:
                    await self._ahead.put(item)
        except LinkClosed as closed:
            return str(closed)

    async def _watch(self) -> str:
        """Until the control stream ends."""
        try:
            await self._control.recv()
        except LinkClosed as closed:
            return str(closed)
        return "a frame came on the control stream, where none belongs any more"

    async def _mind(self) -> None:
        """End the link when either half has ended; the control stream knows best why."""
        halves = [self._reader, self._watcher]
        await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
        self._stream.finish_sending()
        await asyncio.wait(halves, timeout=LAST_WORDS_S)
        if self._watcher.done():
            self._over(self._watcher.result())
        else:
            self._over(self._reader.result())
            await self._control.close(self._reader.result())

    def _over(self, reason: str) -> None:
        self._end.come(reason)
        self._stream.close()
