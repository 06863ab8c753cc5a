"""What each wire could carry at most: its own calls and nothing else, with as many bytes a message
and as many messages in flight.

    tcp    sendmsg and recv_into on plain blocking sockets
    shm    one process copies into a slot, the other out of it
    grpc   an asyncio stream of raw bytes, each message acknowledged by an empty one
    gloo   isend and irecv of prepared tensors in a group of two

In every one the sender hears once at the end that all has arrived. Each sends one prepared payload
again and again, or in gloo one for each message in flight, so these bytes lie in a cache as those
of a pool do not: it is the wire that is measured, which no wire of ours could outdo.

Over tcp and shm there is a second one, cold to cold: the same calls, but each message leaves from
memory of its own and arrives in memory of its own, as many bytes at each end as our pools have, in
pages as large. So each byte is read from memory and written to memory once, as by whoever has
pools; nothing looks at it, and nothing lies scattered. Over shm it still goes through the ring: who
copies out of the pool of the other end may outdo that. A third, over tcp, is `alone`.
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
from numpy.typing import NDArray

from kvcache import host_memory
from kvferry.transfer_bench.case import Case
from transport.grpc_options import channel_options, server_options
from transport.pair_group import DECODE, PREFILL, PairStore, Rendezvous, _build
from transport.shm_ring import NUM_SLOTS, ShmRing
from transport.tcp_wire import unpace

METHOD = "/kvferry.bench/Push"
COLD_WIRES = ("shm", "tcp")  # that can be measured cold to cold, too

Memory = NDArray[np.uint8]


async def serve(case: Case, cold: Memory | None = None) -> tuple[str, "asyncio.Task[None]"]:
    """Where to push to, and what ends once all has come: in `cold`, if it is given."""
    if case.wire == "grpc":
        return await _serve_grpc(case)
    if case.wire in ("gloo", "nccl"):
        store = PairStore("127.0.0.1", 30)
        meet = Rendezvous(store.host, store.port, "limit")
        task = asyncio.create_task(asyncio.to_thread(_take_gloo, case, meet, store))
        return str(meet), task
    listener = socket.socket(socket.AF_UNIX if case.wire == "shm" else socket.AF_INET)
    listener.bind(f"\0kvferry-limit-{id(listener)}" if case.wire == "shm" else (case.host, 0))
    listener.listen(1)
    name = listener.getsockname()
    address = name[1:].decode() if case.wire == "shm" else str(name[1])
    take = _take_shm if case.wire == "shm" else _take_tcp
    return address, asyncio.create_task(asyncio.to_thread(take, case, listener, cold))


async def push(case: Case, address: str, cold: Memory | None = None) -> float:
    """Seconds until all had arrived, from `cold`, if it is given."""
    if case.wire == "grpc":
        return await _push_grpc(case, address)
    if case.wire in ("gloo", "nccl"):
        return await asyncio.to_thread(_push_gloo, case, address)
    give = _push_shm if case.wire == "shm" else _push_tcp
    return await asyncio.to_thread(give, case, address, cold)


def cold_memory(case: Case) -> Memory:
    """For all bytes of a case, every page looked at; to be used again and again."""
    memory = host_memory.buffer(case.total_bytes)
    memory[:] = np.resize(_payload(case), memory.nbytes)
    return memory


def _num_messages(case: Case) -> int:
    return case.total_bytes // case.message_bytes


def _payload(case: Case) -> Any:
    few = np.random.default_rng(1).integers(0, 256, 64 << 10, dtype=np.uint8)
    return np.resize(few, case.message_bytes)


def _messages(case: Case, cold: Memory | None) -> list[memoryview]:
    """Where each leaves from, or arrives: all in one place, or each in its own."""
    size, count = case.message_bytes, _num_messages(case)
    if cold is None:
        return [memoryview(_payload(case))] * count
    return [cold[i * size : (i + 1) * size].data for i in range(count)]


def _push_tcp(case: Case, address: str, cold: Memory | None) -> float:
    with socket.create_connection((case.host, int(address))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        unpace(sock)
        header, messages = bytes(12), _messages(case, cold)
        began = time.perf_counter()
        for payload in messages:
            sent = sock.sendmsg([header, payload]) - len(header)
            if sent < payload.nbytes:
                sock.sendall(payload[max(0, sent) :])
        sock.recv(1)
        return time.perf_counter() - began


def _take_tcp(case: Case, listener: socket.socket, cold: Memory | None) -> None:
    with listener, listener.accept()[0] as sock:
        header = bytearray(12)
        for payload in _messages(case, cold):
            sock.recv_into(header, 0, socket.MSG_WAITALL)
            sock.recv_into(payload, 0, socket.MSG_WAITALL)
        sock.send(b"!")


def _push_shm(case: Case, address: str, cold: Memory | None) -> float:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + address)
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
        ring = ShmRing.open(fds[0])
        messages = [np.asarray(each) for each in _messages(case, cold)]
        free = list(range(min(NUM_SLOTS, case.in_flight)))
        _touch(ring, case)
        num_back, num_slots, num_messages = 0, len(free), _num_messages(case)
        began = time.perf_counter()
        for payload in messages:
            if not free:
                back = sock.recv(num_slots)
                num_back += len(back)
                free += back
            slot = free.pop()
            np.copyto(ring.view(slot, case.message_bytes), payload)
            sock.send(bytes([slot]))
        while num_back < num_messages:
            num_back += len(sock.recv(num_slots))
        return time.perf_counter() - began


def _touch(ring: ShmRing, case: Case) -> None:
    """The first look at memory costs more than copying it: not a part of the limit."""
    for slot in range(min(NUM_SLOTS, case.in_flight)):
        ring.view(slot, case.message_bytes)[:] = 1


def _take_shm(case: Case, listener: socket.socket, cold: Memory | None) -> None:
    with listener, listener.accept()[0] as sock:
        ring, fd = ShmRing.create()
        _touch(ring, case)
        socket.send_fds(sock, [b"r"], [fd])
        messages = [np.asarray(each) for each in _messages(case, cold)]
        while messages:
            for slot in sock.recv(NUM_SLOTS):
                np.copyto(messages.pop(), ring.view(slot, case.message_bytes))
                sock.send(bytes([slot]))


async def _serve_grpc(case: Case) -> tuple[str, "asyncio.Task[None]"]:
    done = asyncio.Event()

    async def take(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in messages:
            yield b""
        done.set()

    handler = grpc.stream_stream_rpc_method_handler(take)
    server = grpc.aio.server(options=server_options())
    service, method = METHOD[1:].split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port(f"{case.host}:0")
    await server.start()

    async def finish() -> None:
        await done.wait()
        await server.stop(1)

    return f"{case.host}:{port}", asyncio.create_task(finish())


async def _push_grpc(case: Case, address: str) -> float:
    message, room = bytes(_payload(case)), asyncio.Semaphore(case.in_flight)
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        await channel.channel_ready()
        open_stream: Any = channel.stream_stream  # whose stubs ask for what is optional
        call = open_stream(METHOD)()

        async def collect() -> None:
            for _ in range(_num_messages(case)):
                await call.read()
                room.release()

        began = time.perf_counter()
        collecting = asyncio.create_task(collect())
        for _ in range(_num_messages(case)):
            await room.acquire()
            await call.write(message)
        await collecting
        seconds = time.perf_counter() - began
        await call.done_writing()
        with contextlib.suppress(grpc.RpcError):
            await call.read()
        return seconds


def _push_gloo(case: Case, address: str) -> float:
    group: Any = _build(PREFILL, Rendezvous.parse(address), "127.0.0.1", "gloo", 30)
    tensors = [torch.from_numpy(_payload(case)) for _ in range(case.in_flight)]
    works: list[Any] = []
    began = time.perf_counter()
    for i in range(_num_messages(case)):
        if i >= case.in_flight:
            works[i - case.in_flight].wait()
        works.append(group.send([tensors[i % case.in_flight]], DECODE, i))
    for work in works[-case.in_flight :]:
        work.wait()
    group.recv([torch.empty(1, dtype=torch.uint8)], DECODE, 1 << 20).wait()
    return time.perf_counter() - began


def _take_gloo(case: Case, meet: Rendezvous, store: PairStore) -> None:
    group: Any = _build(DECODE, meet, "127.0.0.1", "gloo", 30)
    tensors = [torch.from_numpy(_payload(case)) for _ in range(case.in_flight)]
    works: list[Any] = []
    for i in range(_num_messages(case)):
        if i >= case.in_flight:
            works[i - case.in_flight].wait()
        works.append(group.recv([tensors[i % case.in_flight]], PREFILL, i))
    for work in works[-case.in_flight :]:
        work.wait()
    group.send([torch.zeros(1, dtype=torch.uint8)], PREFILL, 1 << 20).wait()
    del store
