"""The torch.distributed wires, gloo and NCCL: frames on a control link, payloads between the pair.

A Chunk frame announces how many bytes come next on the pair's group, so both ends post in the same
order, whatever else the control link carries. Either half failing ends both.
"""

import asyncio

from protos.transfer_pb2 import Frame, Hello
from transport.link import Connector, Ending, Link, LinkClosed
from transport.pair_group import DECODE, PREFILL, PairGroup, PairStore, Rendezvous
from transport.staging import Staging

MAX_PAYLOAD_BYTES = 64 << 20  # of one chunk: a frame that announces more is no chunk of ours
MAX_AHEAD = 16  # frames read before they are wanted, so that their payloads are under way


class DistLink:
    """What both ends share."""

    def __init__(self, control: Link, pair: PairGroup) -> None:
        self.hello = control.hello
        self.welcome = control.welcome
        self._control = control
        self._pair = pair
        self._end = Ending()

    async def close(self, reason: str) -> None:
        self._end.come(reason)
        self._pair.close()
        await self._control.close(reason)


class PrefillDistLink(DistLink):
    def __init__(self, control: Link, pair: PairGroup) -> None:
        super().__init__(control, pair)
        self._sending = asyncio.Lock()
        self._staging = Staging()
        self._closing: asyncio.Task[None] | None = None

    async def lend(self, num_bytes: int) -> memoryview | None:
        return self._staging.take(num_bytes)  # the pair's thread holds it until it has left

    async def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        self._end.check()
        # To its end, even if the caller is cancelled: half a chunk would shift all that follow.
        await self._end.unless(self._send_in_turn(frame, payload), abandon=True)

    async def recv(self) -> tuple[Frame, memoryview | None]:
        try:
            return await self._end.unless(self._control.recv())
        except LinkClosed as closed:
            self._end.come(str(closed))
            self._pair.close()
            raise

    async def close(self, reason: str) -> None:
        await self._control.close(reason)  # first: `recv` still reads what the other end answers
        await super().close(reason)

    async def _send_in_turn(self, frame: Frame, payload: memoryview | None) -> None:
        async with self._sending:
            self._end.check()
            if payload is not None:
                self._pair.send(payload).add_done_callback(self._sent)
            await self._control.send(frame)

    def _sent(self, done: "asyncio.Future[None]") -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None and self._end.reason is None and self._closing is None:
            reason = f"a payload did not leave: {error}"
            self._closing = asyncio.create_task(self.close(reason))


class DecodeDistLink(DistLink):
    def __init__(self, control: Link, pair: PairGroup) -> None:
        super().__init__(control, pair)
        self._ahead: asyncio.Queue[tuple[Frame, asyncio.Future[memoryview] | None]]
        self._ahead = asyncio.Queue(MAX_AHEAD)
        self._reader = asyncio.create_task(self._read())

    async def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        assert payload is None, "payloads go from prefill to decode"
        self._end.check()
        await self._control.send(frame)

    async def recv(self) -> tuple[Frame, memoryview | None]:
        if self._ahead.empty():
            frame, coming = await self._end.unless(self._ahead.get())
        else:  # what was sent before the end still arrives
            frame, coming = self._ahead.get_nowait()
        if coming is None:
            return frame, None
        try:
            return frame, await self._end.unless(coming)
        except RuntimeError as error:
            reason = f"a payload did not come: {error}"
            await self.close(reason)
            raise LinkClosed(reason) from error

    async def close(self, reason: str) -> None:
        await super().close(reason)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                frame, _ = await self._control.recv()
                await self._ahead.put((frame, self._announced(frame)))
        except LinkClosed as closed:
            self._end.come(str(closed))
            self._pair.close()

    def _announced(self, frame: Frame) -> "asyncio.Future[memoryview] | None":
        if not frame.HasField("chunk"):
            return None
        num_bytes = frame.chunk.payload_bytes
        if not 0 < num_bytes <= MAX_PAYLOAD_BYTES:
            raise LinkClosed(f"a chunk of {num_bytes} bytes was announced")
        return self._pair.recv(num_bytes)


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
        pair = await _join(PREFILL, control, meet, self._host, self._wire, self._timeout_s)
        return PrefillDistLink(control, pair)

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
        pair = await _join(DECODE, control, meet, self._host, wire, self._timeout_s)
        return DecodeDistLink(control, pair)


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
