"""The shared-memory wire: payloads are built in a slot and read in place, never copied between.

Both ends must be on one host (`host_id`), as one user. Frames ride a Unix socket of the pair; a
Chunk's names the slot in which its payload lies. The decode end gives the slot back when nobody
looks at the payload any more, that is, once it is scattered. A payload larger than a slot goes
over the socket.
"""

import asyncio
import contextlib
import os
import socket
import weakref
from collections import deque
from functools import partial
from pathlib import Path

import structlog

from kvcache.mapped_pool import MappedPool, ShownPool
from kvcache.shared_memory import SharedMemory
from kvcache.spec import CacheSpec
from protos.transfer_pb2 import Hello
from transport.frame_socket import (
    FrameSocket,
    own_uid,
    pack_slots,
    parse_frame,
    peer_uid,
    unpack_slots,
)
from transport.link import Connector, Fill, Link, LinkClosed, Payload
from transport.meeting import await_caller, call, listen_unix
from transport.messages import INLINE, RETURN
from transport.shm_ring import NUM_SLOTS, SLOT_BYTES, ShmRing, Slots
from transport.shown_pool import map_from_proto, map_to_proto
from transport.socket_link import SocketLink

RING, RING_AND_POOL, YES, NO = b"r", b"p", b"y", b"n"  # said with a descriptor, or to one

log = structlog.get_logger()


def host_id() -> str:
    """Equal for two processes exactly when they can meet on an abstract Unix socket.

    Empty on a system that has none.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{own_uid()}"
    except OSError:
        return ""


class PrefillShmLink(SocketLink):
    def __init__(
        self, control: Link, stream: FrameSocket, ring: ShmRing, *, shows_pool: bool
    ) -> None:
        self.shows_pool = shows_pool
        self._ring = ring
        self._slots = Slots()
        super().__init__(control, stream)

    def load(self, num_bytes: int, fill: Fill) -> "asyncio.Future[None]":
        if not 0 < num_bytes <= SLOT_BYTES:
            return super().load(num_bytes, fill)
        self._end.check()
        return self._stream.write(partial(self._load, num_bytes, fill))

    def _load(self, num_bytes: int, fill: Fill) -> None:
        """On the writer's thread."""
        slot = self._slots.take()
        if slot is None:
            raise LinkClosed(self._end.reason or "the link is closed")
        frame = None
        try:
            frame = fill(self._ring.view(slot, num_bytes).data)
        finally:
            if frame is None:
                self._slots.drop(slot)
        if frame is not None:
            self._slots.post(slot)
            self._stream.write_now(frame, None, num_bytes, slot)

    def _take(self, frame: bytes, num_bytes: int, place: int, payload: Payload) -> None:
        if place != RETURN:
            super()._take(frame, num_bytes, place, payload)
            return
        for slot in unpack_slots(frame):
            if not self._slots.give_back(slot):
                raise LinkClosed(f"slot {slot} was given back, which the other end does not have")

    def _over(self, reason: str) -> None:
        self._slots.close()
        super()._over(reason)


class DecodeShmLink(SocketLink):
    def __init__(
        self, control: Link, stream: FrameSocket, ring: ShmRing, pool: MappedPool | None
    ) -> None:
        self.pool = pool
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._done: deque[int] = deque()
        self._told = False  # that the loop is to give them back
        super().__init__(control, stream)

    def _take(self, frame: bytes, num_bytes: int, slot: int, payload: Payload) -> None:
        if slot == INLINE:
            super()._take(frame, num_bytes, slot, payload)
            return
        if not (0 <= slot < NUM_SLOTS and 0 < num_bytes <= SLOT_BYTES):
            raise LinkClosed(f"{num_bytes} bytes in slot {slot} were announced")
        view = self._ring.view(slot, num_bytes)
        weakref.finalize(view, self._let_go, slot).atexit = False
        self._put_ahead(parse_frame(frame), view.data)

    def _let_go(self, slot: int) -> None:
        """Any thread: nobody looks at this payload any more."""
        self._done.append(slot)
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._give_back)

    def _give_back(self) -> None:
        """All that were let go since, at once."""
        self._told = False  # first: what is let go from here on may be missed below
        slots = [self._done.popleft() for _ in range(len(self._done))]
        if slots:
            with contextlib.suppress(LinkClosed):
                self._stream.send(pack_slots(slots), RETURN)


