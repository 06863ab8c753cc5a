"""One payload on its way out of a socket while it is built, or out of one before it is read."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from protos.transfer_pb2 import Frame
from transport.pieces import SEAL_BYTES, Pieces, without

if TYPE_CHECKING:
    from transport.frame_socket import FrameSocket

T = TypeVar("T")


class SocketOutlet:
    """On the writer's thread; see `transport.link.Outlet`."""

    def __init__(self, stream: "FrameSocket", num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._stream = stream
        self._pieces: Pieces | None = None
        self._left = 0  # without the seal
        self._rest: tuple[memoryview, memoryview] | None = None  # all digests, all cells

    def begin(self, frame: Frame, num_digests: int) -> tuple[int, NDArray[np.uint8]]:
        num_bytes = self.num_bytes + 8 * num_digests + SEAL_BYTES
        self._pieces = Pieces.of(frame.chunk, num_bytes)
        assert self._pieces is not None, f"no chunk in pieces: {frame.chunk}"
        self._stream.write_now(frame, None, num_bytes)
        self._left = num_bytes - SEAL_BYTES
        return self._stream.fd, self._stream.piece(self._pieces.room_bytes)

    def gone(self, num_bytes: int) -> None:
        self._left -= num_bytes

    def all_gone(self) -> None:
        self._left = 0

    def rest(self, digests: NDArray[np.uint64]) -> NDArray[np.uint8] | None:
        if not self._left:
            return None
        room = self._stream.room(self.num_bytes)
        self._rest = digests.view(np.uint8).data, room
        return np.frombuffer(room, dtype=np.uint8)

    def end(self, seal: int) -> None:
        """As many bytes leave as were announced, whatever became of the payload."""
        if self._pieces is None:
            return
        views = []
        if self._left:
            num_gone = self._pieces.num_bytes - SEAL_BYTES - self._left
            if self._rest is None:
                self._rest = (memoryview(bytes(self._pieces.num_bytes)),) * 2
            views = without(self._pieces.views(*self._rest), num_gone)
        self._stream.write_views([*views, memoryview(seal.to_bytes(SEAL_BYTES, "little"))])


class SocketInlet:
    """See `transport.link.Inlet`."""

    def __init__(self, stream: "FrameSocket", num_bytes: int) -> None:
        self.nbytes = num_bytes
        self.left = num_bytes
        self._stream = stream
        self._taken = False

    def take(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        assert not self._taken, "a payload is read once"
        self._taken = True
        return self._stream.take_in(self, work)

    @property
    def fd(self) -> int:
        return self._stream.fd

    def piece(self, num_bytes: int) -> NDArray[np.uint8]:
        return self._stream.piece(num_bytes)

    def came(self, num_bytes: int) -> None:
        self.left = self.nbytes - num_bytes

    def room(self, num_bytes: int) -> memoryview:
        return self._stream.staging.take(num_bytes)

    def stage(self, views: Sequence[memoryview]) -> "asyncio.Future[None]":
        return self.take(partial(self._stage, views))

    def skip(self) -> None:
        if not self._taken:
            self.take(_nothing)

    def _stage(self, views: Sequence[memoryview]) -> None:
        self._stream.read(views)
        self.left = 0


def _nothing() -> None:
    """All of it is left, and lost."""
