"""The torch.distributed wires, gloo and NCCL: frames on a socket, payloads between the pair.

A Chunk frame announces how many bytes come next on the pair's group, so both ends post in the same
order, whatever else the socket carries. Either of the two failing ends the link.
"""

import asyncio
import contextlib
import threading
from functools import partial

import numpy as np

from kvcache import host_memory
from protos.transfer_pb2 import Hello
from transport.frame_socket import FrameSocket, parse_frame
from transport.link import Connector, Fill, Link, LinkClosed, Payload
from transport.meeting import await_caller, call, listen_tcp
from transport.messages import GROUP, MAX_PAYLOAD_BYTES
from transport.pair_group import DECODE, PREFILL, PairGroup, PairStore, Rendezvous
from transport.socket_link import SocketLink
from transport.staging import Staging
from transport.tcp_wire import undelayed

NUM_ROOMS = 4  # payloads that may be under way; gloo needs several to be quick


class PrefillDistLink(SocketLink):
    def __init__(self, control: Link, stream: FrameSocket, pair: PairGroup) -> None:
        self._pair = pair
        self._loop = asyncio.get_running_loop()
        self._rooms = [np.empty(0, dtype=np.uint8) for _ in range(NUM_ROOMS)]
        self._left = threading.Condition()  # one of them may be used again
        self._closed = False
        super().__init__(control, stream)

    def load(self, num_bytes: int, fill: Fill) -> "asyncio.Future[None]":
        self._end.check()
        return self._stream.write(partial(self._load, num_bytes, fill))

    def _load(self, num_bytes: int, fill: Fill) -> None:
        """On the writer's thread."""
        with self._left:
            self._left.wait_for(lambda: self._rooms or self._closed)
            if self._closed:
                raise LinkClosed(self._end.reason or "the link is closed")
            room = self._rooms.pop()
        if room.nbytes < num_bytes:
            room = host_memory.buffer(num_bytes)
        payload = room[:num_bytes].data
        frame = None
        try:
            frame = fill(payload)
        finally:
            if frame is None:
                self._leave(room, None)
        if frame is not None:
            try:
                self._pair.send(payload, partial(self._leave, room))
            except Exception as error:  # the room is ours yet
                self._leave(room, error)
                raise
            self._stream.write_now(frame, None, num_bytes, GROUP)

    def _leave(self, room: "np.ndarray[tuple[int], np.dtype[np.uint8]]", error: object) -> None:
        """Any thread: the group looks at `room` no more."""
        with self._left:
            self._rooms.append(room)
            self._left.notify()
        if error is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                reason = f"a payload did not leave: {error}"
                self._loop.call_soon_threadsafe(self._socket_ended, reason)

    def _over(self, reason: str) -> None:
        with self._left:
            self._closed = True
            self._left.notify_all()
        self._pair.close()
        super()._over(reason)


class DecodeDistLink(SocketLink):
    def __init__(self, control: Link, stream: FrameSocket, pair: PairGroup) -> None:
        self._pair = pair
        self._staging = Staging()
        super().__init__(control, stream)

    def _take(self, frame: bytes, num_bytes: int, place: int, payload: Payload) -> None:
        if place != GROUP:
            super()._take(frame, num_bytes, place, payload)
            return
        if not 0 < num_bytes <= MAX_PAYLOAD_BYTES:
            raise LinkClosed(f"a payload of {num_bytes} bytes was announced")
        self._put_ahead(parse_frame(frame), self._pair.recv(self._staging.take(num_bytes)))

    def _over(self, reason: str) -> None:
        self._pair.close()
        super()._over(reason)


class DistConnector:
    """Dials like `control` does, and builds a group of two with whoever answers.

    `host` is the address of this machine at which the other end reaches it.
    """

    def __init__(
        self, control: Connector, wire: str = "gloo", host: str = "127.0.0.1", timeout_s: float = 10
    ) -> None:
        self._control = control
        self._wire = wire
        self._host = host
        self._timeout_s = timeout_s
        self._store: PairStore | None = None
        self._num_calls = 0

    async def connect(self, address: str, hello: Hello) -> Link:
        if self._store is None:
            self._store = PairStore(self._host, self._timeout_s)
        self._num_calls += 1
        greeting = Hello()
        greeting.CopyFrom(hello)
        greeting.wire = self._wire
        name = f"{hello.prefill_instance}.{hello.prefill_rank}.{self._num_calls}"
        meet = Rendezvous(self._store.host, self._store.port, name)
        greeting.rendezvous = str(meet)
        control = await self._control.connect(address, greeting)
        sock = await call(control, self._timeout_s)
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            pair = await _join(PREFILL, control, meet, self._host, self._wire, self._timeout_s)
            undo.pop_all()
        return PrefillDistLink(control, undelayed(sock), pair)

    def close(self) -> None:
        """Let go of the store; links already open go on without it."""
        self._store = None


class DistAcceptor:
    """The decode end: joins the group that a caller's Hello names."""

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 10) -> None:
        self._host = host
        self._timeout_s = timeout_s

    async def accept(self, control: Link) -> Link:
        try:
            meet = Rendezvous.parse(control.hello.rendezvous)
        except ValueError as error:
            await control.close(str(error))
            raise LinkClosed(str(error)) from error
        wire = control.hello.wire
        sock = await await_caller(control, listen_tcp(self._host), self._timeout_s)
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            pair = await _join(DECODE, control, meet, self._host, wire, self._timeout_s)
            undo.pop_all()
        return DecodeDistLink(control, undelayed(sock), pair)


async def _join(
    rank: int, control: Link, meet: Rendezvous, host: str, backend: str, timeout_s: float
) -> PairGroup:
    try:
        return await PairGroup.join(rank, meet, host, backend, timeout_s)
    except RuntimeError as error:
        reason = f"no {backend} group at {meet}: {error}"
        await control.close(reason)
        raise LinkClosed(reason) from error
    except BaseException:
        await control.close(f"no {backend} group at {meet}")
        raise
