"""A torch.distributed group of two: one prefill rank (0) and one decode rank (1), and nobody else.

The members meet in a store of the prefill rank's, which listens where we tell it to, under a name
used once. No global group exists and no other pair takes part, so when one end dies, the other's
calls fail, and that is all. Messages go from rank 0 to rank 1 and arrive in order.

Calls into a group may block. Whoever sends does so on a thread of its own; what is to come is
posted by one thread of the pair; and one waits for both, in order, so that several messages are
under way at once.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
import torch.distributed

from transport.link import LinkClosed, heed
from transport.threads import Threads

c10d: Any = torch.distributed  # whose stubs leave out half of what is used here

PREFILL, DECODE = 0, 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and under which name two members meet."""

    host: str
    port: int
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """From host:port/name. Raises ValueError."""
        address, _, name = text.partition("/")
        host, _, port = address.rpartition(":")
        if not host or not name or not port.isdecimal():
            raise ValueError(f"{text!r} is not host:port/name")
        return cls(host, int(port), name)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.name}"


class PairStore:
    """The store of one prefill rank, in which its pairs meet. Listens on `host` alone."""

    def __init__(self, host: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._store = c10d.TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # by itself torch listens on every interface
        )


class PairGroup:
    """One member, from `join` to `close`."""

    def __init__(self, group: Any, device: torch.device, timeout_s: float) -> None:
        self._group = group  # a backend object, which torch's stubs do not describe
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._posting = Threads(1, "kv-pair-post")
        self._waiting = Threads(1, "kv-pair-wait")
        self._posted: SimpleQueue[tuple[Any, torch.Tensor] | Exception] = SimpleQueue()
        self._num_messages = 0

    @classmethod
    async def join(
        cls, rank: int, meet: Rendezvous, host: str, backend: str, timeout_s: float
    ) -> Self:
        """Wait for the other member, which it dials from or listens to on `host`.

        Raises RuntimeError when it does not come in time.
        """
        group = await _in_own_thread(lambda: _build(rank, meet, host, backend, timeout_s))
        return cls(group, torch.device("cuda" if backend == "nccl" else "cpu"), timeout_s)

    def send(self, payload: memoryview, left: Callable[[Exception | None], None]) -> None:
        """Begin to send, in the order of the calls. Another thread says when the payload has left,
        or why it has not; until then its bytes must not change.
        """
        raw = np.frombuffer(payload, dtype=np.uint8)
        if not raw.flags.writeable:
            raw = raw.copy()  # torch has no tensors that are only read
        group = self._open_group()
        tensor = torch.from_numpy(raw).to(self._device)
        work = group.send([tensor], DECODE, self._next_tag())

        def wait() -> None:
            error = None
            try:
                self._wait(work)
            except Exception as caught:
                error = caught
            left(error)

        self._waiting.call(wait)

    def recv(self, room: memoryview) -> "asyncio.Future[memoryview]":
        """Done when the next payload has come into `room`. Order is the order of the calls."""
        tag, group = self._next_tag(), self._open_group()

        def post() -> None:
            try:
                tensor = torch.from_numpy(np.asarray(room))
                if self._device.type != "cpu":
                    tensor = torch.empty_like(tensor, device=self._device)
                self._posted.put((group.recv([tensor], PREFILL, tag), tensor))
            except Exception as error:
                self._posted.put(error)

        def wait() -> memoryview:
            posted = self._posted.get()
            if isinstance(posted, Exception):
                raise posted
            work, tensor = posted
            self._wait(work)
            if self._device.type != "cpu":
                torch.from_numpy(np.asarray(room)).copy_(tensor)
            return room

        self._posting.call(post)
        done = self._waiting.do(wait)
        done.add_done_callback(heed)
        return done

    def close(self) -> None:
        """Cut the connection; a call under way fails at the latest when its time is up."""
        self._group = None
        self._posting.leave()
        self._waiting.leave()
        self._posted.put(LinkClosed("the pair's group is closed"))  # to who waits for a post

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _open_group(self) -> Any:
        if self._group is None:
            raise LinkClosed("the pair's group is closed")
        return self._group

    def _next_tag(self) -> int:
        self._num_messages += 1
        return self._num_messages


async def _in_own_thread(work: Callable[[], T]) -> T:
    """A pool would let some members wait for others that wait for a thread of the same pool."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="kv-pair-join", daemon=True).start()
    return await done


def _build(rank: int, meet: Rendezvous, host: str, backend: str, timeout_s: float) -> Any:
    """In a thread of its own: it blocks until both members are there."""
    timeout = timedelta(seconds=timeout_s)
    client = c10d.TCPStore(
        meet.host, meet.port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    store = c10d.PrefixStore(meet.name, client)
    if backend == "nccl":
        nccl_options = c10d.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        return c10d.ProcessGroupNCCL(store, rank, 2, nccl_options)
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    return c10d.ProcessGroupGloo(store, rank, 2, options)
