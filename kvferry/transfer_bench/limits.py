"""What each wire could carry at most: its own calls and nothing else, with as many bytes a message
and as many messages in flight.

    tcp    sendmsg and recv_into on plain blocking sockets
    shm    one process copies into a slot, the other out of it
    grpc   an asyncio stream of raw bytes, each message acknowledged by an empty one
    gloo   isend and irecv of prepared tensors in a group of two

In every one the sender hears once at the end that all has arrived. What leaves is said by a `Load`.
`Hot` ones lie in a cache, as the bytes of a pool do not: it is the wire that is measured, which no
wire of ours could outdo.

There is a second one, cold to cold: the same calls, but each message leaves from memory of its own
and arrives in memory of its own, as many bytes at each end as our pools have, in pages as large. So
each byte is read from memory and written to memory once, as by whoever has pools; nothing looks at
it, and nothing lies scattered. Over shm it still goes through the ring: who copies out of the pool
of the other end may outdo that. Over gRPC, which takes and gives bytes of Python's, it is copied
into these and out of them.

A third, over all but shm, is `alone`.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import numpy as np
import torch

from kvferry.transfer_bench.case import Case
from kvferry.transfer_bench.loads import Load, Memory
from transport.grpc_options import channel_options, server_options
from transport.pair_group import DECODE, PREFILL, PairStore, Rendezvous, _build
from transport.shm_ring import NUM_SLOTS, ShmRing
from transport.tcp_wire import unpace

METHOD = "/kvferry.bench/Push"


async def serve(case: Case, load: Load) -> tuple[str, "asyncio.Task[None]"]:
    """Where to push to, and what ends once all has come."""
    if case.wire == "grpc":
        return await _serve_grpc(case, load)
    if case.wire in ("gloo", "nccl"):
        store = PairStore("127.0.0.1", 30)
        meet = Rendezvous(store.host, store.port, "limit")
        task = asyncio.create_task(asyncio.to_thread(_take_gloo, case, meet, store, load))
        return str(meet), task
    listener = socket.socket(socket.AF_UNIX if case.wire == "shm" else socket.AF_INET)
    listener.bind(f"\0kvferry-limit-{id(listener)}" if case.wire == "shm" else (case.host, 0))
    listener.listen(1)
    name = listener.getsockname()
    address = name[1:].decode() if case.wire == "shm" else str(name[1])
    take = _take_shm if case.wire == "shm" else _take_tcp
    return address, asyncio.create_task(asyncio.to_thread(take, case, listener, load))


async def push(case: Case, address: str, load: Load) -> float:
    """Seconds until all had arrived."""
    if case.wire == "grpc":
        return await _push_grpc(case, address, load)
    if case.wire in ("gloo", "nccl"):
        return await asyncio.to_thread(_push_gloo, case, address, load)
    give = _push_shm if case.wire == "shm" else _push_tcp
    return await asyncio.to_thread(give, case, address, load)


def _push_tcp(case: Case, address: str, load: Load) -> float:
    with socket.create_connection((case.host, int(address))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        unpace(sock)
        header = bytes(12)
        began = time.perf_counter()
        for i in range(load.num_messages):
            leaving = load.leaving(i)
            payload = memoryview(leaving) if isinstance(leaving, bytes) else leaving.data
            sent = sock.sendmsg([header, payload]) - len(header)
            if sent < payload.nbytes:
                sock.sendall(payload[max(0, sent) :])
        sock.recv(1)
        return time.perf_counter() - began


def _take_tcp(case: Case, listener: socket.socket, load: Load) -> None:
    with listener, listener.accept()[0] as sock:
        header = bytearray(12)
        for i in range(load.num_messages):
            sock.recv_into(header, 0, socket.MSG_WAITALL)
            sock.recv_into(load.room(i).data, 0, socket.MSG_WAITALL)
            load.came(i, load.room(i))
        sock.send(b"!")


def _push_shm(case: Case, address: str, load: Load) -> float:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + address)
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
        ring = ShmRing.open(fds[0])
        free = list(range(min(NUM_SLOTS, case.in_flight)))
        _touch(ring, case)
        num_back, num_slots = 0, len(free)
        began = time.perf_counter()
        for i in range(load.num_messages):
            if not free:
                back = sock.recv(num_slots)
                num_back += len(back)
                free += back
            slot = free.pop()
            np.copyto(ring.view(slot, case.message_bytes), np.asarray(load.leaving(i)))
            sock.send(bytes([slot]))
        while num_back < load.num_messages:
            num_back += len(sock.recv(num_slots))
        return time.perf_counter() - began


def _touch(ring: ShmRing, case: Case) -> None:
    """The first look at memory costs more than copying it: not a part of the limit."""
    for slot in range(min(NUM_SLOTS, case.in_flight)):
        ring.view(slot, case.message_bytes)[:] = 1


def _take_shm(case: Case, listener: socket.socket, load: Load) -> None:
    with listener, listener.accept()[0] as sock:
        ring, fd = ShmRing.create()
        _touch(ring, case)
        socket.send_fds(sock, [b"r"], [fd])
        num_taken = 0
        while num_taken < load.num_messages:
            for slot in sock.recv(NUM_SLOTS):
                room = load.room(num_taken)
                np.copyto(room, ring.view(slot, case.message_bytes))
                sock.send(bytes([slot]))
                load.came(num_taken, room)
                num_taken += 1


async def _serve_grpc(case: Case, load: Load) -> tuple[str, "asyncio.Task[None]"]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def take(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        num_taken = 0
        try:
            async for message in messages:
                load.came(num_taken, message)
                num_taken += 1
                yield b""
        except ValueError as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    handler = grpc.stream_stream_rpc_method_handler(take)
    server = grpc.aio.server(options=server_options())
    service, method = METHOD[1:].split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port(f"{case.host}:0")
    await server.start()

    async def finish() -> None:
        try:
            await done
        finally:
            await server.stop(1)

    return f"{case.host}:{port}", asyncio.create_task(finish())


async def _push_grpc(case: Case, address: str, load: Load) -> float:
    room = asyncio.Semaphore(case.in_flight)
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        await channel.channel_ready()
        open_stream: Any = channel.stream_stream  # whose stubs ask for what is optional
        call = open_stream(METHOD)()

        async def collect() -> None:
            for _ in range(load.num_messages):
                await call.read()
                room.release()

        began = time.perf_counter()
        collecting = asyncio.create_task(collect())
        for i in range(load.num_messages):
            await room.acquire()
            message = load.leaving(i)
            await call.write(message if isinstance(message, bytes) else message.tobytes())
        await collecting
        seconds = time.perf_counter() - began
        await call.done_writing()
        with contextlib.suppress(grpc.RpcError):
            await call.read()
        return seconds


def _push_gloo(case: Case, address: str, load: Load) -> float:
    group: Any = _build(PREFILL, Rendezvous.parse(address), "127.0.0.1", "gloo", 30)
    works: list[Any] = []
    began = time.perf_counter()
    for i in range(load.num_messages):
        if i >= case.in_flight:
            works[i - case.in_flight].wait()
        works.append(group.send([_tensor(load.leaving(i))], DECODE, i))
    for work in works[-case.in_flight :]:
        work.wait()
    group.recv([torch.empty(1, dtype=torch.uint8)], DECODE, 1 << 20).wait()
    return time.perf_counter() - began


def _take_gloo(case: Case, meet: Rendezvous, store: PairStore, load: Load) -> None:
    group: Any = _build(DECODE, meet, "127.0.0.1", "gloo", 30)
    works: list[Any] = []
    for i in range(load.num_messages + case.in_flight):
        if i >= case.in_flight:
            works[i - case.in_flight].wait()
            load.came(i - case.in_flight, load.room(i - case.in_flight))
        if i < load.num_messages:
            works.append(group.recv([_tensor(load.room(i))], PREFILL, i))
    group.send([torch.zeros(1, dtype=torch.uint8)], PREFILL, 1 << 20).wait()
    del store


def _tensor(memory: Memory | bytes) -> torch.Tensor:
    return torch.from_numpy(np.asarray(memory))