class ShmConnector:
    """Dials like `control` does, and then meets the other end on this host."""

    def __init__(
        self, control: Connector, timeout_s: float = 10.0, shown: ShownPool | None = None
    ) -> None:
        """`shown` is the pool that decode ends may read, if they can."""
        self._control = control
        self._timeout_s = timeout_s
        self._shown = shown

    async def connect(self, address: str, hello: Hello) -> Link:
        greeting = Hello()
        greeting.CopyFrom(hello)
        greeting.wire = "shm"
        greeting.rendezvous = host_id()
        if self._shown is not None:
            greeting.pool.CopyFrom(map_to_proto(self._shown.map))
        control = await self._control.connect(address, greeting)
        sock = await call(control, self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                said, fd = await _receive(sock)
                ring = ShmRing.open(fd)
                shows = said == RING_AND_POOL and await self._show(sock)
        except BaseException as error:
            sock.close()
            reason = f"no memory to share came: {error}"
            await control.close(reason)
            if isinstance(error, TimeoutError | OSError | ValueError):
                raise LinkClosed(reason) from error
            raise
        return PrefillShmLink(control, FrameSocket(sock), ring, shows_pool=shows)

    async def _show(self, sock: socket.socket) -> bool:
        """Whether the other end reads the pool from now on."""
        assert self._shown is not None, "nobody asks for a pool that was not named"
        socket.send_fds(sock, [RING_AND_POOL], [self._shown.memory.fd])
        return await asyncio.get_running_loop().sock_recv(sock, 1) == YES


class ShmAcceptor:
    """The decode end, whose memory it is."""

    def __init__(self, timeout_s: float = 10.0, spec: CacheSpec | None = None) -> None:
        """With its own `spec`, it can read cells where prefill ends have them."""
        self._timeout_s = timeout_s
        self._spec = spec

    async def accept(self, control: Link) -> Link:
        if not host_id() or control.hello.rendezvous != host_id():
            reason = f"no memory to share: this is host {host_id()}, not {control.hello.rendezvous}"
            await control.close(reason)
            raise LinkClosed(reason)
        sock = await await_caller(control, listen_unix(), self._timeout_s)
        try:
            if peer_uid(sock) != own_uid():
                raise PermissionError(f"user {peer_uid(sock)} called, not {own_uid()}")
            ring, fd = ShmRing.create()
            asks = self._spec is not None and control.hello.HasField("pool")
            try:
                socket.send_fds(sock, [RING_AND_POOL if asks else RING], [fd])
            finally:
                os.close(fd)
            async with asyncio.timeout(self._timeout_s):
                pool = await self._map(sock, control.hello) if asks else None
        except BaseException as error:
            sock.close()
            reason = f"no memory to share: {error}"
            await control.close(reason)
            if isinstance(error, TimeoutError | OSError | ValueError):
                raise LinkClosed(reason) from error
            raise
        return DecodeShmLink(control, FrameSocket(sock), ring, pool)

    async def _map(self, sock: socket.socket, hello: Hello) -> MappedPool | None:
        """The pool that the other end shows; None when it is not to be read."""
        assert self._spec is not None
        pool = None
        _, fd = await _receive(sock)
        try:
            told = map_from_proto(hello.pool)
            pool = MappedPool(SharedMemory.open(fd, told.num_bytes), told, self._spec)
        except (OSError, ValueError) as error:
            log.warning("pool_not_read", prefill=hello.prefill_worker, reason=str(error))
        await asyncio.get_running_loop().sock_sendall(sock, NO if pool is None else YES)
        return pool


async def _receive(sock: socket.socket) -> tuple[bytes, int]:
    """A word, and the descriptor that comes with it. Raises ValueError when none does."""
    sock.setblocking(False)
    while True:
        try:
            said, fds, _, _ = socket.recv_fds(sock, 1, 1)
            break
        except BlockingIOError:
            readable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().add_reader(sock, _settle, readable)
            try:
                await readable
            finally:
                asyncio.get_running_loop().remove_reader(sock)
    if len(fds) != 1:
        raise ValueError(f"{len(fds)} descriptors")
    return said, fds[0]


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
