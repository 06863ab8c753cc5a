"""What gRPC's library says of a connection, in words for whoever asked for something quite else.

A peer's own words pass as they are. The library's speak of sockets and addresses: they belong into
logs, where the caller writes them.
"""

import re

import grpc
import grpc.aio

_LIBRARY = re.compile(
    r"failed to connect|connection (refused|reset|timed out|aborted)|broken pipe|socket closed|"
    r"cancelling all calls|goaway|recvmsg|sendmsg|endpoint closing|keepalive|ping timeout|"
    r"transport closed|stream removed|dns resolution failed|errors resolving|no route to host|"
    r"network is unreachable|ipv[46]:|unix:",
    re.IGNORECASE,
)


def plain_words(details: str) -> str:
    """One clause without an address; `details` where a peer has said them."""
    if _LIBRARY.match(details) is None:
        return details
    said = details.lower()
    if "refused" in said:
        return "nobody answers at its address"
    if "failed to connect" in said or "unreachable" in said or "no route" in said:
        return "it cannot be reached"
    if "dns" in said or "resolving" in said:
        return "its address is not known"
    return "its connection broke"


def why(error: BaseException) -> str:
    """What went wrong with a call, in such words."""
    return plain_words(heard(error))


def heard(error: BaseException) -> str:
    """The same as it was said, for logs."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or type(error).__name__
