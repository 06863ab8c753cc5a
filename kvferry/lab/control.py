"""The word between a running lab and the commands about it: a line of JSON each way on a socket."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvferry.errors import CommandError, NoCluster
from kvferry.lab.lab import ADVICE, Lab, is_held

ANSWER_TIMEOUT_S = 15.0
MAX_PATH_BYTES = 100  # what a socket's address holds on every system


class Control:
    """The running lab's side."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.asked_to_stop = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._answer(await reader.readline())
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            return {"result": await self._do(request.pop("do"), request)}
        except CommandError as error:
            return {"error": str(error)}
        except Exception as error:  # the other process is told; the lab goes on
            return {"error": f"the lab cannot do that: {error!r}"}

    async def _do(self, what: str, given: dict[str, Any]) -> Any:
        match what:
            case "cut":
                await self._lab.cut(**given)
            case "heal":
                await self._lab.heal(**given)
            case "lose":
                await self._lab.lose(**given)
            case "address":
                return await self._lab.address(**given)
            case "report":
                hosts = {node: self._lab.host(node) for node in self._lab.topology.nodes}
                links = [asdict(link) for link in await self._lab.report()]
                return {"kind": self._lab.kind, "hosts": hosts, "links": links}
            case "stop":
                self.asked_to_stop.set()
            case _:
                raise CommandError(f"a lab does not know how to {what}")
        return None


@asynccontextmanager
async def controlled(lab: Lab, folder: Path) -> AsyncIterator[Control]:
    """Take commands for as long as the block runs. Raises CommandError."""
    path = folder / "control"
    if len(bytes(path)) > MAX_PATH_BYTES:
        raise CommandError(f"{path} is too long for a socket: choose a shorter --state-dir")
    path.unlink(missing_ok=True)
    control = Control(lab)
    server = await asyncio.start_unix_server(control.serve, path)
    try:
        yield control
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def ask(folder: Path, what: str, **given: Any) -> Any:
    """Have the running lab do something. Raises CommandError with its reason when it cannot."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(folder / "control")
            with contextlib.closing(writer):
                writer.write(json.dumps({"do": what, **given}).encode() + b"\n")
                line = await reader.readline()
    except TimeoutError:
        raise CommandError("the lab does not answer") from None
    except OSError:
        if is_held(folder):
            raise NoCluster("the lab is still starting: try again in a moment") from None
        raise NoCluster(f"no lab is running: {ADVICE}") from None
    if not line:
        raise NoCluster("the lab has just ended")
    answer = json.loads(line)
    if "error" in answer:
        raise CommandError(answer["error"])
    return answer["result"]
