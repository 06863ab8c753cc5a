"""How the tensor-parallel ranks of one worker add, gather and share what they computed.

Every rank makes the same calls in the same order. A rank that fails breaks the group: the others'
calls raise instead of waiting for ever.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.launch import sent

Ints = npt.NDArray[np.int64]

FIRST_FRAME = 1024  # int64 of a plan that travel with its length: one round for nearly every step


class Comm(Protocol):
    """One rank's end of its group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def queued(self) -> bool:
        """Whether a sum is queued on the device like any kernel: then a graph may hold it, and it
        goes on beside what this rank computes meanwhile.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place; every rank gets the same bits."""
        ...

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """`all_reduce`, whose result is there once the answer is called, as the next thing or
        later; nobody touches the tensor before that.
        """
        ...

    def gather_to_0(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        """Every rank's tensor in rank order on rank 0, None elsewhere.

        Rank r's tensor ends in a dim of `widths[r]`; the dims before it are equal on all ranks.
        """
        ...

    def broadcast_ints(self, ints: Ints | None) -> Ints:
        """Rank 0's one-dimensional array, on every rank; the others give None."""
        ...

    def abort(self) -> None:
        """A rank is gone: have the others' calls raise. From any thread."""
        ...


class SingleComm:
    """The group of one."""

    rank = 0
    size = 1
    queued = True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    def gather_to_0(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        assert tensor.shape[-1] == widths[0]
        return [tensor]

    def broadcast_ints(self, ints: Ints | None) -> Ints:
        assert ints is not None
        return ints

    def abort(self) -> None:
        pass


class _Meeting:
    """Where the threads of one `ThreadComm` group put what the others are to see."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.tensors: list[Tensor | None] = [None] * size
        self.total: Tensor | None = None
        self.ints: Ints | None = None


class ThreadComm:
    """A group of threads in one process, which meet at a barrier.

    Sums go in rank order, so a result does not depend on which thread came last.
    """

    queued = False

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    @staticmethod
    def group(size: int, timeout_s: float = 120.0) -> list["ThreadComm"]:
        """One end per rank; a rank that waits longer than `timeout_s` breaks the group."""
        meeting = _Meeting(size, timeout_s)
        return [ThreadComm(rank, size, meeting) for rank in range(size)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        meeting = self._meeting
        meeting.tensors[self.rank] = tensor
        meeting.barrier.wait()
        if self.rank == 0:
            total = torch.zeros_like(tensor)
            for part in meeting.tensors:
                assert part is not None
                total += part
            meeting.total = total
        meeting.barrier.wait()
        assert meeting.total is not None
        tensor.copy_(meeting.total)
        meeting.barrier.wait()  # nobody starts the next sum while one still reads this one
        return tensor

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        summed = self.all_reduce(tensor)
        return lambda: summed

    def gather_to_0(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        assert tensor.shape[-1] == widths[self.rank]
        meeting = self._meeting
        meeting.tensors[self.rank] = tensor
        meeting.barrier.wait()
        gathered: list[Tensor] | None = None
        if self.rank == 0:
            gathered = [part for part in meeting.tensors if part is not None]
        meeting.barrier.wait()
        return gathered

    def broadcast_ints(self, ints: Ints | None) -> Ints:
        meeting = self._meeting
        if self.rank == 0:
            meeting.ints = ints
        meeting.barrier.wait()
        assert meeting.ints is not None
        shared = meeting.ints.copy()
        meeting.barrier.wait()
        return shared

    def abort(self) -> None:
        """Break the group: every call, waiting or to come, raises `BrokenBarrierError`."""
        self._meeting.barrier.abort()


class GroupComm:
    """A group of processes over a `torch.distributed` process group object (gloo or NCCL).

    The group need not be the global one. `device` is where tensors live, and, with NCCL, where
    plans travel. A dead peer makes the call raise `RuntimeError`.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, device: torch.device | str = "cpu"
    ) -> None:
        self.rank = process_group.rank()
        self.size = process_group.size()
        self._group = process_group
        self._device = torch.device(device)

    @property
    def queued(self) -> bool:
        return self._device.type == "cuda" and self._group.name() == "nccl"

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.begin_all_reduce(tensor)()

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        work = self._group.allreduce([tensor])

        def summed() -> Tensor:
            work.wait()  # NCCL: for the device's stream, not for this thread
            return tensor

        return summed

    def gather_to_0(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        assert tensor.shape[-1] == widths[self.rank]
        if self.rank != 0:
            self._group.send([tensor.contiguous()], 0, 0).wait()
            return None
        gathered = [tensor]
        receipts = []
        for rank in range(1, self.size):
            part = tensor.new_empty(*tensor.shape[:-1], widths[rank])
            receipts.append(self._group.recv([part], rank, 0))
            gathered.append(part)
        for receipt in receipts:
            receipt.wait()
        return gathered

    def broadcast_ints(self, ints: Ints | None) -> Ints:
        frame = torch.zeros(1 + FIRST_FRAME, dtype=torch.int64)
        if ints is not None:  # rank 0, which reads nothing back: of a card it would wait for it
            frame[0] = len(ints)
            head, rest = ints[:FIRST_FRAME], ints[FIRST_FRAME:]
            frame[1 : 1 + len(head)] = torch.from_numpy(np.ascontiguousarray(head))
            self._broadcast(frame)
            if len(rest):
                self._broadcast(torch.from_numpy(np.ascontiguousarray(rest)))
            return ints
        frame = self._broadcast(frame).cpu()
        length = int(frame[0])
        if length <= FIRST_FRAME:
            return frame[1 : 1 + length].numpy()
        tail = self._broadcast(torch.empty(length - FIRST_FRAME, dtype=torch.int64))
        return torch.cat([frame[1:], tail.cpu()]).numpy()

    def abort(self) -> None:
        if self._device.type == "cuda":
            self._group.abort()  # gloo sees the closed sockets by itself

    def _broadcast(self, tensor: Tensor) -> Tensor:
        tensor = sent(tensor, self._device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(days=1)  # a follower waits for a plan as long as none comes
        self._group.broadcast([tensor], options).wait()
        return tensor
