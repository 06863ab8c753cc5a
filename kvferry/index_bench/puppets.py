"""Decode workers that answer at once, so that a router is all there is to measure.

`python -m kvferry.index_bench.puppets REDIS_URL WORKERS` announces them and prints a line of JSON,
the address of the first, when all are there. Ends when its input does.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio

from engine.clock import MonotonicClock
from kvferry.index_bench.prompts import load, record
from kvferry.replay.command import silence
from model.source import open_model
from prefix_index.announcer import Announcer
from prefix_index.index import Role
from prefix_index.redis_index import RedisIndex
from protos import worker_pb2 as wpb
from protos import worker_pb2_grpc as wrpc
from transport.grpc_options import server_options

DTYPE = "int64"


class Puppet(wrpc.DecodeWorkerServicer):
    """One token, whatever is asked."""

    async def Decode(self, request: wpb.DecodeRequest, context: Any) -> AsyncIterator[Any]:
        yield wpb.DecodeEvent(reserved=wpb.DecodeReserved(cached_blocks=0))
        token = wpb.GeneratedToken(choice=0, index=0, token_id=65, finish_reason="length")
        yield wpb.DecodeEvent(token=token)
        yield wpb.DecodeEvent(
            done=wpb.DecodeDone(cached_tokens=0, computed_tokens=len(request.work.prompt))
        )


async def main() -> None:
    url, count, clock = sys.argv[1], int(sys.argv[2]), MonotonicClock()
    source = open_model("checksum")
    busy = load(0, 0, 100_000)
    tasks, addresses = [], []
    for number in range(count):
        server = grpc.aio.server(options=server_options())
        wrpc.add_DecodeWorkerServicer_to_server(Puppet(), server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        index = RedisIndex(url, clock)
        known = record(number, await index.next_epoch(f"w{number}"), busy)
        manifest = replace(
            known.manifest,
            model="checksum",
            namespace=source.namespace(DTYPE).hex(),
            dtype=DTYPE,
            vocab_size=source.vocab_size,
            max_context=source.max_context,
        )
        known = replace(
            known, role=Role.DECODE, address=addresses[-1], rank_addresses=(addresses[-1],)
        )
        announcer = Announcer(
            index, replace(known, manifest=manifest), lambda: (busy, []), list, clock
        )
        tasks.append((asyncio.create_task(announcer.run()), server))
    print(json.dumps({"address": addresses[0]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    silence()
    asyncio.run(main())
