"""Frames and payloads over one connected stream socket, without needless copies or wake-ups.

Every message is a header, a frame, and perhaps a payload:

    frame_bytes     u32
    payload_bytes   u32
    place           i32: INLINE, the payload follows; RETURN, the frame is a list of slots, u16
                    each; otherwise the slot of a shared ring in which it lies

Small messages leave and arrive on the event loop. Payloads are written and read whole, each by one
blocking call on a thread: the loop would be woken for every few kilobytes, and each time would have
to take the interpreter's lock from whoever computes. The thread that writes a payload may build it,
too, in memory that it alone uses again and again, or pour it out piece by piece. Who is told of a
payload before it is read may have the reading thread put it where it belongs.
"""

import asyncio
import contextlib
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcache import host_memory
from protos.transfer_pb2 import Frame
from transport.link import Fill, LinkClosed, Payload, Pour, heed
from transport.pieces import GIVEN_UP, without
from transport.socket_payloads import SocketInlet, SocketOutlet
from transport.staging import Staging
from transport.threads import Threads

HEADER = struct.Struct("<IIi")
INLINE, RETURN = -1, -2  # -3 is a wire's own

MAX_FRAME_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 64 << 20  # of one chunk: a frame that announces more is no chunk of ours
MAX_VIEWS = 512  # for one system call
WASTE_BYTES = 256 << 10  # read at once of what nobody wants
MAX_ARRIVED = 2  # messages read before the loop looks at them: what lies longer leaves the caches

Take = Callable[[bytes, int, int, Payload], None]  # frame, payload_bytes, place, payload
T = TypeVar("T")


