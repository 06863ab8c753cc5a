"""A Redis inside a node of a lab, for clusters whose parts all live in nodes."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvferry.lab.lab import Lab
from kvferry.redis_server import end_server, find_server, free_port, spawn_server

PREFERRED_PORT = 16_380


@asynccontextmanager
async def redis_in(lab: Lab, node: str, log_file: Path) -> AsyncIterator[str]:
    """Its URL, as nodes reach it; it may still be starting. Raises PartFailed without a server."""
    program, _ = find_server()
    password, host, port = secrets.token_hex(16), lab.host(node), free_port(PREFERRED_PORT)
    command = lab.command(node, [str(program), "-"])
    process = await spawn_server(command, host, port, password, log_file)
    try:
        yield f"redis://:{password}@{host}:{port}/0"
    finally:
        await end_server(process)
