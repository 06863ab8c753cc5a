"""Over TLS everything is as without it, and a server that cannot prove itself is not talked to."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.clock import MonotonicClock
from prefix_index.index import IndexUnavailable
from prefix_index.redis_index import RedisIndex
from tests.prefix_index.redis_server import RedisServer
from tests.prefix_index.samples import blocks, stored, worker

# For 127.0.0.1, signed by an authority made for this test alone; its key was thrown away.
CERTIFICATES = Path(__file__).parent / "tls"


@asynccontextmanager
async def tls_front(server: RedisServer) -> AsyncIterator[int]:
    """A port that speaks TLS and passes on what it hears to a Redis that does not."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / "server.pem")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(
            pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True
        )

    front = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with front:
        yield front.sockets[0].getsockname()[1]


async def test_an_index_over_tls_with_a_password(server: RedisServer) -> None:
    with server.admin() as admin:
        admin.execute_command("ACL", "SETUSER", "safe", "on", ">s3cret", "~*", "+@all")
    async with tls_front(server) as port:
        query = f"ssl_ca_certs={CERTIFICATES / 'authority.pem'}"
        index = RedisIndex(f"rediss://safe:s3cret@127.0.0.1:{port}/0?{query}", MonotonicClock())
        await index.register(worker("w0"), 5.0)
        await index.publish("w0", 1, stored(1, 2))
        assert await index.longest(blocks([1, 2, 3])) == {"w0": 2}
        await index.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("rediss://127.0.0.1:{port}/0", "certificate verify failed"),
        ("redis://127.0.0.1:{port}/0", "Redis at 127.0.0.1"),
    ],
)
async def test_who_is_not_trusted_or_not_spoken_to_in_tls_is_unavailable(
    server: RedisServer, url: str, reason: str
) -> None:
    async with tls_front(server) as port:
        index = RedisIndex(url.format(port=port), MonotonicClock(), timeout_s=0.5)
        with pytest.raises(IndexUnavailable, match=reason):
            await index.workers()
        await index.close()
