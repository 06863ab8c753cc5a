"""The seam between a shipment and the wire it rides: ordered frames, some with a payload.

A link joins one prefill rank to one decode rank for as long as both live, and every shipment of
that pair shares it. What a wire promises:

    order      frames of one direction arrive in the order in which `send` was called, payload
               and frame together
    payload    goes with a Chunk, from prefill to decode only; `send` may return before the other
               end has it, so its bytes must not change afterwards
    pressure   `send` may wait while the other end does not `recv`
    an end     once either side closes or dies, `send` and `recv` raise LinkClosed on both, and
               nothing of this link blocks or breaks any other
    callers    any number of tasks may `send`, one at a time may `recv`; no call blocks the loop
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvcache.mapped_pool import MappedPool
from protos.transfer_pb2 import Frame, Hello, Welcome

PROTOCOL = 6  # raised with every change that an older build would misread

T = TypeVar("T")


class LinkClosed(Exception):
    """The link is gone; the message says why, as far as this end knows."""


class NeverComes(LinkClosed):
    """A payload that was told ahead does not come; the link goes on."""


class LinkRefused(LinkClosed):
    """The other end answered, and will not work with us."""


class WireQuarantined(LinkRefused):
    """The other end has had too much damage over this wire; worth trying again in `left_s`."""

    def __init__(self, reason: str, left_s: float) -> None:
        super().__init__(reason)
        self.left_s = left_s


class Link(Protocol):
    @property
    def hello(self) -> Hello: ...

    @property
    def welcome(self) -> Welcome: ...

    async def send(self, frame: Frame, payload: memoryview | None = None) -> None: ...

    async def recv(self) -> tuple[Frame, memoryview | None]: ...

    async def close(self, reason: str) -> None:
        """End the link at both ends. Frames already sent may still arrive."""


@runtime_checkable
class Poster(Protocol):
    """A link that may take a small frame without a turn of the loop."""

    def post(self, frame: Frame) -> bool:
        """Send it at once, if nothing waits before it. Whether that was so. Raises LinkClosed."""


Fill = Callable[[memoryview], Frame | None]


@runtime_checkable
class Loader(Protocol):
    """A prefill end that has payloads built where they leave from, on a thread of its own."""

    def load(self, num_bytes: int, fill: Fill) -> "asyncio.Future[None]":
        """Let `fill` build a payload of `num_bytes`, and send it and the frame that it answers,
        after all that was sent before; nothing, when it answers None.

        Done when `send` would return, or with what `fill` raised. Who stops waiting stops nothing.
        """


class Outlet(Protocol):
    """Where one payload leaves, while it is built, through a socket that is nobody else's then."""

    num_bytes: int  # of cells

    def begin(self) -> tuple[int, bytes, NDArray[np.uint8]]:
        """What was told comes now. Returns the socket, what is to be sent before the pieces, and
        room for one of them.
        """

    def gone(self, num_bytes: int) -> None:
        """So much of all that, and of the seal behind it, has been sent through the socket."""

    def pieces_gone(self) -> None:
        """All of it has been but for the seal."""

    def rest(self, digests: NDArray[np.uint64]) -> NDArray[np.uint8] | None:
        """Where to build all cells if something is left, which then leaves from there, and
        `digests` with it.
        """


Pour = Callable[[Outlet], int | None]  # the seal of what left; None: it is given up


class Pouring(NamedTuple):
    """A payload in pieces that leaves while it is built, and what may be told of it before."""

    frame: Frame
    num_bytes: int  # of cells
    num_digests: int
    pour: Pour


@runtime_checkable
class Pourer(Protocol):
    """A prefill end whose payloads may leave while they are built, on a thread of its own."""

    def pour(self, pouring: Pouring) -> "asyncio.Future[None]":
        """As `Loader.load`. What has left comes to nothing if `pour` answers None or raises. The
        frame may leave before payloads that were sent before.
        """

    @property
    def num_bytes_written(self) -> int:
        """Of payloads that wait for the other end to read, so far, whole or not."""

    @property
    def reach(self) -> int:
        """Bytes that leave in a moment, as far as those that have left tell; 0 before them."""


