"""The two processes of a measurement, and what they measure together."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvferry.die_with_parent import wrap
from kvferry.errors import CommandError
from kvferry.transfer_bench.case import Case

ANSWER_S = 180.0
CHILD = (sys.executable, "-P", "-m", "kvferry.transfer_bench.child")


class Pair:
    """A prefill and a decode process. `seconds` and `limit_seconds` are one repetition each."""

    def __init__(self, prefill: "ChildHandle", decode: "ChildHandle") -> None:
        self._prefill = prefill
        self._decode = decode
        self._next = 0

    @contextlib.asynccontextmanager
    async def running(self, case: Case) -> AsyncIterator[None]:
        fields = case.to_json()
        try:
            addresses = await self._decode.ask("start decode", case=fields)
            await self._prefill.ask("start prefill", case=fields, addresses=addresses)
            yield
        finally:
            await self._prefill.ask("close")
            await self._decode.ask("close")

    async def seconds(self, case: Case) -> float:
        """One repetition of a case that is `running`."""
        first, self._next = self._next, self._next + case.concurrency
        await self._decode.ask("expect", first=first)
        took = float(await self._prefill.ask("ship", first=first))
        await self._decode.ask("settle")
        return took

    async def sealing_seconds(self) -> float:
        """What prefill took to digest blocks before the last repetition, as it sealed them."""
        return float(await self._prefill.ask("sealing seconds"))

    async def cpu_seconds(self) -> tuple[float, float]:
        """What prefill and decode have used so far."""
        return await self._prefill.ask("cpu seconds"), await self._decode.ask("cpu seconds")

    async def limit_seconds(self, case: Case, cold: bool = False) -> float:
        order: dict[str, Any] = {"case": case.to_json(), "cold": cold}
        address = await self._decode.ask("serve limit", **order)
        took = float(await self._prefill.ask("push limit", **order, address=address))
        await self._decode.ask("end limit")
        return took

    async def alone_seconds(self) -> float:
        """One repetition of the running case by the cells' own calls alone."""
        address = await self._decode.ask("take alone")
        took = float(await self._prefill.ask("push alone", address=address))
        await self._decode.ask("end limit")
        return took


class ChildHandle:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, do: str, **order: Any) -> Any:
        """Raises CommandError when it cannot, or has died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S):
            line = await self._process.stdout.readline()
        if not line:
            raise CommandError(f"a process of the benchmark ended while asked to {do}")
        answer = json.loads(line)
        if "error" in answer:
            raise CommandError(f"cannot {do}: {answer['error']}")
        return answer["answer"]


@contextlib.asynccontextmanager
async def processes(
    inside: Callable[[str, Sequence[str]], list[str]] = lambda _, command: list(command),
) -> AsyncIterator[Pair]:
    """Both processes, until the end of the block.

    `inside` turns the command of "prefill" or "decode" into one that runs on a host of its own.
    """
    started: list[asyncio.subprocess.Process] = []
    try:
        for side in ("prefill", "decode"):
            started.append(
                await asyncio.create_subprocess_exec(
                    *wrap(inside(side, CHILD), os.getpid()),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
            )
        yield Pair(*(ChildHandle(process) for process in started))
    finally:
        for process in started:
            if process.stdin is not None:
                process.stdin.close()
        for process in started:
            try:
                async with asyncio.timeout(5):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
