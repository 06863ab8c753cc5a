"""A connection is in step with its server or gone: no reply reaches the wrong caller."""

import asyncio
import os
import time

import pytest
from redis.exceptions import ResponseError

from engine.clock import ManualClock, MonotonicClock
from prefix_index.index import IndexUnavailable
from prefix_index.redis_link import RedisLink, place
from tests.prefix_index.redis_server import RedisServer, free_port


def link_to(server: RedisServer, timeout_s: float = 0.2) -> RedisLink:
    return RedisLink(server.url, MonotonicClock(), timeout_s=timeout_s)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_replies_come_in_the_order_of_the_commands(server: RedisServer) -> None:
    link = link_to(server)
    assert await link.exchange(("SET", "a", b"\x00\xff"), ("GET", "a"), ("GET", "b")) == [
        b"OK",
        b"\x00\xff",
        None,
    ]
    await link.close()


async def test_an_error_reply_is_a_value_and_the_next_replies_are_read(server: RedisServer) -> None:
    link = link_to(server)
    await link.exchange(("SET", "a", "1"))
    wrong, right = await link.exchange(("HLEN", "a"), ("GET", "a"))
    assert isinstance(wrong, ResponseError) and "WRONGTYPE" in str(wrong)
    assert right == b"1"
    await link.close()


async def test_a_late_reply_is_never_taken_for_the_next_one(server: RedisServer) -> None:
    link = link_to(server, timeout_s=0.15)
    await link.exchange(("SET", "a", "late"), ("SET", "b", "mine"))
    with server.admin() as admin:
        admin.execute_command("CLIENT", "PAUSE", 300, "ALL")
    with pytest.raises(IndexUnavailable, match=r"no answer within 0\.1"):
        await link.exchange(("GET", "a"))
    await asyncio.sleep(0.4)
    assert await link.exchange(("GET", "b")) == [b"mine"]
    await link.close()


async def test_a_cancelled_caller_s_reply_is_never_read_by_the_next(server: RedisServer) -> None:
    link = link_to(server, timeout_s=2.0)
    await link.exchange(("SET", "b", "mine"))
    caller = asyncio.create_task(link.exchange(("BLPOP", "a", "0.3")))
    await asyncio.sleep(0.05)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert await link.exchange(("GET", "b")) == [b"mine"]
    await link.close()


async def test_an_unfinished_watch_does_not_reach_the_next_transaction(server: RedisServer) -> None:
    link = link_to(server)
    async with link.session() as session:
        await session(("WATCH", "a"), ("GET", "a"))
    with server.admin() as admin:
        admin.set("a", "changed")
    *_, executed = await link.exchange(("MULTI",), ("GET", "a"), ("EXEC",))
    assert executed == [b"changed"]
    await link.close()


async def test_after_a_failure_it_is_not_asked_again_for_a_while() -> None:
    clock = ManualClock()
    link = RedisLink(f"redis://127.0.0.1:{free_port()}", clock, timeout_s=1.0)
    for pause_s in ("0.1", "0.2", "0.4", "0.8", "1.6", "2.0", "2.0"):
        with pytest.raises(IndexUnavailable, match="Connect call failed"):
            await link.exchange(("PING",))
        with pytest.raises(IndexUnavailable, match=f"next try in {pause_s} s"):
            await link.exchange(("PING",))
        clock.advance(float(pause_s))


async def test_a_hanging_server_holds_one_connection_and_no_callers(server: RedisServer) -> None:
    link = link_to(server)
    await link.exchange(("PING",))
    tasks, files = len(asyncio.all_tasks()), num_files()
    server.stop()
    try:
        started = time.monotonic()
        for _ in range(3):
            calls = [link.exchange(("GET", "a")) for _ in range(100)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(answer, IndexUnavailable) for answer in answers)
        assert time.monotonic() - started < 1.5
        assert len(asyncio.all_tasks()) == tasks
        assert num_files() <= files
    finally:
        server.go_on()
    await asyncio.sleep(0.5)
    assert await link.exchange(("PING",)) == [b"PONG"]
    await link.close()


async def test_a_demoted_server_is_unavailable(server: RedisServer) -> None:
    link = link_to(server)
    with server.admin() as admin:
        admin.replicaof("127.0.0.1", str(free_port()))
        try:
            with pytest.raises(IndexUnavailable, match="read only replica"):
                await link.exchange(("SET", "a", "1"), ("PING",), ("PING",))
        finally:
            admin.replicaof("NO", "ONE")
    await asyncio.sleep(0.15)
    assert await link.exchange(("SET", "a", "1"), ("GET", "a")) == [b"OK", b"1"]
    await link.close()


async def test_a_refused_password_is_unavailable_and_not_repeated_in_the_message(
    server: RedisServer,
) -> None:
    url = f"redis://someone:s3cret@127.0.0.1:{server.port}/0"
    link = RedisLink(url, MonotonicClock(), timeout_s=1.0)
    with pytest.raises(IndexUnavailable, match=f"Redis at 127.0.0.1:{server.port}: ") as caught:
        await link.exchange(("PING",))
    assert "s3cret" not in str(caught.value)


def test_a_place_has_no_secrets() -> None:
    assert place("rediss://user:pw@cache.example:6380/2") == "Redis at cache.example:6380"
    assert place("redis://localhost") == "Redis at localhost:6379"
    assert place("unix:///run/redis.sock?password=pw") == "Redis at /run/redis.sock"
