"""Frames and payloads over one connected stream socket, without needless copies or wake-ups.

Every message is a header, a frame, and perhaps a payload:

    frame_bytes     u32
    payload_bytes   u32
    place           i32: INLINE, the payload follows; AHEAD, it does, and has no frame yet; OF_LAST,
                    it came ahead of this frame, right before; RETURN, the frame is a list of
                    slots, u16 each; otherwise the slot of a shared ring in which it lies

A payload that came ahead and is followed by anything else comes to nothing.

Small messages leave and arrive on the event loop. Payloads are written and read whole, each by one
blocking call on a thread: the loop would be woken for every few kilobytes, and each time would have
to take the interpreter's lock from whoever computes. The thread that writes a payload may build it,
too, in memory that it alone uses again and again, or pour it out piece by piece.
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

import numpy as np
from numpy.typing import NDArray

from kvcache import host_memory
from protos.transfer_pb2 import Frame
from transport.link import Fill, LinkClosed, Pour, heed
from transport.staging import Staging
from transport.threads import Threads

HEADER = struct.Struct("<IIi")
INLINE, RETURN, AHEAD, OF_LAST = -1, -2, -4, -5  # -3 is a wire's own
PIECE_BYTES = 512 << 10  # that are built and sent before the next: in a cache for both

MAX_FRAME_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 64 << 20  # of one chunk: a frame that announces more is no chunk of ours
MAX_ARRIVED = 2  # messages read before the loop looks at them: what lies longer leaves the caches

Take = Callable[[bytes, int, int, memoryview | None], None]  # frame, payload_bytes, place, payload


class FrameSocket:
    """Owns a connected socket. `take` gets what comes, `ended` why no more will; on the loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # the threads block; the loop asks with MSG_DONTWAIT
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._writer = Threads(1, "kv-socket-write")
        self._reader = Threads(1, "kv-socket-read")
        self._room = memoryview(b"")  # in which payloads are built
        self._piece = np.empty(0, dtype=np.uint8)
        self._lone: memoryview | None = None  # a payload that came ahead of its frame
        self._staging = Staging()
        self._header = memoryview(bytearray(HEADER.size))
        self._frame: memoryview | None = None  # the one being read, once its header is
        self._rest = self._header  # what is still to be read of it
        self._about = (0, 0, INLINE)
        self._arrived: deque[tuple[bytes, int, int, memoryview | None]] = deque()
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
        writable.poll()  # here, where no block is held, and not in `begin_payload`
        outlet, frame = SocketOutlet(self, num_bytes), None
        try:
            frame = pour(outlet)
        finally:
            outlet.end()
        if frame is not None:
            self.write_now(frame, None, num_bytes, OF_LAST)

    def begin_payload(self, num_bytes: int) -> tuple[int, NDArray[np.uint8]]:
        """One comes ahead of its frame. Only within `write`; returns the socket and a piece."""
        if not self._piece.nbytes:
            self._piece = np.empty(PIECE_BYTES, dtype=np.uint8)
        self.write_bytes(memoryview(HEADER.pack(0, num_bytes, AHEAD)))
        return self._sock.fileno(), self._piece

    def write_bytes(self, data: memoryview) -> None:
        """Only within `write`."""
        self._write([data])

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

    def _read_on(self) -> None:
        """On the loop, unless a thread reads: take all that is there."""
        if self._reading or not self._open:
            return
        try:
            self._go_on(self._advance())
        except BlockingIOError:
            self._go_on(None, dry=True)
        except (OSError, LinkClosed) as error:
            self._go_on(None, over=error)

    def _read_payloads(self, payload: memoryview) -> None:
        """On the reader's thread: this payload, and all that is there behind it."""
        room: memoryview | None = payload
        del payload
        while room is not None:
            self._read(room)
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
        while self._open and not self._paused and len(self._arrived) < MAX_ARRIVED:
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
            if place in (INLINE, AHEAD) and payload_bytes:
                return self._staging.take(payload_bytes)
            self._arrive(None)
        return None

    def _arrive(self, payload: memoryview | None) -> None:
        frame, (_, payload_bytes, place) = self._frame, self._about
        assert frame is not None, "a message without its frame"
        self._frame, self._rest = None, self._header
        lone, self._lone = self._lone, payload if place == AHEAD else None
        if place == AHEAD:
            return
        if place == OF_LAST:
            if lone is None or lone.nbytes != payload_bytes:
                raise LinkClosed(f"{payload_bytes} bytes were to come ahead of their frame")
            place, payload = INLINE, lone
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

    def _read(self, view: memoryview) -> None:
        """On the reader's thread."""
        while view:
            num_bytes = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            if not num_bytes:
                raise ConnectionError("the other end closed the socket within a payload")
            view = view[num_bytes:]

    def _watch(self, on: bool) -> None:
        if on and not self._watched:
            self._loop.add_reader(self._sock, self._read_on)
        elif self._watched and not on:
            self._loop.remove_reader(self._sock)
        self._watched = on


class SocketOutlet:
    """One payload on its way out of a socket; see `transport.link.Outlet`."""

    def __init__(self, stream: FrameSocket, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._stream = stream
        self._left = 0
        self._room: memoryview | None = None

    def begin(self) -> tuple[int, NDArray[np.uint8]]:
        self._left = self.num_bytes
        return self._stream.begin_payload(self.num_bytes)

    def gone(self, num_bytes: int) -> None:
        self._left -= num_bytes

    def rest(self) -> NDArray[np.uint8] | None:
        if not self._left:
            return None
        self._room = self._stream.room(self.num_bytes)
        return np.frombuffer(self._room, dtype=np.uint8)

    def end(self) -> None:
        """As many bytes leave as were announced, whatever became of the payload."""
        if self._left:
            room = self._room if self._room is not None else memoryview(bytes(self.num_bytes))
            self._stream.write_bytes(room[self.num_bytes - self._left :])


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
