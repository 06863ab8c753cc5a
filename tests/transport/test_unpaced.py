"""Which connections are kept from being paced."""

import socket
from collections.abc import Iterator

import pytest

from transport.tcp_wire import MIN_RTT, unpace


class Connection:
    """As the system describes one, and what is then asked for."""

    def __init__(self, choice: bytes, round_trip_us: int) -> None:
        self.choice = choice
        self._told = bytearray(232)
        self._told[MIN_RTT] = round_trip_us.to_bytes(4, "little")

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert level == socket.IPPROTO_TCP
        if option == socket.TCP_CONGESTION:
            return self.choice.ljust(16, b"\0")[:size]
        return bytes(self._told[:size])

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        self.choice = value


@pytest.mark.parametrize(
    ("choice", "round_trip_us", "want"),
    [
        (b"bbr", 30, b"cubic"),
        (b"bbr3", 199, b"cubic"),
        (b"bbr", 200, b"bbr"),  # of a link that may be shared, or long
        (b"bbr", 10_000, b"bbr"),
        (b"reno", 30, b"reno"),
        (b"cubic", 30, b"cubic"),
        (b"dctcp", 30, b"dctcp"),
    ],
)
def test_only_bbr_between_near_ends_is_replaced(
    choice: bytes, round_trip_us: int, want: bytes
) -> None:
    connection = Connection(choice, round_trip_us)
    unpace(connection)  # type: ignore[arg-type]
    assert connection.choice == want


def test_where_the_system_allows_no_choice_nothing_is_changed() -> None:
    class Strict(Connection):
        def setsockopt(self, level: int, option: int, value: bytes) -> None:
            raise PermissionError("not allowed")

    connection = Strict(b"bbr", 30)
    unpace(connection)  # type: ignore[arg-type]
    assert connection.choice == b"bbr"


@pytest.fixture
def caller() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()[:2]) as sock,
    ):
        yield sock


def test_a_connection_to_this_machine_is_not_paced(caller: socket.socket) -> None:
    """By the real system, whatever it chooses: where it has BBR, by that."""

    def choice() -> bytes:
        return caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    try:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except OSError:
        before = choice()
        unpace(caller)
        assert choice() == before
        return
    unpace(caller)
    assert choice() == b"cubic"
