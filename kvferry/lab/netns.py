"""Linux network namespaces by name: doing something inside one, and a TUN device there."""

import ctypes
import fcntl
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

FOLDER = Path("/run/netns")  # where `ip netns` keeps them
CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000  # whole IP packets, and nothing in front of them

Result = TypeVar("Result")


def in_namespace(name: str, work: Callable[[], Result]) -> Result:
    """Do `work` in a thread that lives in the namespace: sockets opened there stay there.

    Raises what `work` raises, and OSError when there is no such namespace or no right to enter.
    """
    results: list[Result] = []
    failures: list[BaseException] = []

    def enter_and_work() -> None:
        try:
            _enter(name)
            results.append(work())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=enter_and_work, name=f"in {name}")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def open_tun(name: str) -> int:
    """A new TUN device in the current namespace, gone once the returned descriptor is closed."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(tun)
        raise
    return tun


def _enter(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(FOLDER / name, os.O_RDONLY)
    try:
        if libc.setns(namespace, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the network namespace {name}")
    finally:
        os.close(namespace)