class FrameSocket:
    """Owns a connected socket. `take` gets what comes, `ended` why no more will; on the loop."""

    def __init__(self, sock: socket.socket, unread: bool = False) -> None:
        """With `unread`, payloads are told before they are read."""
        sock.setblocking(True)  # the threads block; the loop asks with MSG_DONTWAIT
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._writer = Threads(1, "kv-socket-write")
        self._reader = Threads(1, "kv-socket-read")
        self._room = memoryview(b"")  # in which payloads are built
        self._piece = np.empty(0, dtype=np.uint8)
        self.staging = Staging()
        self._unread = unread
        self._inlet: SocketInlet | None = None  # what comes next, until it is read
        self._header = memoryview(bytearray(HEADER.size))
        self._frame: memoryview | None = None  # the one being read, once its header is
        self._rest = self._header  # what is still to be read of it
        self._about = (0, 0, INLINE)
        self._arrived: deque[tuple[bytes, int, int, Payload]] = deque()
        self._told = False  # that the loop is to hand on what has arrived
        self._reading = False  # a thread does
        self._watched = False
        self._paused = False
        self._open = True

    def start(self, take: Take, ended: Callable[[str], None]) -> None:
        self._take, self._ended = take, ended
        self._loop.call_soon(self._read_on)

    def send(self, frame: bytes, place: int = INLINE) -> Awaitable[None] | None:
        """Send after all that was sent before; what is awaitable is done when the system has it.

        None when it has it already. Raises LinkClosed.
        """
        if not self._open:
            raise LinkClosed("the socket is closed")
        head = HEADER.pack(len(frame), 0, place) + frame
        sent = 0 if self._writer.num_waiting else self._send_now(head)
        if sent == len(head):
            return None
        return self.write(partial(self._write, [memoryview(head)[sent:]]))

    def load(self, num_bytes: int, fill: Fill) -> "asyncio.Future[None]":
        """Send what `fill` builds, after all that was sent before. Raises LinkClosed."""
        return self.write(partial(self._load, num_bytes, fill))

    def pour(self, num_bytes: int, pour: Pour) -> "asyncio.Future[None]":
        """As `load`, with what leaves while it is built. Raises LinkClosed."""
        return self.write(partial(self._pour, num_bytes, pour))

    def write(self, work: Callable[[], None]) -> "asyncio.Future[None]":
        """Have `work` call `write_now` on the writer's thread, after all that was sent before.

        What comes next waits until it has returned, even if the caller does not: nothing must slip
        into the middle of it. Raises LinkClosed.
        """
        if not self._open:
            raise LinkClosed("the socket is closed")
        written = self._writer.do(work)
        written.add_done_callback(heed)
        return written

    def write_now(
        self, frame: Frame, payload: memoryview | None, payload_bytes: int, place: int = INLINE
    ) -> None:
        """Only within `write`."""
        raw = frame.SerializeToString()
        head = memoryview(HEADER.pack(len(raw), payload_bytes, place) + raw)
        self._write([head] if payload is None else [head, payload])

    def pause(self) -> None:
        """Take no more until `resume`; the other end feels it once the buffers are full."""
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._read_on)

    def finish_sending(self) -> None:
        """Nothing more comes from here; what was sent still arrives."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._watch(False)
        self._writer.stop()  # both return at once from a socket that is shut down
        self._reader.stop()
        self._sock.close()

    # writing

    def _send_now(self, data: bytes) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkClosed(f"the socket broke: {error}") from error

    def _load(self, num_bytes: int, fill: Fill) -> None:
        """On the writer's thread."""
        room = self.room(num_bytes)
        frame = fill(room)
        if frame is not None:
            self.write_now(frame, room, num_bytes)

    def room(self, num_bytes: int) -> memoryview:
        """To build a payload in. Only within `write`."""
        if self._room.nbytes < num_bytes:
            self._room = host_memory.buffer(num_bytes).data
        return self._room[:num_bytes]

    def _pour(self, num_bytes: int, pour: Pour) -> None:
        """On the writer's thread."""
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        writable.poll()  # here, where no block is held, and not in `begin`
        outlet, seal = SocketOutlet(self, num_bytes), None
        try:
            seal = pour(outlet)
        finally:
            outlet.end(GIVEN_UP if seal is None else seal)

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def piece(self, num_bytes: int) -> NDArray[np.uint8]:
        """Room for what passes, of the one thread that reads or writes payloads here."""
        if self._piece.nbytes < num_bytes:
            self._piece = np.empty(num_bytes, dtype=np.uint8)
        return self._piece

    def write_views(self, views: Sequence[memoryview]) -> None:
        """Only within `write`."""
        for first in range(0, len(views), MAX_VIEWS):
            self._write(list(views[first : first + MAX_VIEWS]))

    def _write(self, pieces: list[memoryview]) -> None:
        """On the writer's thread."""
        try:
            while pieces:
                sent = self._sock.sendmsg(pieces)
                while pieces and sent >= pieces[0].nbytes:
                    sent -= pieces.pop(0).nbytes
                if sent:
                    pieces[0] = pieces[0][sent:]
        except OSError as error:
            raise LinkClosed(f"the socket broke: {error}") from error

    # reading

    def take_in(self, inlet: "SocketInlet", work: Callable[[], T]) -> "asyncio.Future[T]":
        """On the loop: `work` reads of the payload what it wants, on the reader's thread."""
        if not self._open:
            closed = self._loop.create_future()
            closed.set_exception(LinkClosed("the socket is closed"))
            return closed
        self._reading = True
        taking = self._reader.do(work)
        taking.add_done_callback(heed)
        self._reader.do(partial(self._read_behind, inlet)).add_done_callback(self._payloads_read)
        return taking

    def _read_behind(self, inlet: "SocketInlet") -> None:
        """On the reader's thread: what nobody wanted, and all that is there behind it."""
        waste = self.piece(WASTE_BYTES).data
        while inlet.left:
            self.read([waste[: inlet.left]])
            inlet.left -= min(inlet.left, waste.nbytes)
        self._inlet = None
        self._read_payloads(self._advance())

    def _read_on(self) -> None:
        """On the loop, unless a thread reads: take all that is there."""
        if self._reading or self._inlet is not None or not self._open:
            return
        try:
            self._go_on(self._advance())
        except BlockingIOError:
            self._go_on(None, dry=True)
        except (OSError, LinkClosed) as error:
            self._go_on(None, over=error)

    def _read_payloads(self, payload: memoryview | None) -> None:
        """On the reader's thread: this payload, and all that is there behind it."""
        room = payload
        del payload
        while room is not None:
            self.read([room])
            self._arrive(room)
            del room
            if not self._told:
                self._told = True
                with contextlib.suppress(RuntimeError):  # the loop has closed
                    self._loop.call_soon_threadsafe(self._tell)
            room = self._advance()

    def _payloads_read(self, reading: "asyncio.Future[None]") -> None:
        self._reading = False
        error = reading.exception()
        if isinstance(error, BlockingIOError):
            self._go_on(None, dry=True)
        else:
            self._go_on(None, over=error)

    def _go_on(
        self, payload: memoryview | None, *, dry: bool = False, over: BaseException | None = None
    ) -> None:
        """On the loop: what has come is told, and a thread reads the `payload` that comes now."""
        over = self._tell() or over
        if not self._open:
            return
        self._watch(dry and over is None)
        if over is not None:
            self._ended(str(over))
        elif payload is not None:
            self._reading = True
            reading = self._reader.do(partial(self._read_payloads, payload))
            reading.add_done_callback(self._payloads_read)
        elif not dry and not self._paused:
            self._loop.call_soon(self._read_on)

    def _advance(self) -> memoryview | None:
        """Take messages without an inline payload; room for the first that has one.

        None when it is enough for now. Raises BlockingIOError when there are no more.
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
            if place != INLINE or not payload_bytes:
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

    def _tell(self) -> LinkClosed | None:
        """On the loop: hand on what has arrived; why it cannot be, if so."""
        self._told = False  # first: what arrives from here on may be missed below
        try:
            while self._arrived:
                self._take(*self._arrived.popleft())
        except LinkClosed as error:
            return error
        return None

    def read(self, views: Sequence[memoryview]) -> None:
        """Fill them all. On the reader's thread."""
        left = list(views)
        while left:
            num_bytes, *_ = self._sock.recvmsg_into(left[:MAX_VIEWS], 0, socket.MSG_WAITALL)
            if not num_bytes:
                raise ConnectionError("the other end closed the socket within a payload")
            left = without(left, num_bytes)

    def _watch(self, on: bool) -> None:
        if on and not self._watched:
            self._loop.add_reader(self._sock, self._read_on)
        elif self._watched and not on:
            self._loop.remove_reader(self._sock)
        self._watched = on


def pack_slots(slots: Sequence[int]) -> bytes:
    return np.array(slots, dtype="<u2").tobytes()


def unpack_slots(frame: bytes) -> list[int]:
    return np.frombuffer(frame, dtype="<u2").tolist() if len(frame) % 2 == 0 else []


def parse_frame(raw: bytes) -> Frame:
    """Raises LinkClosed: after something that is no frame, nothing can be trusted."""
    try:
        return Frame.FromString(raw)
    except Exception as error:
        raise LinkClosed(f"what came is no frame: {error}") from error


def peer_uid(sock: socket.socket) -> int:
    """Who runs the other end of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return int(uid)


def own_uid() -> int:
    return os.getuid()
