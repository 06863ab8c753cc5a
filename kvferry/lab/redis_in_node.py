"""A Redis inside a node of a lab, for clusters whose parts all live in nodes."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvferry.die_with_parent import wrap
from kvferry.lab.lab import Lab
from kvferry.redis_server import find_server, free_port
from kvferry.settings import child_environment

PREFERRED_PORT = 16_380


@asynccontextmanager
async def redis_in(lab: Lab, node: str, log_file: Path) -> AsyncIterator[str]:
    """Its URL, as nodes reach it; it may still be starting. Raises PartFailed without a server."""
    program, _ = find_server()
    password, host, port = secrets.token_hex(16), lab.host(node), free_port(PREFERRED_PORT)
    config = f'bind {host}\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\n'
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *wrap(lab.command(node, [str(program), "-"]), os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=child_environment(),
            start_new_session=True,
        )
    try:
        assert process.stdin is not None
        process.stdin.write(config.encode())
        await process.stdin.drain()
        process.stdin.close()
        yield f"redis://:{password}@{host}:{port}/0"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