class Inlet(Protocol):
    """Where one payload comes out of a socket that is nobody else's until it is read.

    One of `take`, `stage` and `skip` is called, once. No payload behind it comes before that is
    done. It may be called before those before it have come.
    """

    nbytes: int

    def take(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Let `work` read on the reader's thread, which may use the next three; what it leaves is
        read, and is lost. Raises what `work` does; LinkClosed when the link is closed before, or
        it is withdrawn, NeverComes.
        """

    def withdraw(self, reason: str) -> None:
        """Of what `take` was given nothing is done, unless it has begun."""

    @property
    def fd(self) -> int: ...

    def piece(self, num_bytes: int) -> NDArray[np.uint8]:
        """Room that stays in a cache."""

    def came(self, num_bytes: int) -> None:
        """So much has been read through the socket, in all."""

    def room(self, num_bytes: int) -> memoryview:
        """Memory to stage in, nobody else's until it is let go."""

    def stage(self, views: Sequence[memoryview]) -> "asyncio.Future[None]":
        """Read all into these. Raises OSError, LinkClosed and NeverComes."""

    def skip(self) -> None:
        """It is not wanted, unless somebody has taken it."""


Payload = memoryview | Inlet | None


@runtime_checkable
class Opener(Protocol):
    """A decode end that says what comes before it is read."""

    @property
    def tells_ahead(self) -> bool:
        """Whether it does: else payloads come as they do of `Link.recv`."""

    @property
    def num_bytes_read(self) -> int:
        """Of payloads that were told ahead, so far, whole or not."""

    async def recv_unread(self) -> tuple[Frame, Payload]:
        """As `Link.recv`. Of those with an inlet few come before the first one's is used."""


@runtime_checkable
class PoolShower(Protocol):
    """A prefill end whose decode end may read cells where they lie."""

    @property
    def shows_pool(self) -> bool:
        """Whether it can: then a Chunk with `pool_blocks` has no payload."""


@runtime_checkable
class PoolReader(Protocol):
    """A decode end that may."""

    @property
    def pool(self) -> MappedPool | None: ...


class Connector(Protocol):
    """The prefill side of a wire."""

    async def connect(self, address: str, hello: Hello) -> Link:
        """Dial, say hello, be welcomed. Raises LinkRefused or LinkClosed, within a deadline."""


class Acceptor(Protocol):
    """The decode side of a wire: what turns a welcomed control stream into a link."""

    async def accept(self, control: Link) -> Link: ...


class Listener(Protocol):
    """Who takes calls on the decode side: `transport.receiver.Receiver`."""

    def answer(self, hello: Hello) -> Welcome:
        """Raises LinkRefused."""

    async def serve(self, link: Link) -> None:
        """Returns when the link is closed."""


class Ending:
    """The end of a link: comes once, with a reason, and wakes whatever waits on the link."""

    def __init__(self) -> None:
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def reason(self) -> str | None:
        return self._reason.result() if self._reason.done() else None

    def come(self, reason: str) -> None:
        if not self._reason.done():
            self._reason.set_result(reason)

    def check(self) -> None:
        if self._reason.done():
            raise LinkClosed(self._reason.result())

    async def wait(self) -> str:
        return await asyncio.shield(self._reason)

    async def unless(self, what: Awaitable[T], *, abandon: bool = False) -> T:
        """The result of `what`, or LinkClosed if the end comes first.

        When the caller is cancelled or the end comes, `what` is cancelled, too; with `abandon` it
        is left to itself, for a stream that does not survive a cancelled write.
        """
        task = asyncio.ensure_future(what)
        either: set[asyncio.Future[Any]] = {task, self._reason}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            raise LinkClosed(self.reason or "the stream was cancelled")
        finally:
            task.add_done_callback(heed)
            if not task.done() and not abandon:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def heed(task: "asyncio.Future[T]") -> None:
    """Take note of an end that nobody may come to ask about, so that asyncio does not complain."""
    if not task.cancelled():
        task.exception()
