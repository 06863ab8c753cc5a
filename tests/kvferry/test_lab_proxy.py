import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from engine.clock import ManualClock
from kvferry.lab.proxy import DelayingProxy, StreamLane, both_ways
from kvferry.lab.topology import Shape


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def a_moment() -> None:
    """Real time in which what should not happen would."""
    await asyncio.sleep(0.02)


@dataclass
class Far:
    """What listens behind the proxy, and all it has heard."""

    port: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    heard: bytearray = field(default_factory=bytearray)
    ends: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while piece := await reader.read(65_536):
                self.heard += piece
            self.ends.append("end")
        except ConnectionResetError:
            self.ends.append("reset")


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Far]:
    far = Far()
    server = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    far.port = server.sockets[0].getsockname()[1]
    try:
        yield far
    finally:
        server.close()
        for writer in far.writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(
    far: Far, proxy: DelayingProxy, clock: ManualClock, round_trip_s: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    num_before, num_open = len(far.writers), proxy.num_connections
    reader, writer = await asyncio.open_connection(*proxy.address)
    await until(lambda: proxy.num_connections == num_open + 1)
    assert len(far.writers) == num_before, "the target is reached only after a round trip"
    await clock.run(round_trip_s + 1e-6)
    await until(lambda: len(far.writers) == num_before + 1)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_bytes_come_out_after_the_delay_in_both_directions_and_not_before() -> None:
    clock = ManualClock()
    there, back = StreamLane(Shape(None, 0.05), clock), StreamLane(Shape(None, 0.2), clock)
    async with (
        listening() as far,
        DelayingProxy(("127.0.0.1", far.port), there, back) as proxy,
        connected(far, proxy, clock, 0.25) as (reader, writer),
    ):
        writer.write(b"hello")
        await until(lambda: clock.num_sleeping == 1)
        await clock.run(0.049)
        await a_moment()
        assert not far.heard
        await clock.run(0.002)
        await until(lambda: far.heard == b"hello")

        far.writers[0].write(b"you")
        await until(lambda: clock.num_sleeping == 1)
        heard = asyncio.create_task(reader.readexactly(3))
        await clock.run(0.199)
        await a_moment()
        assert not heard.done()
        await clock.run(0.002)
        assert await asyncio.wait_for(heard, 5) == b"you"


async def test_a_rate_is_kept_to_the_byte() -> None:
    clock = ManualClock()
    lanes = both_ways(Shape(1e6), clock)  # 125,000 bytes a second
    async with (
        listening() as far,
        DelayingProxy(("127.0.0.1", far.port), *lanes) as proxy,
        connected(far, proxy, clock, 0.0) as (_, writer),
    ):
        writer.write(bytes(50_000))
        for _ in range(400):
            await clock.run(0.001)
            await asyncio.sleep(0)
            assert len(far.heard) <= 125_000 * clock.now() + 1
        await clock.run(0.1)
        await until(lambda: len(far.heard) == 50_000)


async def test_connections_over_one_lane_share_its_line() -> None:
    clock = ManualClock()
    lanes = both_ways(Shape(8e5), clock)  # 100,000 bytes a second
    async with (
        listening() as far,
        DelayingProxy(("127.0.0.1", far.port), *lanes) as proxy,
        connected(far, proxy, clock, 0.0) as (_, one),
        connected(far, proxy, clock, 0.0) as (_, other),
    ):
        started = clock.now()
        one.write(bytes(30_000))
        other.write(bytes(30_000))
        while len(far.heard) < 60_000:
            await clock.run(0.01)
            await asyncio.sleep(0)
        assert clock.now() - started >= 0.59


async def test_a_cut_is_silent_and_heals_without_losing_a_byte() -> None:
    clock = ManualClock()
    lanes = both_ways(Shape(None, 0.01), clock)
    async with (
        listening() as far,
        DelayingProxy(("127.0.0.1", far.port), *lanes) as proxy,
        connected(far, proxy, clock, 0.02) as (reader, writer),
    ):
        proxy.cut()
        writer.write(b"into the dark")
        far.writers[0].write(b"back")
        await until(lambda: clock.num_sleeping == 2)
        await clock.run(60.0)
        await a_moment()
        assert not far.heard and not far.ends
        proxy.heal()
        await until(lambda: far.heard == b"into the dark")
        assert await asyncio.wait_for(reader.readexactly(4), 5) == b"back"


async def test_one_direction_can_be_cut_while_the_other_flows() -> None:
    clock = ManualClock()
    lanes = both_ways(Shape(), clock)
    async with (
        listening() as far,
        DelayingProxy(("127.0.0.1", far.port), *lanes) as proxy,
        connected(far, proxy, clock, 0.0) as (reader, writer),
    ):
        proxy.there.cut()
        writer.write(b"lost")
        far.writers[0].write(b"heard")
        assert await asyncio.wait_for(reader.readexactly(5), 5) == b"heard"
        await a_moment()
        assert not far.heard


async def test_nobody_learns_of_an_end_through_a_cut() -> None:
    clock = ManualClock()
    lanes = both_ways(Shape(), clock)
    async with (
        listening() as far,
        DelayingProxy(("127.0.0.1", far.port), *lanes) as proxy,
        connected(far, proxy, clock, 0.0) as (_, writer),
    ):
        proxy.cut()
        writer.transport.abort()
        await a_moment()
        assert not far.ends
        proxy.heal()
        await until(lambda: len(far.ends) == 1)


async def test_a_connection_made_through_a_cut_waits_for_it_to_heal() -> None:
    clock = ManualClock()
    lanes = both_ways(Shape(), clock)
    async with listening() as far, DelayingProxy(("127.0.0.1", far.port), *lanes) as proxy:
        proxy.cut()
        _, writer = await asyncio.open_connection(*proxy.address)
        writer.write(b"anyone?")
        await a_moment()
        assert not far.writers
        proxy.heal()
        await until(lambda: far.heard == b"anyone?")
        writer.transport.abort()


async def test_the_end_of_one_direction_leaves_the_other_open() -> None:
    clock = ManualClock()
    lanes = both_ways(Shape(), clock)
    async with (
        listening() as far,
        DelayingProxy(("127.0.0.1", far.port), *lanes) as proxy,
        connected(far, proxy, clock, 0.0) as (reader, writer),
    ):
        writer.write(b"that is all")
        writer.write_eof()
        await until(lambda: far.ends == ["end"])
        assert far.heard == b"that is all"
        far.writers[0].write(b"thank you")
        far.writers[0].close()
        assert await asyncio.wait_for(reader.read(), 5) == b"thank you"
        await until(lambda: proxy.num_connections == 0)


async def test_a_target_that_refuses_resets_who_called() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, never listening: refuses
        lanes = both_ways(Shape(), ManualClock())
        async with DelayingProxy(nobody.getsockname(), *lanes) as proxy:
            reader, writer = await asyncio.open_connection(*proxy.address)
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 5)
            writer.transport.abort()


