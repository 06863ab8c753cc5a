import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from rich.console import Console

from engine.clock import MonotonicClock
from kvferry.errors import PartFailed
from kvferry.launcher import PartEvent, PartState
from kvferry.ps import ps
from kvferry.redis_server import find_server, free_port, redis_server
from kvferry.settings import hide_password
from prefix_index.redis_schema import COMMANDS

NOWHERE = "/nonexistent"


async def test_the_bundled_server_answers_only_with_its_password_and_ends_with_the_run(
    tmp_path: Path,
) -> None:
    async with redis_server("", tmp_path / "redis.log", MonotonicClock(), NOWHERE) as place:
        assert place.origin.startswith("valkey 9.")
        assert place.origin.endswith("bundled")
        client = redis.asyncio.Redis.from_url(place.url)
        assert await client.ping()
        assert (await client.config_get("bind"))["bind"] == "127.0.0.1"
        assert (await client.config_get("save"))["save"] == ""
        await client.aclose()

        stranger = redis.asyncio.Redis(port=int(place.url.rpartition(":")[2].partition("/")[0]))
        with pytest.raises(redis.exceptions.AuthenticationError):
            await stranger.ping()
        await stranger.aclose()
        assert place.pid is not None
        pid = place.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_server_of_ours_that_is_killed_comes_back_empty_at_the_same_url(
    tmp_path: Path,
) -> None:
    told: list[PartEvent] = []
    log_file = tmp_path / "redis.log"
    async with redis_server("", log_file, MonotonicClock(), NOWHERE, told.append) as place:
        client = redis.asyncio.Redis.from_url(place.url)
        await client.set("what", "it held")
        await client.aclose()
        assert place.pid is not None
        os.kill(place.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while [event.state for event in told] != [PartState.DIED, PartState.READY]:
                await asyncio.sleep(0.01)
        assert told[0].text == "killed by SIGKILL"
        assert await client.get("what") is None
        pid = int((await client.info("server"))["process_id"])
        assert pid != place.pid
        await client.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_given_server_is_used_and_left_running(tmp_path: Path) -> None:
    clock = MonotonicClock()
    async with redis_server("", tmp_path / "theirs.log", clock, NOWHERE) as theirs:
        async with redis_server(theirs.url, tmp_path / "ours.log", clock, NOWHERE) as place:
            assert place.url == theirs.url
            assert place.origin.endswith("given")
            assert place.pid is None
        client = redis.asyncio.Redis.from_url(theirs.url)
        assert await client.ping()
        await client.aclose()


async def test_a_user_who_may_do_only_what_the_index_needs_can_start_and_look(
    tmp_path: Path,
) -> None:
    clock = MonotonicClock()
    allowed = ["~{kvferry}:*", "-@all", *(f"+{name.lower()}" for name in COMMANDS)]
    async with redis_server("", tmp_path / "redis.log", clock, NOWHERE) as theirs:
        admin: Any = redis.asyncio.Redis.from_url(theirs.url)
        await admin.execute_command("ACL", "SETUSER", "narrow", "on", ">pw", *allowed)
        await admin.aclose()
        url = f"redis://narrow:pw@{theirs.url.rpartition('@')[2]}"
        async with redis_server(url, tmp_path / "x.log", clock) as place:
            assert place.origin == "redis, given"
        await ps(url, "kvferry", Console(quiet=True))


async def test_a_given_server_that_refuses_the_login_gets_one_sentence_with_the_way_out(
    tmp_path: Path,
) -> None:
    clock = MonotonicClock()
    async with redis_server("", tmp_path / "redis.log", clock, NOWHERE) as place:
        port = place.url.rpartition(":")[2]
        for url in (f"redis://127.0.0.1:{port}", f"redis://:wrong@127.0.0.1:{port}"):
            with pytest.raises(PartFailed, match=r"refuses the login .*redis://USER:PASSWORD@"):
                async with redis_server(url, tmp_path / "x.log", clock):
                    pass


async def test_a_given_server_that_is_not_there_gets_one_sentence_without_its_password(
    tmp_path: Path,
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # bound, never listening: refuses
        port = listener.getsockname()[1]
        with pytest.raises(PartFailed) as caught:
            async with redis_server(
                f"redis://me:secret@127.0.0.1:{port}/0", tmp_path / "x.log", MonotonicClock()
            ):
                pass
    assert f"no Redis answers at redis://me:***@127.0.0.1:{port}/0" in str(caught.value)
    assert "start it, or name another with --redis-url" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_url_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PartFailed, match="is not a Redis URL"):
        async with redis_server("http://127.0.0.1:1", tmp_path / "x.log", MonotonicClock()):
            pass


def test_a_server_on_the_path_comes_before_the_bundled_one(tmp_path: Path) -> None:
    for name in ("valkey-server", "redis-server"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        assert find_server(str(tmp_path)) == (program, str(program))
    assert find_server(NOWHERE)[1] == "bundled"


async def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho no memory left\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(PartFailed, match="our Redis ended at once: no memory left"):
        async with asyncio.timeout(10):
            async with redis_server("", tmp_path / "x.log", MonotonicClock(), str(tmp_path)):
                pass


def test_a_taken_port_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        assert free_port(taken) != taken
    assert free_port(taken) == taken


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6380/0", "redis://127.0.0.1:6380/0"),
        ("redis://:pw@host:1/0", "redis://:***@host:1/0"),
        ("rediss://me:p%40w@host/2", "rediss://me:***@host/2"),
    ],
)
def test_passwords_are_never_shown(url: str, shown: str) -> None:
    assert hide_password(url) == shown
