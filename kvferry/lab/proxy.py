"""A link between two nodes without any rights: a TCP proxy that delays, throttles and cuts.

    accepted      a round trip passes, as for a handshake   then the proxy connects to the target
    bytes         enter a lane, wait for line and delay     then go on, in order
    end, reset    travel like bytes                         nobody learns of them through a cut
    cut           what is under way stays where it is       and goes on when healed, as TCP resends

Both directions are lanes of their own, and one lane may serve many proxies: they share its line.
Timing is asyncio's, about 1 ms late.
"""

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from engine.clock import Clock, MonotonicClock
from kvferry.lab.lane import Lane
from kvferry.lab.topology import Shape

MAX_UNDER_WAY = 256  # pieces of one connection in one direction
CONNECT_TIMEOUT_S = 10.0
PACKET_BYTES = 1_460
MAX_PIECE_BYTES = 65_536
PIECE_S = 0.0005  # time on the line of one piece: small beside any delay worth having
TICK_S = 1e-6  # a shorter wait would be lost in rounding, and never end
HARD_CLOSE = struct.pack("ii", 1, 0)  # linger for no time: reset


class StreamLane:
    """A lane for byte streams, and the valve in it."""

    def __init__(self, shape: Shape, clock: Clock | None = None, seed: int = 0) -> None:
        self.lane = Lane(shape, seed)
        self.clock = clock or MonotonicClock()
        self._open = asyncio.Event()
        self._open.set()

    def change(self, shape: Shape, is_cut: bool = False) -> None:
        """From now on; what is under way keeps its time of arrival."""
        self.lane.shape, self.lane.is_cut = shape, is_cut
        if is_cut:
            self._open.clear()
        else:
            self._open.set()

    def cut(self) -> None:
        self.change(self.lane.shape, is_cut=True)

    def heal(self) -> None:
        self.change(self.lane.shape)

    @property
    def piece_bytes(self) -> int:
        rate = self.lane.shape.rate_bits_per_s
        piece = MAX_PIECE_BYTES if rate is None else int(rate / 8 * PIECE_S)
        return min(max(piece, PACKET_BYTES), MAX_PIECE_BYTES)

    async def enter(self, num_bytes: int) -> float:
        """Wait for room in the queue; when it will come out."""
        lane, clock = self.lane, self.clock
        while (too_long := lane.queued_s(clock.now()) - lane.max_queue_s) > TICK_S:
            await clock.sleep(too_long)
        return lane.stream(clock.now(), num_bytes, PACKET_BYTES)

    async def come_out(self, arrival: float) -> None:
        """Wait for the time of arrival, and for the lane to be whole."""
        if (early := arrival - self.clock.now()) > 0:
            await self.clock.sleep(early)
        await self._open.wait()


def both_ways(
    shape: Shape, clock: Clock | None = None, seed: int = 0
) -> tuple[StreamLane, StreamLane]:
    """The lanes of a link that is alike in both directions."""
    return StreamLane(shape, clock, seed), StreamLane(shape, clock, seed + 1)


class DelayingProxy:
    """What connects to `address` talks to `target`, over two lanes. Use as `async with`.

    `there` carries what the connecting side says, `back` what the target says.
    """

    def __init__(self, target: tuple[str, int], there: StreamLane, back: StreamLane) -> None:
        self.target = target
        self.there = there
        self.back = back
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> tuple[str, int]:
        assert self._server is not None, "the proxy has not been started"
        host, port = self._server.sockets[0].getsockname()
        return host, port

    @property
    def num_connections(self) -> int:
        return len(self._calls)

    def cut(self) -> None:
        """Both directions fall silent."""
        self.there.cut()
        self.back.cut()

    def heal(self) -> None:
        self.there.heal()
        self.back.heal()

    async def reset_connections(self) -> None:
        """End every connection at once, as a rebooting host or a stateful firewall does."""
        calls = tuple(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, limit=MAX_PIECE_BYTES
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.reset_connections()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = asyncio.create_task(self._call(reader, writer))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its acceptance to the end of both directions."""
        far_writer: asyncio.StreamWriter | None = None
        try:
            await self._round_trip()
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                far_reader, far_writer = await asyncio.open_connection(
                    *self.target, limit=MAX_PIECE_BYTES
                )
            async with asyncio.TaskGroup() as group:
                group.create_task(_Pump(self.there, reader, far_writer).run())
                group.create_task(_Pump(self.back, far_reader, writer).run())
        except (OSError, ExceptionGroup):  # refused, timed out, or a reset that has come out
            pass
        finally:
            for end in (writer, far_writer):
                if end is not None:
                    _reset(end)

    async def _round_trip(self) -> None:
        for lane in (self.there, self.back):
            await lane.come_out(lane.clock.now() + lane.lane.shape.delay_s)


@dataclass(frozen=True, slots=True)
class _Pump:
    """One direction of one connection."""

    lane: StreamLane
    source: asyncio.StreamReader
    target: asyncio.StreamWriter

    async def run(self) -> None:
        """Carry until the end of the stream. Raises ConnectionError once a reset has come out."""
        under_way = asyncio.Queue[tuple[float, bytes | None]](MAX_UNDER_WAY)
        reading = asyncio.create_task(self._take_in(under_way))
        try:
            while True:
                arrival, piece = await under_way.get()
                await self.lane.come_out(arrival)
                if piece is None:
                    raise ConnectionResetError("the other end was reset")
                if not piece:
                    self.target.write_eof()
                    return
                self.target.write(piece)
                await self.target.drain()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _take_in(self, under_way: asyncio.Queue[tuple[float, bytes | None]]) -> None:
        while True:
            piece: bytes | None
            try:
                piece = await self.source.read(self.lane.piece_bytes)
            except OSError:
                piece = None
            await under_way.put((await self.lane.enter(len(piece or b"")), piece))
            if not piece:
                return


def _reset(end: asyncio.StreamWriter) -> None:
    """Close at once; the other side hears of a reset unless both directions had ended."""
    if end.is_closing():
        return
    with contextlib.suppress(OSError):
        raw = end.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HARD_CLOSE)
    end.transport.abort()
