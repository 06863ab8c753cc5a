"""What a router adds to a request over HTTP, ours and other projects', before workers that answer
at once.

`make bench-routers`, about a minute. The same client asks each router, one request at a time and 16
at a time, for one token after a text, and then a worker itself. Not all do the same work:

    kvferry         checks the request, makes tokens of the text (of each character one), names
                    their blocks, looks them up, chooses among 8 workers by cost, calls one over
                    gRPC, turns its token into text, keeps books on all of it. Python
    sglang-router   cache_aware: looks the text up in a tree of texts that it has routed, chooses
                    between 2 workers, passes the body on as it is over HTTP. Rust
    vllm-router     cache_aware: the same

`make bench-routers-env` installs the others; what is not there is left out.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from engine.clock import MonotonicClock
from kvferry.bench_report import Row, line, publish, row
from kvferry.index_bench.peers import peer_program
from kvferry.index_bench.processes import first_line, process
from kvferry.redis_server import free_port, redis_server

OUT = Path("bench/out/routers.json")
PUPPETS = 8
RUNS = 5
RUN_S = 1.0
START_S = 30.0
PEERS = ("sglang-router", "vllm-router")
CHARACTERS = (1024, 8000)


class Client:
    """One connection that stays open."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> bytes:
        """What a 200 brings. Raises ConnectionError for anything else."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        reader, writer = self._streams
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if "chunked" in answer:
            said = b""
            while size := int(await reader.readline(), 16):
                said += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        else:
            length = answer.partition("content-length:")[2].partition("\r\n")[0]
            said = await reader.readexactly(int(length))
        if " 200 " not in answer.partition("\r\n")[0]:
            raise ConnectionError(f"{path}: {answer.partition(chr(13))[0]} {said[:200]!r}")
        return said

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


def bodies(characters: int) -> list[bytes]:
    texts = [
        "".join(chr(97 + (at * 7 + number) % 26) for at in range(characters))
        for number in range(64)
    ]
    return [
        json.dumps(
            {"model": "checksum", "prompt": text, "max_tokens": 1, "temperature": 0}
        ).encode()
        for text in texts
    ]


async def load(
    url: str, asked: Sequence[bytes], at_once: int, seconds: float
) -> tuple[float, float]:
    """Requests a second, and the median milliseconds of one."""
    took: list[float] = []
    numbers = itertools.count()
    until = time.perf_counter() + seconds

    async def client() -> None:
        connection = Client(url)
        while (began := time.perf_counter()) < until:
            await connection.post("/v1/completions", asked[next(numbers) % len(asked)])
            took.append((time.perf_counter() - began) * 1e3)
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_once)))
    return len(took) / (time.perf_counter() - began), statistics.median(took)


async def measure(routers: dict[str, str], backend: str, runs: int, seconds: float) -> list[Row]:
    """`routers` are URLs by name, ours first."""
    rows: list[Row] = []
    for characters in CHARACTERS:
        asked = bodies(characters)
        rates: dict[str, list[float]] = {name: [] for name in routers}
        added: dict[str, list[float]] = {name: [] for name in routers}
        for url in routers.values():
            await load(url, asked, 4, seconds)
        for _ in range(runs):
            bare = (await load(backend, asked, 1, seconds))[1]
            for name, url in routers.items():
                added[name].append((await load(url, asked, 1, seconds))[1] - bare)
                rates[name].append((await load(url, asked, 16, seconds))[0])
        for what, found, unit in (("added", added, "ms"), ("16 at a time", rates, "requests/s")):
            ours, *others = found
            label = f"{characters:,} characters, {what}"
            made = [row(label, found[ours], (), name, found[name], unit) for name in others]
            for each in made or [row(label, found[ours], unit=unit)]:
                print(line(each), flush=True)
                rows.append(each)
    return rows


async def until_serving(url: str) -> None:
    """Raises TimeoutError."""
    body = bodies(64)[0]
    async with asyncio.timeout(START_S):
        while True:
            try:
                await Client(url).post("/v1/completions", body)
                return
            except (ConnectionError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)


def peer_command(program: Path, port: int, urls: Sequence[str]) -> list[str]:
    launch = ["launch"] if program.name == "sglang-router" else []
    listens = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    quiet = ["--log-level", "error", "--prometheus-port", str(free_port(29_000))]
    return [str(program), *launch, *listens, *quiet, "--worker-urls", *urls]


async def run(runs: int, seconds: float, say: Callable[[str], None]) -> list[Row]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        log_file = Path(folder) / "redis.log"
        redis = await stack.enter_async_context(redis_server("", log_file, MonotonicClock()))
        start, python = stack.enter_async_context, (sys.executable, "-m")
        puppets = ("kvferry.index_bench.puppets", redis.url, str(PUPPETS))
        await first_line(await start(process(*python, *puppets)))
        port = free_port(28_000)
        ours = ("kvferry", "router", "--model", "checksum", "--redis-url", redis.url)
        doors = ("--grpc-port", str(free_port(28_100)), "--http-port", str(port))
        await start(process(*python, *ours, *doors))
        urls = (await first_line(await start(process(*python, "kvferry.index_bench.backends"))))[
            "urls"
        ]
        routers = {"kvferry": f"http://127.0.0.1:{port}"}
        await until_serving(routers["kvferry"])
        for number, name in enumerate(PEERS):
            program, url = (
                peer_program(name),
                f"http://127.0.0.1:{(at := free_port(28_200 + 10 * number))}",
            )
            if program is None:
                say(f"{name} is left out: `make bench-routers-env` installs it")
                continue
            await start(process(*peer_command(program, at, urls)))
            try:
                await until_serving(url)
                routers[name] = url
            except TimeoutError:
                say(f"{name} is left out: it did not serve within {START_S:.0f} s")
        return await measure(routers, urls[0], runs, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seconds", type=float, default=RUN_S)
    asked = parser.parse_args()
    load_before = os.getloadavg()[0]
    rows = asyncio.run(run(asked.runs, asked.seconds, lambda text: print(text, flush=True)))
    return publish(OUT, rows, Console(width=120), load_before)


if __name__ == "__main__":
    sys.exit(main())