async def test_reset_connections_are_over_for_both_sides_and_new_ones_are_welcome() -> None:
    clock = ManualClock()
    lanes = both_ways(Shape(), clock)
    async with (
        listening() as far,
        DelayingProxy(("127.0.0.1", far.port), *lanes) as proxy,
    ):
        async with connected(far, proxy, clock, 0.0) as (reader, _):
            await proxy.reset_connections()
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 5)
            await until(lambda: far.ends == ["reset"])
        async with connected(far, proxy, clock, 0.0) as (_, writer):
            writer.write(b"again")
            await until(lambda: far.heard == b"again")


async def test_a_sender_is_held_back_when_nobody_reads() -> None:
    lanes = both_ways(Shape(1e5, 0.001))
    async with listening() as far, DelayingProxy(("127.0.0.1", far.port), *lanes) as proxy:
        _, writer = await asyncio.open_connection(*proxy.address)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                writer.write(bytes(64 << 20))
                await writer.drain()
        writer.transport.abort()


@pytest.mark.timed
async def test_on_the_machines_clock_the_rate_holds_to_a_twentieth() -> None:
    lanes = both_ways(Shape(200e6, 0.005))
    async with listening() as far, DelayingProxy(("127.0.0.1", far.port), *lanes) as proxy:
        _, writer = await asyncio.open_connection(*proxy.address)
        writer.write(bytes(15_000_000))
        await until(lambda: len(far.heard) > 1_000_000)
        heard, started = len(far.heard), time.monotonic()
        await until(lambda: len(far.heard) == 15_000_000)
        rate = (15_000_000 - heard) * 8 / (time.monotonic() - started)
        writer.transport.abort()
    assert 190e6 < rate < 210e6
