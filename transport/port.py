"""One end of a link at work: frames posted without waiting, and one task that reads."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from protos.transfer_pb2 import Frame
from transport.link import Lender, Link, LinkClosed

MAX_POSTED = 4096  # frames the other end has not taken: it does not read

Handle = Callable[[Frame, memoryview | None], Awaitable[None]]


class Port:
    """Owns a link from its welcome to its end."""

    def __init__(self, link: Link, send_timeout_s: float, max_staged_chunks: int = 1) -> None:
        self.link = link
        self.open = True
        self.room = asyncio.Semaphore(max_staged_chunks)  # for payloads not yet scattered
        self._lender = link if isinstance(link, Lender) else None
        self._send_timeout_s = send_timeout_s
        self._posted: deque[Frame] = deque()
        self._stirred = asyncio.Event()

    def post(self, frame: Frame) -> None:
        """Send `frame` after those posted before; it is lost if the link breaks."""
        if self.open:
            self._posted.append(frame)
            self._stirred.set()

    async def lend(self, num_bytes: int) -> memoryview | None:
        """Room of the wire's to build a payload in; None when any memory will do."""
        if self._lender is None:
            return None
        async with self._in_time():
            return await self._lender.lend(num_bytes)

    async def send(self, frame: Frame, payload: memoryview) -> None:
        """Returns once the wire has taken the frame. Raises LinkClosed."""
        await self._send(frame, payload)

    async def run(self, handle: Handle) -> str:
        """Read until the link closes, and say why it did. Frames are handled one at a time."""
        writer = asyncio.create_task(self._write())
        try:
            while True:
                await handle(*await self.link.recv())
        except LinkClosed as closed:
            return str(closed)
        finally:
            self.open = False
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def hang_up(self, reason: str) -> None:
        """Close the link after what is posted has left, as far as the link still carries it."""
        with contextlib.suppress(LinkClosed):
            while self._posted and self.open:
                await self._write_one()
        await self.link.close(reason)

    def cut(self, reason: str, tasks: set[asyncio.Task[None]]) -> None:
        """Close a link that seems dead; what is posted leaves if the link takes it at once.

        It is done by a task, which is in `tasks` until then. The next shipment dials again: a link
        that was healed would wait to resend for long.
        """
        cutting = asyncio.create_task(self._cut(reason))
        tasks.add(cutting)
        cutting.add_done_callback(tasks.discard)

    async def _cut(self, reason: str) -> None:
        self.open = False
        await asyncio.sleep(0)
        await self.link.close(reason)

    async def _write(self) -> None:
        try:
            while True:
                while self._posted:
                    if len(self._posted) > MAX_POSTED:
                        await self.link.close(f"{len(self._posted)} frames were not read")
                    await self._write_one()
                self._stirred.clear()
                await self._stirred.wait()
        except LinkClosed:
            pass  # `recv` ends, too, and says why
        except Exception as error:  # a link that takes no frames must not look alive for a lease
            self.open = False
            await self.link.close(f"a frame could not be sent: {error!r}")

    async def _write_one(self) -> None:
        await self._send(self._posted.popleft(), None)

    async def _send(self, frame: Frame, payload: memoryview | None) -> None:
        async with self._in_time():
            await self.link.send(frame, payload)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                yield
        except TimeoutError:
            self.open = False
            reason = f"no frame left in {self._send_timeout_s:g} s"
            await self.link.close(reason)
            raise LinkClosed(reason) from None
        except LinkClosed:
            self.open = False  # whoever looks for a link finds out before `run` has ended
            raise
