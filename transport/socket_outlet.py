"""One payload on its way out of a socket while it is built."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from transport.link import Pouring
from transport.messages import AHEAD, HEADER, TOLD
from transport.pieces import SEAL_BYTES, Pieces, without

if TYPE_CHECKING:
    from transport.frame_socket import FrameSocket


class SocketOutlet:
    """On the writer's thread; see `transport.link.Outlet`."""

    def __init__(self, stream: "FrameSocket", pouring: Pouring) -> None:
        """On the loop."""
        self.num_bytes = pouring.num_bytes
        self._stream = stream
        all_bytes = self.num_bytes + 8 * pouring.num_digests + SEAL_BYTES
        pieces = Pieces.of(pouring.frame.chunk, all_bytes)
        assert pieces is not None, f"no chunk in pieces: {pouring.frame.chunk}"
        raw = pouring.frame.SerializeToString()
        self._pieces = pieces
        self._notice = HEADER.pack(len(raw), all_bytes, AHEAD) + raw  # until it has been told
        self._all_bytes = all_bytes
        self._begun = False
        self._left = all_bytes - SEAL_BYTES
        self._rest: tuple[memoryview, memoryview] | None = None  # all digests, all cells

    def notice(self) -> bytes:
        """What tells of it, once."""
        notice, self._notice = self._notice, b""
        return notice

    def begin(self) -> tuple[int, NDArray[np.uint8]]:
        """The next payload is told before this one comes: it can be decided meanwhile."""
        self._begun = True
        following = self._stream.following()
        notices = self.notice() + (following.notice() if following is not None else b"")
        self._stream.write_views([memoryview(notices + HEADER.pack(0, self._all_bytes, TOLD))])
        self._stream.tell()
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
        """As many bytes leave as were said to come, whatever became of the payload."""
        if not self._begun:
            if not self._notice:  # which has been told
                self._stream.write_views([memoryview(HEADER.pack(0, 0, TOLD))])
            return
        views = []
        if self._left:
            num_gone = self._pieces.num_bytes - SEAL_BYTES - self._left
            if self._rest is None:
                self._rest = (memoryview(bytes(self._pieces.num_bytes)),) * 2
            views = without(self._pieces.views(*self._rest), num_gone)
        self._stream.write_views([*views, memoryview(seal.to_bytes(SEAL_BYTES, "little"))])
