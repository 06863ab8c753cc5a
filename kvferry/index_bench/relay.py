"""The least that a router in Python can be: every call is passed on as bytes, unread.

`python -m kvferry.index_bench.relay ADDRESS` prints a line of JSON, its own address. Ends when its
input does.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from transport.grpc_options import channel_options, server_options


def unread(message: bytes) -> bytes:
    return message


class Relay(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        onward = self._channel.unary_stream(details.method, unread, unread)

        async def forward(request: bytes, _context: Any) -> AsyncIterator[bytes]:
            async for said in onward(request):
                yield said

        return grpc.unary_stream_rpc_method_handler(forward)


async def main() -> None:
    async with grpc.aio.insecure_channel(sys.argv[1], options=channel_options()) as channel:
        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers((Relay(channel),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
