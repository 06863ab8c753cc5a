"""How the two ends of a pair find each other on a socket of their own, and nobody else does.

    decode     listens, and says where over the control stream: Meet, with a ticket made for this
               one call
    prefill    connects and shows the ticket
    decode     turns away whoever has another one or none, answers the right one with the proof,
               and stops listening

Each step has the deadline of the whole; a stranger who connects and says nothing delays nobody.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket

from protos.transfer_pb2 import Frame, Meet
from transport.link import Link, LinkClosed

TICKET_BYTES = 32


async def await_caller(control: Link, listener: socket.socket, timeout_s: float) -> socket.socket:
    """The decode end: says where `listener` is, and returns the socket of who was asked there.

    Closes `listener`. Raises LinkClosed when nobody with the ticket comes in time.
    """
    meet = Meet(
        address=_address_of(listener),
        ticket=secrets.token_bytes(TICKET_BYTES),
        proof=secrets.token_bytes(TICKET_BYTES),
    )
    listener.setblocking(False)
    door = _Door(listener, meet)
    try:
        async with asyncio.timeout(timeout_s):
            await control.send(Frame(meet=meet))
            return await door.caller()
    except (TimeoutError, OSError) as error:
        reason = f"nobody came to {meet.address} within {timeout_s:g} s"
        await control.close(reason)
        raise LinkClosed(reason) from error
    finally:
        await door.close()


async def call(control: Link, timeout_s: float) -> socket.socket:
    """The prefill end: goes where the other end says it listens. Raises LinkClosed."""
    sock: socket.socket | None = None
    reason = "was not told where to meet"
    try:
        async with asyncio.timeout(timeout_s):
            frame, _ = await control.recv()
            if not frame.HasField("meet"):
                raise LinkClosed(reason)
            reason = f"nobody we know is at {frame.meet.address}"
            sock = await _connect(frame.meet.address)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, frame.meet.ticket)
            proof = await _read_exactly(sock, TICKET_BYTES)
            if not hmac.compare_digest(proof, frame.meet.proof):
                raise LinkClosed(reason)
            return sock
    except BaseException as error:
        if sock is not None:
            sock.close()
        await control.close(reason)
        if isinstance(error, TimeoutError | OSError | ValueError):
            raise LinkClosed(f"{reason}: {error}") from error
        raise


class _Door:
    """A listener that lets in one caller, the one with the ticket."""

    def __init__(self, listener: socket.socket, meet: Meet) -> None:
        self._listener = listener
        self._meet = meet
        self._found: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def caller(self) -> socket.socket:
        self._spawn(asyncio.create_task(self._listen()))
        return await self._found

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                sock, _ = await loop.sock_accept(self._listener)
                self._spawn(asyncio.create_task(self._look_at(sock)))
        except OSError as error:
            if not self._found.done():
                self._found.set_exception(error)

    async def _look_at(self, sock: socket.socket) -> None:
        kept = False
        try:
            with contextlib.suppress(OSError):
                ticket = await _read_exactly(sock, TICKET_BYTES)
                if hmac.compare_digest(ticket, self._meet.ticket) and not self._found.done():
                    await asyncio.get_running_loop().sock_sendall(sock, self._meet.proof)
                    if not self._found.done():
                        self._found.set_result(sock)
                        kept = True
        finally:
            if not kept:
                sock.close()

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def listen_tcp(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=4)


def listen_unix() -> socket.socket:
    """A name without a file: it is gone with the socket, whatever becomes of the process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0kvferry-" + secrets.token_hex(16))
    listener.listen(4)
    return listener


def _address_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return "unix:" + bytes(name[1:]).decode()
    return f"{name[0]}:{name[1]}"


async def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if host == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = "\0" + port
    else:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        target = (host, int(port))
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), b""
    while len(parts) < num_bytes:
        part = await loop.sock_recv(sock, num_bytes - len(parts))
        if not part:
            raise ConnectionError("the other end closed the socket")
        parts += part
    return parts
