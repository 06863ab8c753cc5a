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
import contextlib
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from protos.transfer_pb2 import Frame
from transport.link import LinkClosed

HEADER = struct.Struct("<IIi")
INLINE, RETURN = -1, -2

MAX_FRAME_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 64 << 20  # of one chunk: a frame that announces more is no chunk of ours

Message = tuple[bytes, int, int, memoryview | None]  # frame, payload_bytes, place, payload


class Staging:
    """Buffers for payloads, used again once nobody looks at them any more.

    Fresh memory costs a page fault for every 4 KiB, more than copying them does.
    """

    def __init__(self, max_kept: int = 8) -> None:
        self._kept: deque[NDArray[np.uint8]] = deque(maxlen=max_kept)

    def take(self, num_bytes: int) -> memoryview:
        buffer = self._fitting(num_bytes)
        view = buffer[:num_bytes]
        weakref.finalize(view, self._kept.append, buffer).atexit = False
        return view.data

    def _fitting(self, num_bytes: int) -> NDArray[np.uint8]:
        with contextlib.suppress(IndexError):
            buffer = self._kept.pop()
            if num_bytes <= buffer.nbytes:
                return buffer
        return np.empty(num_bytes, dtype=np.uint8)


class FrameSocket:
    """Owns a connected socket. Any number of tasks may `send`, one at a time may `receive`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # the threads block; the loop asks with MSG_DONTWAIT
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._writer = ThreadPoolExecutor(1, "kv-socket-write")
        self._reader = ThreadPoolExecutor(1, "kv-socket-read")
        self._staging = Staging()
        self._header = memoryview(bytearray(HEADER.size))
        self._readable: asyncio.Future[None] | None = None
        self._open = True

    async def send(
        self, frame: bytes, payload_bytes: int = 0, place: int = INLINE, payload: object = None
    ) -> None:
        """Returns when the system has taken it all. Must not be cancelled. Raises LinkClosed."""
        head = HEADER.pack(len(frame), payload_bytes, place) + frame
        async with self._sending:
            if not self._open:
                raise LinkClosed("the socket is closed")
            try:
                if payload is not None:
                    pieces = [memoryview(head), memoryview(payload)]  # type: ignore[arg-type]
                    await self._loop.run_in_executor(self._writer, self._write, pieces)
                    return
                sent = self._send_now(head)
                if sent < len(head):
                    pieces = [memoryview(head)[sent:]]
                    await self._loop.run_in_executor(self._writer, self._write, pieces)
            except (OSError, RuntimeError) as error:
                raise LinkClosed(f"the socket broke: {error}") from error

    async def receive(self) -> Message:
        """The next message. Raises LinkClosed. Whoever cancels it must close the socket."""
        try:
            await self._fill(self._header)
            frame_bytes, payload_bytes, place = HEADER.unpack(self._header)
            if frame_bytes > MAX_FRAME_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                raise LinkClosed(f"a message of {frame_bytes} + {payload_bytes} bytes came")
            frame = bytearray(frame_bytes)
            await self._fill(memoryview(frame))
            payload = None
            if place == INLINE and payload_bytes:
                payload = self._staging.take(payload_bytes)
                await self._loop.run_in_executor(self._reader, self._read, payload)
        except (OSError, RuntimeError) as error:
            raise LinkClosed(f"the socket broke: {error}") from error
        return bytes(frame), payload_bytes, place, payload

    def stage(self, num_bytes: int) -> memoryview:
        return self._staging.take(num_bytes)

    def finish_sending(self) -> None:
        """Nothing more comes from here; what was sent still arrives."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Wakes whatever waits for the socket; it is gone once they have let go."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._loop.remove_reader(self._sock)
        if self._readable is not None and not self._readable.done():
            self._readable.set_exception(LinkClosed("the socket is closed"))
        self._writer.shutdown(wait=True)  # both return at once from a socket that is shut down
        self._reader.shutdown(wait=True)
        self._sock.close()

    def _send_now(self, data: bytes) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    async def _fill(self, view: memoryview) -> None:
        while view:
            try:
                num_bytes = self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await self._wait_readable()
                continue
            if not num_bytes:
                raise LinkClosed("the other end closed the socket")
            view = view[num_bytes:]

    async def _wait_readable(self) -> None:
        readable = self._readable = self._loop.create_future()
        self._loop.add_reader(self._sock, _settle, readable)
        try:
            await readable
        finally:
            if self._open:
                self._loop.remove_reader(self._sock)

    def _write(self, pieces: list[memoryview]) -> None:
        while pieces:
            sent = self._sock.sendmsg(pieces)
            while pieces and sent >= pieces[0].nbytes:
                sent -= pieces.pop(0).nbytes
            if sent:
                pieces[0] = pieces[0].cast("B")[sent:]

    def _read(self, view: memoryview) -> None:
        while view:
            num_bytes = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            if not num_bytes:
                raise ConnectionError("the other end closed the socket within a payload")
            view = view[num_bytes:]


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


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def peer_uid(sock: socket.socket) -> int:
    """Who runs the other end of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return int(uid)


def own_uid() -> int:
    return os.getuid()
