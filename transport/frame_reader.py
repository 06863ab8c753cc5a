"""The reading half of a socket of frames and payloads; see `transport.frame_socket`.

Small messages are taken on the event loop while nothing else comes. A thread reads payloads, and
all that is there behind them, so that the next payload waits for no turn of the loop: what the
loop has to do meanwhile it is told by a bell, when the thread is about to read on for long.
"""

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from transport.bell import Bell
from transport.link import LinkClosed, NeverComes, Payload
from transport.messages import (
    AHEAD,
    HEADER,
    INLINE,
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TOLD,
    TOLD,
)
from transport.pieces import within, without
from transport.socket_inlet import SocketInlet, Work
from transport.staging import Staging
from transport.threads import Threads

WASTE_BYTES = 256 << 10  # read at once of what nobody wants
READ_BYTES = 1 << 20  # waited for at once: of a slow link it is to be seen that something comes
MAX_ARRIVED = 3  # messages read before the loop looks at them: what lies longer leaves the caches
MAX_VIEWS = 512  # for one system call

Take = Callable[[bytes, int, int, Payload], None]  # frame, payload_bytes, place, payload
T = TypeVar("T")


class FrameReader:
    """Reads a socket that is somebody else's."""

    def __init__(self, sock: socket.socket, unread: bool) -> None:
        """With `unread`, payloads are told before they are read."""
        self._sock = sock
        self._unread = unread
        self._loop = asyncio.get_running_loop()
        self._thread = Threads(1, "kv-socket-read")
        self._bell = Bell(self._tell)
        self._room = np.empty(0, dtype=np.uint8)
        self.staging = Staging()
        self._told: deque[SocketInlet] = deque()  # of frames told ahead
        self._inlet: SocketInlet | None = None  # what comes next, until it is read
        self._header = memoryview(bytearray(HEADER.size))
        self._frame: memoryview | None = None  # the one being read, once its header is
        self._rest = self._header  # what is still to be read of it
        self._about = (0, 0, INLINE)
        self._arrived: deque[tuple[bytes, int, int, Payload]] = deque()
        self._done: deque[Work[Any]] = deque()
        self._broken = False  # by a message that `take` refused
        self._num_reading = 0  # calls of the thread
        self._watched = False
        self._paused = False
        self._open = True
        self.num_bytes = 0  # of payloads, read so far

    def start(self, take: Take, ended: Callable[[str], None]) -> None:
        self._take, self._ended = take, ended
        self._loop.call_soon(self._read_on)

    def pause(self) -> None:
        """Take no more until `resume`; the other end feels it once the buffers are full."""
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._read_on)

    def close(self) -> None:
        """The socket is shut down: everything returns from it at once."""
        self._open = False
        self._watch(False)
        self._thread.stop()
        self._bell.close()
        for inlet in (self._inlet, *self._told):
            if inlet is not None:
                inlet.withdraw("the socket is closed")
        self._settle()

    # what inlets need

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def piece(self, num_bytes: int) -> NDArray[np.uint8]:
        """Room for what passes, on the thread."""
        if self._room.nbytes < num_bytes:
            self._room = np.empty(num_bytes, dtype=np.uint8)
        return self._room

    def read(self, views: Sequence[memoryview]) -> None:
        """Fill them all, on the thread."""
        left = list(views)
        while left:
            some = within(left[:MAX_VIEWS], READ_BYTES)
            num_bytes, *_ = self._sock.recvmsg_into(some, 0, socket.MSG_WAITALL)
            if not num_bytes:
                raise ConnectionError("the other end closed the socket within a payload")
            self.num_bytes += num_bytes
            left = without(left, num_bytes)

    def take_in(self, inlet: SocketInlet, work: Callable[[], T]) -> "asyncio.Future[T]":
        """On the loop: `work` reads of the payload what it wants, on the thread, when it comes."""
        given = Work(work, self._loop.create_future())
        if not self._open:
            given.future.set_exception(LinkClosed("the socket is closed"))
        elif inlet.give(given):  # it has come
            self._read_by_thread(None)
        return given.future

    # on the loop

    def _read_on(self) -> None:
        """Unless a thread reads: take all that is there."""
        if self._num_reading or not self._open or self._inlet is not None:
            return
        try:
            self._go_on(self._advance())
        except BlockingIOError:
            self._go_on(None, dry=True)
        except (OSError, LinkClosed) as error:
            self._go_on(None, over=error)

    def _read_by_thread(self, payload: memoryview | None) -> None:
        self._num_reading += 1
        reading = self._thread.do(partial(self._read_payloads, payload))
        reading.add_done_callback(self._payloads_read)

    def _payloads_read(self, reading: "asyncio.Future[None]") -> None:
        self._num_reading -= 1
        error = reading.exception()
        if isinstance(error, BlockingIOError):
            self._go_on(None, dry=True)
        else:
            self._go_on(None, over=error)

    def _go_on(
        self, payload: memoryview | None, *, dry: bool = False, over: BaseException | None = None
    ) -> None:
        """What has come is told, and a thread reads the `payload` that comes now."""
        self._tell()
        if not self._open:
            return
        self._watch(dry and over is None and not self._num_reading and not self._broken)
        if self._broken:
            return
        if over is not None:
            self._ended(str(over))
        elif payload is not None:
            self._read_by_thread(payload)
        elif self._num_reading:
            return
        elif self._inlet is not None:
            if self._inlet.come():
                self._read_by_thread(None)
        elif not dry and not self._paused:
            self._loop.call_soon(self._read_on)

    def _tell(self) -> None:
        """Say what is done, and hand on what has arrived."""
        self._settle()
        try:
            while self._arrived and not self._broken:
                self._take(*self._arrived.popleft())
        except LinkClosed as error:
            self._broken = True
            self._ended(str(error))

    def _settle(self) -> None:
        while self._done:
            self._done.popleft().settle()

    def _watch(self, on: bool) -> None:
        if on and not self._watched:
            self._loop.add_reader(self._sock, self._read_on)
        elif self._watched and not on:
            self._loop.remove_reader(self._sock)
        self._watched = on

    # on the loop or the thread

    def _advance(self) -> memoryview | None:
        """Take messages without an inline payload; room for the first that has one.

        None when it is enough for now. Raises BlockingIOError when there are no more, and
        LinkClosed.
        """
        while self._wanted():
            num_bytes = self._sock.recv_into(self._rest, 0, socket.MSG_DONTWAIT)
            if not num_bytes:
                raise LinkClosed("the other end closed the socket")
            self._rest = self._rest[num_bytes:]
            if self._rest:
                continue
            if self._frame is None:
                self._about = frame_bytes, payload_bytes, _ = HEADER.unpack(self._header)
                if frame_bytes > MAX_FRAME_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                    raise LinkClosed(
                        f"a message of {frame_bytes} + {payload_bytes} bytes was announced"
                    )
                self._frame = self._rest = memoryview(bytearray(frame_bytes))
                if frame_bytes:
                    continue
            _, payload_bytes, place = self._about
            if place == TOLD:
                self._come(payload_bytes)
            elif place == AHEAD:
                self._arrive(self._tell_ahead(payload_bytes))
            elif place != INLINE or not payload_bytes:
                self._arrive(None)
            elif self._unread:
                self._inlet = SocketInlet(self, payload_bytes)
                self._arrive(self._inlet)
            else:
                return self.staging.take(payload_bytes)
        return None

    def _wanted(self) -> bool:
        """Whether the next message may be read."""
        free = self._open and not self._paused and self._inlet is None
        return free and len(self._arrived) < MAX_ARRIVED

    def _arrive(self, payload: Payload) -> None:
        frame, (_, payload_bytes, place) = self._frame, self._about
        assert frame is not None, "a message without its frame"
        self._frame, self._rest = None, self._header
        self._arrived.append((bytes(frame), payload_bytes, place, payload))

    def _tell_ahead(self, num_bytes: int) -> SocketInlet:
        if not self._unread or not num_bytes or len(self._told) == MAX_TOLD:
            others = f"after {len(self._told)} others"
            raise LinkClosed(f"a payload of {num_bytes} bytes was told ahead, {others}")
        self._told.append(SocketInlet(self, num_bytes))
        return self._told[-1]

    def _come(self, num_bytes: int) -> None:
        """The first payload that was told ahead comes now, or never."""
        wanted = self._told[0].nbytes if self._told else 0
        if self._frame or not self._told or num_bytes not in (0, wanted):
            raise LinkClosed(f"{num_bytes} bytes came where {wanted} were told ahead")
        self._frame, self._rest = None, self._header
        self._inlet = self._told.popleft()
        self._inlet.left = num_bytes

    # on the thread

    def _read_payloads(self, payload: memoryview | None) -> None:
        """This payload, or what comes next, and all that is there behind it."""
        room = payload
        del payload
        while True:
            if room is not None:
                self._ring()
                self.read([room])
                self._arrive(room)
                room = None
            elif self._inlet is not None and not self._read_inlet(self._inlet):
                return  # nobody has said yet what it is good for
            try:
                room = self._advance()
            except BlockingIOError:
                if not self._told:
                    raise
                self._ring()
                _await_more(self._sock)
                continue
            if room is None and self._inlet is None:
                self._ring()
                return

    def _read_inlet(self, inlet: SocketInlet) -> bool:
        work = inlet.begin()
        if work is None:
            return False
        self._ring()
        if inlet.left:
            work.run()
        else:
            work.fail(NeverComes("a payload that was told ahead was given up"))
        self._done.append(work)
        if inlet.left:
            self._ring()
            self._skip(inlet)
        self._inlet = None
        return True

    def _skip(self, inlet: SocketInlet) -> None:
        waste = self.piece(WASTE_BYTES).data
        while inlet.left:
            self.read([waste[: inlet.left]])
            inlet.left -= min(inlet.left, waste.nbytes)

    def _ring(self) -> None:
        if self._arrived or self._done:
            self._bell.ring()


def _await_more(sock: socket.socket) -> None:
    readable = select.poll()
    readable.register(sock, select.POLLIN)
    readable.poll()
