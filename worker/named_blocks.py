"""The blocks of this worker by name, held fast while they are read for somebody else.

Rank 0 has the names, every rank has cells. Ranks 1 and up ask rank 0, and the blocks stay pinned
for as long as their call lasts.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import grpc.aio

from engine.engine import Engine
from kvcache.block_hash import BlockHash
from protos import rank_pb2, rank_pb2_grpc
from transport.cells_servicer import PinsBlocks
from transport.grpc_options import channel_options
from worker.refusal import Context

PIN_S = 60.0  # far longer than any call that reads them
SUSPECT_TIMEOUT_S = 10.0


class NamedBlocks:
    """What rank 0's engine has cached or in use, for `transport.cells_servicer`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @asynccontextmanager
    async def pinned(self, names: Sequence[bytes]) -> AsyncIterator[Mapping[bytes, int]]:
        ids = self._engine.pin([BlockHash(name) for name in names])
        try:
            yield {bytes(name): block_id for name, block_id in ids.items()}
        finally:
            self._engine.unpin(list(ids.values()))

    async def suspect(self, block_ids: Sequence[int]) -> None:
        self._engine.suspect_blocks(block_ids)


class BlockNamesServicer(rank_pb2_grpc.BlockNamesServicer):
    """Rank 0's, for the other ranks."""

    def __init__(self, blocks: PinsBlocks) -> None:
        self._blocks = blocks

    async def Pin(self, request: rank_pb2.NamedBlocks, context: Context) -> None:
        async with self._blocks.pinned(list(request.names)) as ids:
            places = [place for place, name in enumerate(request.names) if name in ids]
            block_ids = [ids[request.names[place]] for place in places]
            await context.write(rank_pb2.PinnedBlocks(places=places, block_ids=block_ids))
            with suppress(TimeoutError):
                async with asyncio.timeout(PIN_S):
                    await asyncio.Event().wait()  # the caller ends its call

    async def Suspect(self, request: rank_pb2.SuspectBlocks, context: Context) -> rank_pb2.RankAck:
        await self._blocks.suspect(list(request.block_ids))
        return rank_pb2.RankAck()


class RemoteNames:
    """The other end of it: `NamedBlocks` for ranks 1 and up. Close it when nobody asks any more."""

    def __init__(self, find_front: Callable[[], str]) -> None:
        """`find_front` says where rank 0 listens; it may wait, in a thread."""
        self._find_front = find_front
        self._channel: grpc.aio.Channel | None = None

    @asynccontextmanager
    async def pinned(self, names: Sequence[bytes]) -> AsyncIterator[Mapping[bytes, int]]:
        """Nothing is here where rank 0 does not answer."""
        stub = rank_pb2_grpc.BlockNamesStub(await self._connected())
        call = stub.Pin(rank_pb2.NamedBlocks(names=names))
        try:
            pinned: object = None
            with suppress(grpc.aio.AioRpcError):
                pinned = await call.read()
            yield _by_name(names, pinned)
        finally:
            call.cancel()

    async def suspect(self, block_ids: Sequence[int]) -> None:
        stub = rank_pb2_grpc.BlockNamesStub(await self._connected())
        told = rank_pb2.SuspectBlocks(block_ids=block_ids)
        with suppress(grpc.aio.AioRpcError):  # then somebody else will find it
            await stub.Suspect(told, timeout=SUSPECT_TIMEOUT_S)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)

    async def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            address = await asyncio.to_thread(self._find_front)
            if self._channel is None:
                self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        return self._channel


def _by_name(names: Sequence[bytes], pinned: object) -> Mapping[bytes, int]:
    if not isinstance(pinned, rank_pb2.PinnedBlocks):
        return {}
    places = zip(pinned.places, pinned.block_ids, strict=True)
    return {names[place]: block_id for place, block_id in places}
