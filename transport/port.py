"""One end of a link at work: frames posted without waiting, and one task that reads."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import structlog

from kernels.crew import Steps
from protos.transfer_pb2 import Frame
from transport.copiers import Copiers
from transport.link import (
    Fill,
    Link,
    LinkClosed,
    Loader,
    Opener,
    Payload,
    PoolReader,
    PoolShower,
    Poster,
    Pourer,
    Pouring,
    heed,
)
from transport.messages import MAX_PAYLOAD_BYTES
from transport.pulse import Pulse

log = structlog.get_logger()

MAX_POSTED = 4096  # frames the other end has not taken: it does not read

Handle = Callable[[Frame, Payload], Awaitable[None]]


class Port:
    """Owns a link from its welcome to its end."""

    def __init__(self, link: Link, send_timeout_s: float, max_staged_chunks: int = 1) -> None:
        self.link = link
        self.open = True
        self.retired = False  # in quarantine: no shipment begins over it any more
        self.room = asyncio.Semaphore(max_staged_chunks)  # for payloads not yet scattered
        self._loader = link if isinstance(link, Loader) else None
        self._pourer = link if isinstance(link, Pourer) else None
        self._poster = link if isinstance(link, Poster) else None
        self._outflow = Pulse(self._num_written)
        self.pours = self._pourer is not None  # frames keep their order with payloads that wait
        self.shows_pool = isinstance(link, PoolShower) and link.shows_pool
        self._opener = link if isinstance(link, Opener) and link.tells_ahead else None
        self.tells_ahead = self._opener is not None
        self.pool = link.pool if isinstance(link, PoolReader) else None
        self._num_bytes = 0  # of payloads that came whole
        self.pulse = Pulse(lambda: self.num_received)
        self._send_timeout_s = send_timeout_s
        self._posted: deque[Frame] = deque()
        self._stirred = asyncio.Event()
        self._cuts: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._num_leaving = 0  # frames that wait to leave
        self._left_at = 0.0  # when the last one did
        self._watchdog: asyncio.TimerHandle | None = None

    @property
    def num_received(self) -> int:
        """Bytes of payloads that have come: of each as soon as the link knows of it."""
        return self._num_bytes if self._opener is None else self._opener.num_bytes_read

    def post(self, frame: Frame) -> None:
        """Send `frame` after those posted before; it is lost if the link breaks."""
        if not self.open:
            return
        if len(self._posted) >= MAX_POSTED:
            self.cut(f"{len(self._posted)} frames were not read", self._cuts)
            return
        if self._poster is not None and not self._posted:
            try:
                if self._poster.post(frame):
                    return
            except LinkClosed:
                return
        self._posted.append(frame)
        self._stirred.set()

    async def load(
        self, num_bytes: int, fill: Fill, pouring: Callable[[], Pouring], copiers: Copiers
    ) -> None:
        """Send a payload of `num_bytes` with its frame, built by `fill` on a thread: one of the
        wire's if it has any, else one of `copiers`; or as `pouring` says, if the wire can do that.
        Returns once the wire has taken it.

        Raises LinkClosed, and what `fill` or the pouring raises.
        """
        if self._pourer is not None:
            with self._in_time():
                poured = self._pourer.pour(pouring())
                poured.add_done_callback(heed)
                await poured
            return
        if self._loader is not None:
            with self._in_time():
                loading = self._loader.load(num_bytes, fill)
                loading.add_done_callback(heed)
                await loading
            return
        room = memoryview(bytearray(num_bytes))
        frame = await copiers.do(partial(fill, room))
        if frame is not None:
            await self._send(frame, room)

    async def point(self, point: Steps[Frame | None], copiers: Copiers) -> None:
        """Send the frame that `point` makes, of cells that the other end reads where they lie.
        Raises LinkClosed, and what `point` raises.
        """
        made = copiers.go_through(point)
        waited = not made.done()
        frame = await made
        if frame is not None:
            await self._send(frame, None)
        if not waited:
            await asyncio.sleep(0)  # a long prompt has many of these, and others have their turn

    async def run(self, handle: Handle) -> str:
        """Read until the link closes, and say why it did. Frames are handled one at a time; what
        `handle` leaves unread of a payload is lost.
        """
        recv = self.link.recv_unread if isinstance(self.link, Opener) else self.link.recv
        writer = asyncio.create_task(self._write())
        try:
            while True:
                frame, payload = await recv()
                self._num_bytes += 0 if payload is None else payload.nbytes
                await handle(frame, payload)
                if payload is not None and not isinstance(payload, memoryview):
                    payload.skip()
                del payload
        except LinkClosed as closed:
            return str(closed)
        except Exception as error:  # ours: the other end is told, and does not wait for a lease
            log.exception("frame_not_handled", prefill=self.link.hello.prefill_worker)
            reason = f"a frame could not be handled: {error!r}"
            await self.link.close(reason)
            return reason
        finally:
            self.open = False
            if self._watchdog is not None:
                self._watchdog.cancel()
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
        self.open = False
        cutting = asyncio.create_task(self._cut(reason))
        tasks.add(cutting)
        cutting.add_done_callback(tasks.discard)

    async def _cut(self, reason: str) -> None:
        await asyncio.sleep(0)
        await self.link.close(reason)

    async def _write(self) -> None:
        try:
            while True:
                while self._posted:
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
        with self._in_time():
            await self.link.send(frame, payload)

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """A link over which nothing leaves for too long is closed, which ends what waits for it."""
        if not self._num_leaving:
            self._left_at = self._loop.time()
            if self._watchdog is None:
                self._watchdog = self._loop.call_later(self._send_timeout_s, self._look)
        self._num_leaving += 1
        try:
            yield
            self._left_at = self._loop.time()
        except LinkClosed:
            self.open = False  # whoever looks for a link finds out before `run` has ended
            raise
        finally:
            self._num_leaving -= 1

    @property
    def reach(self) -> int:
        """Bytes of a payload that is stored nowhere which the wire takes in a moment, as far as is
        known.
        """
        if self.shows_pool:  # none leave
            return MAX_PAYLOAD_BYTES
        return 0 if self._pourer is None else self._pourer.reach

    def _num_written(self) -> int:
        return 0 if self._pourer is None else self._pourer.num_bytes_written

    def _look(self) -> None:
        """Whether something has left since the last look, or nothing had to."""
        self._watchdog = None
        self._left_at = max(self._left_at, self._outflow.beat_at(self._loop.time()))
        left = self._left_at + self._send_timeout_s - self._loop.time()
        if self._num_leaving and left <= 0:
            self.cut(f"no frame left in {self._send_timeout_s:g} s", self._cuts)
        elif self._num_leaving and self.open:
            self._watchdog = self._loop.call_later(left, self._look)
