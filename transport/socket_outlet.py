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
        self._head = b""  # what comes before the payload, once it has begun
        self._num_gone = 0  # of the head, the pieces and the seal
        self._rest: tuple[memoryview, memoryview] | None = None  # all digests, all cells

    def notice(self) -> bytes:
        """What tells of it, once."""
        notice, self._notice = self._notice, b""
        return notice

    def begin(self) -> tuple[int, bytes, NDArray[np.uint8]]:
        """The next payload is told before this one comes: it can be decided meanwhile."""
        following = self._stream.following()
        notices = self.notice() + (following.notice() if following is not None else b"")
        self._head = notices + HEADER.pack(0, self._all_bytes, TOLD)
        self._stream.tell()
        return self._stream.fd, self._head, self._stream.piece(self._pieces.room_bytes)

    def gone(self, num_bytes: int) -> None:
        self._num_gone += num_bytes

    def pieces_gone(self) -> None:
        self._num_gone += self._num_left - SEAL_BYTES

    @property
    def _num_left(self) -> int:
        return len(self._head) + self._all_bytes - self._num_gone

    def rest(self, digests: NDArray[np.uint64]) -> NDArray[np.uint8] | None:
        if self._num_left <= SEAL_BYTES:
            return None
        room = self._stream.room(self.num_bytes)
        self._rest = digests.view(np.uint8).data, room
        return np.frombuffer(room, dtype=np.uint8)

    def end(self, seal: int) -> None:
        """As many bytes leave as were said to come, whatever became of the payload."""
        if not self._head:
            if not self._notice:  # which has been told
                self._stream.write_views([memoryview(HEADER.pack(0, 0, TOLD))])
            return
        left = self._num_left
        last = memoryview(seal.to_bytes(SEAL_BYTES, "little"))
        if left > SEAL_BYTES:
            waste = memoryview(b"" if self._rest else bytes(self._pieces.num_bytes))
            pieces = self._pieces.views(*(self._rest or (waste, waste)))
            views = without([memoryview(self._head), *pieces, last], self._num_gone)
        else:
            views = [last[SEAL_BYTES - left :]] if left else []
        self._stream.write_views(views)
