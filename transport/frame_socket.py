"""Frames and payloads over one connected stream socket, without needless copies or wake-ups.

Every message is a header, a frame, and perhaps a payload:

    frame_bytes     u32
    payload_bytes   u32
    place           i32: INLINE, the payload follows; RETURN, the frame is a list of slots, u16
                    each; otherwise the slot of a shared ring in which the payload lies

Small messages leave and arrive on the event loop. Payloads are written and read whole, each by one
blocking call on a thread: the loop would be woken for every few kilobytes, and each time would have
to take the interpreter's lock from whoever computes.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from protos.transfer_pb2 import Frame
from transport.link import LinkClosed, heed
from transport.staging import Staging

HEADER = struct.Struct("<IIi")
INLINE, RETURN = -1, -2

MAX_FRAME_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 64 << 20  # of one chunk: a frame that announces more is no chunk of ours

Take = Callable[[bytes, int, int, memoryview | None], None]  # frame, payload_bytes, place, payload


class FrameSocket:
    """Owns a connected socket. `take` gets what comes, `ended` why no more will; on the loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # the threads block; the loop asks with MSG_DONTWAIT
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._writer = ThreadPoolExecutor(1, "kv-socket-write")
        self._reader = ThreadPoolExecutor(1, "kv-socket-read")
        self._num_writing = 0  # messages that the writer has yet to write
        self._staging = Staging()
        self._header = memoryview(bytearray(HEADER.size))
        self._frame: memoryview | None = None  # the one being read, once its header is
        self._rest = self._header  # what is still to be read of it
        self._about = (0, 0, INLINE)
        self._watched = False
        self._paused = False
        self._open = True

    def start(self, take: Take, ended: Callable[[str], None]) -> None:
        self._take, self._ended = take, ended
        self._loop.call_soon(self._read_on)

    def send(
        self,
        frame: bytes,
        payload: memoryview | None = None,
        payload_bytes: int = 0,
        place: int = INLINE,
    ) -> Awaitable[None] | None:
        """Send after all that was sent before; what is awaitable is done when the system has it.

        None when it has it already. One that is cancelled is sent whole or not at all. Raises
        LinkClosed.
        """
        if not self._open:
            raise LinkClosed("the socket is closed")
        head = HEADER.pack(len(frame), payload_bytes, place) + frame
        if payload is None and not self._num_writing:
            sent = self._send_now(head)
            if sent == len(head):
                return None
            return self._write_soon([memoryview(head)[sent:]])
        return self._write_soon(
            [memoryview(head), payload] if payload is not None else [memoryview(head)]
        )

    def stage(self, num_bytes: int) -> memoryview:
        return self._staging.take(num_bytes)

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
        self._writer.shutdown(wait=True)  # both return at once from a socket that is shut down
        self._reader.shutdown(wait=True)
        self._sock.close()

    # writing

    def _send_now(self, data: bytes) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkClosed(f"the socket broke: {error}") from error

    def _write_soon(self, pieces: list[memoryview]) -> Awaitable[None]:
        """Write after what is being written. Counted until the thread has ended, not until its
        caller has stopped waiting: what comes next must not slip into the middle of it.
        """
        self._num_writing += 1
        writing = self._writer.submit(self._write, pieces)
        writing.add_done_callback(self._tell_written)
        written = asyncio.wrap_future(writing)
        written.add_done_callback(heed)
        return written

    def _tell_written(self, writing: "concurrent.futures.Future[None]") -> None:
        """On the writer's thread, or the loop's when it was cancelled before it began."""
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(self._written)

    def _written(self) -> None:
        self._num_writing -= 1

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
        """Take all that is there; then watch for more, unless a thread reads or we are paused."""
        try:
            while self._open and not self._paused:
                num_bytes = self._sock.recv_into(self._rest, 0, socket.MSG_DONTWAIT)
                if not num_bytes:
                    raise LinkClosed("the other end closed the socket")
                self._rest = self._rest[num_bytes:]
                if not self._rest and not self._go_on():
                    break
            self._watch(False)
        except BlockingIOError:
            self._watch(True)
        except (OSError, LinkClosed) as error:
            self._watch(False)
            self._ended(str(error))

    def _go_on(self) -> bool:
        """After a whole header or frame. Returns whether the loop reads what comes next."""
        if self._frame is None:
            self._about = frame_bytes, payload_bytes, _ = HEADER.unpack(self._header)
            if frame_bytes > MAX_FRAME_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                raise LinkClosed(
                    f"a message of {frame_bytes} + {payload_bytes} bytes was announced"
                )
            self._frame = self._rest = memoryview(bytearray(frame_bytes))
            if frame_bytes:
                return True
        _, payload_bytes, place = self._about
        if place == INLINE and payload_bytes:
            self._watch(False)
            payload = self._staging.take(payload_bytes)
            reading = self._loop.run_in_executor(self._reader, self._read, payload)
            reading.add_done_callback(partial(self._payload_read, payload))
            return False
        self._deliver(None)
        return True

    def _payload_read(self, payload: memoryview, reading: "asyncio.Future[None]") -> None:
        if reading.cancelled() or not self._open:
            return
        try:
            reading.result()
            self._deliver(payload)
        except (OSError, LinkClosed) as error:
            self._ended(str(error))
            return
        del payload, reading
        self._read_on()

    def _deliver(self, payload: memoryview | None) -> None:
        frame, (_, payload_bytes, place) = self._frame, self._about
        assert frame is not None, "a message without its frame"
        self._frame, self._rest = None, self._header
        self._take(bytes(frame), payload_bytes, place, payload)

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
