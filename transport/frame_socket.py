"""Frames and payloads over one connected stream socket, without needless copies or wake-ups.

`transport.messages` has their form. Small messages leave and arrive on the event loop. Payloads are
written and read whole, each by blocking calls on a thread: the loop would be woken for every few
kilobytes, and each time would have to take the interpreter's lock from whoever computes. The
thread that writes a payload may build it, too, in memory that it alone uses again and again, or
pour it out piece by piece. Who is told of a payload before it is read may have the reading thread
put it where it belongs.
"""

import asyncio
import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvcache import host_memory
from protos.transfer_pb2 import Frame
from transport.frame_reader import MAX_VIEWS, FrameReader, Take
from transport.link import Fill, LinkClosed, Pouring, heed
from transport.messages import HEADER, INLINE
from transport.pieces import GIVEN_UP, within
from transport.socket_outlet import SocketOutlet
from transport.threads import Threads

TELLING_BYTES = 64 << 10  # at least, of a payload that tells how fast the wire is
HOLD_S = 0.02  # for which one payload may hold the wire: other prompts wait behind it
WRITE_BYTES = 1 << 20  # waited for at once: of a slow link it is to be seen that something leaves


class FrameSocket:
    """Owns a connected socket. `take` gets what comes, `ended` why no more will; on the loop."""

    def __init__(self, sock: socket.socket, unread: bool = False) -> None:
        """With `unread`, payloads are told before they are read."""
        self.unread = unread
        sock.setblocking(True)  # the threads block; the loop asks with MSG_DONTWAIT
        self._sock = sock
        self._writer = Threads(1, "kv-socket-write", patient=True)
        self._reader = FrameReader(sock, unread)
        # Of each call for the writer, in order, what it pours; None of the others.
        self._queue: deque[SocketOutlet | None] = deque()
        self._room = memoryview(bytearray())  # in which payloads are built
        self._piece = np.empty(0, dtype=np.uint8)
        self._open = True
        self.num_bytes_written = 0  # by the thread
        self.reach = 0  # bytes of a payload that leaves within HOLD_S, as far as is known

    @property
    def num_bytes_read(self) -> int:
        return self._reader.num_bytes

    def start(self, take: Take, ended: Callable[[str], None]) -> None:
        self._reader.start(take, ended)

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

    def send_at_once(self, frame: bytes) -> bool:
        """Send if nothing waits, and the socket takes any. Whether it did. Raises LinkClosed."""
        if not self._open:
            raise LinkClosed("the socket is closed")
        if self._writer.num_waiting:
            return False
        head = HEADER.pack(len(frame), 0, INLINE) + frame
        sent = self._send_now(head)
        if 0 < sent < len(head):
            self.write(partial(self._write, [memoryview(head)[sent:]]))
        return sent > 0

    def load(self, num_bytes: int, fill: Fill) -> "asyncio.Future[None]":
        """Send what `fill` builds, after all that was sent before. Raises LinkClosed."""
        return self.write(partial(self._load, num_bytes, fill))

    def pour(self, pouring: Pouring) -> "asyncio.Future[None]":
        """As `load`, with what leaves while it is built, and is told ahead. Raises LinkClosed."""
        outlet = SocketOutlet(self, pouring)
        return self.write(partial(self._pour, outlet, pouring.pour), outlet)

    def write(
        self, work: Callable[[], None], outlet: SocketOutlet | None = None
    ) -> "asyncio.Future[None]":
        """Have `work` call `write_now` on the writer's thread, after all that was sent before.

        What comes next waits until it has returned, even if the caller does not: nothing must slip
        into the middle of it. Raises LinkClosed.
        """
        if not self._open:
            raise LinkClosed("the socket is closed")
        self._queue.append(outlet)
        written = self._writer.do(partial(self._next, work))
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
        self._reader.pause()

    def resume(self) -> None:
        self._reader.resume()

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
        self._reader.close()  # both return at once from a socket that is shut down
        self._writer.stop()
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

    def _next(self, work: Callable[[], None]) -> None:
        """On the writer's thread."""
        if self._queue.popleft() is None:
            self._writer.tell()
        work()

    def _pour(self, outlet: SocketOutlet, pour: Callable[[SocketOutlet], int | None]) -> None:
        """On the writer's thread."""
        writable, seal = select.poll(), None
        writable.register(self._sock, select.POLLOUT)
        if not writable.poll(0):
            self._writer.tell()
            writable.poll()  # here, where no block is held, and not in `begin`
        began = time.monotonic()
        try:
            seal = pour(outlet)
        except OSError as error:  # nobody knows how much has left: nothing may follow it
            self.finish_sending()
            raise LinkClosed(f"the socket broke: {error}") from error
        except BaseException:
            outlet.end(GIVEN_UP)
            raise
        outlet.end(GIVEN_UP if seal is None else seal)
        if seal is not None:  # else nothing has left, or not what was to
            self._learn(outlet.num_bytes, time.monotonic() - began)

    def _learn(self, num_bytes: int, took_s: float) -> None:
        """A payload has left. What the system took into its buffers tells little of what is behind
        them, so twice as much, and not more, is tried next.
        """
        if num_bytes >= TELLING_BYTES:
            within = int(num_bytes * HOLD_S / max(1e-6, took_s))
            self.reach = min(within, max(self.reach, 2 * num_bytes))

    def tell(self) -> None:
        """Only within `pour`, when it is about to begin: the loop hears what has left before."""
        self._writer.tell()

    def following(self) -> SocketOutlet | None:
        """Only within `write`: what will be poured next, if that is known."""
        return self._queue[0] if self._queue else None

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
                sent = self._sock.sendmsg(within(pieces, WRITE_BYTES))
                self.num_bytes_written += sent
                while pieces and sent >= pieces[0].nbytes:
                    sent -= pieces.pop(0).nbytes
                if sent:
                    pieces[0] = pieces[0][sent:]
        except OSError as error:
            raise LinkClosed(f"the socket broke: {error}") from error


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
