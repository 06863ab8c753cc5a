"""The TCP wire: payloads leave while they are built, and land while they are read.

They ride a socket of the pair, in pieces that are in a cache still when the system copies them
(`transport.pieces`). It crosses hosts. The decode rank listens on its own address for as long as it
takes the prefill rank to come, and lets in nobody else.
"""

import asyncio
import contextlib
import socket
import sys

from protos.transfer_pb2 import Hello
from transport.frame_socket import FrameSocket
from transport.link import Connector, Link, Pouring
from transport.meeting import await_caller, call, listen_tcp
from transport.socket_link import SocketLink

NEAR_US = 200  # there and back: in one rack
MIN_RTT = slice(148, 152)  # of Linux's struct tcp_info, in microseconds


class TcpConnector:
    """Dials like `control` does, and then goes where the other end says it listens."""

    def __init__(self, control: Connector, timeout_s: float = 10.0) -> None:
        self._control = control
        self._timeout_s = timeout_s

    async def connect(self, address: str, hello: Hello) -> Link:
        greeting = Hello()
        greeting.CopyFrom(hello)
        greeting.wire = "tcp"
        control = await self._control.connect(address, greeting)
        sock = await call(control, self._timeout_s)
        return PrefillTcpLink(control, undelayed(sock))


class PrefillTcpLink(SocketLink):
    @property
    def num_bytes_written(self) -> int:
        return self._stream.num_bytes_written

    @property
    def reach(self) -> int:
        return self._stream.reach

    def pour(self, pouring: Pouring) -> "asyncio.Future[None]":
        self._end.check()
        return self._stream.pour(pouring)


class TcpAcceptor:
    """The decode end. `host` is the address at which prefill ranks reach this one."""

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 10.0) -> None:
        self._host = host
        self._timeout_s = timeout_s

    async def accept(self, control: Link) -> Link:
        sock = await await_caller(control, listen_tcp(self._host), self._timeout_s)
        return SocketLink(control, undelayed(sock, unread=True))


def undelayed(sock: socket.socket, unread: bool = False) -> FrameSocket:
    """Acknowledgements are small and must not wait to be joined by others."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    unpace(sock)
    return FrameSocket(sock, unread)


def unpace(sock: socket.socket) -> None:
    """BBR, some systems' choice for connections over the internet, sends no faster than it has of
    late. Payloads are bursts of milliseconds, and between near ends that only delays them. Where
    the system does not allow another choice, it stays.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_RTT.stop)
        near = len(told) == MIN_RTT.stop and int.from_bytes(told[MIN_RTT], sys.byteorder) < NEAR_US
        if near and name.startswith(b"bbr"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
