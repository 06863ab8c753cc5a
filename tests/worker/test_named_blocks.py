"""Ranks above 0 know blocks by the names that rank 0 has."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from protos.rank_pb2_grpc import add_BlockNamesServicer_to_server
from tests.engine.small_worker import SmallWorker
from tests.transport.harness import soon
from worker.named_blocks import BlockNamesServicer, NamedBlocks, RemoteNames

PROMPT = list(range(70))


@asynccontextmanager
async def asked_from_afar(worker: SmallWorker) -> AsyncIterator[RemoteNames]:
    server = grpc.aio.server()
    servicer = BlockNamesServicer(NamedBlocks(worker.engine))
    add_BlockNamesServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    names = RemoteNames(lambda: address)
    try:
        yield names
    finally:
        await names.close()
        await server.stop(0)


async def test_blocks_stay_where_they_are_while_another_rank_reads_them() -> None:
    worker = SmallWorker(recheck_share=1.0)
    worker.ask(PROMPT)
    known = {bytes(name): block_id for block_id, name in worker.pool.named().items()}
    asked = [b"x" * 32, *known]
    async with asked_from_afar(worker) as remote:
        async with remote.pinned(asked) as ids:
            assert ids == known
            assert worker.engine.books().used_blocks == len(known)
            assert worker.engine.flush_cache() == 0
        await soon(lambda: worker.engine.books().used_blocks == 0)


async def test_what_another_rank_suspects_is_checked_on_all() -> None:
    worker = SmallWorker(recheck_share=0.0)
    worker.ask(PROMPT)
    named = worker.pool.named()
    worker.store.recheck(list(named))
    worker.store.layer(0)[next(iter(named)), 0, 0, 0, 0] ^= 1
    async with asked_from_afar(worker) as remote:
        await remote.suspect(list(named))
        worker.step()
    assert worker.engine.stats().rotten_blocks == 1
    assert worker.engine.resident() == []


async def test_where_rank_0_does_not_answer_nothing_is_here() -> None:
    names = RemoteNames(lambda: "127.0.0.1:9")
    async with asyncio.timeout(5), names.pinned([b"x" * 32]) as ids:
        assert ids == {}
    await names.close()
