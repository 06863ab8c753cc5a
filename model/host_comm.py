"""The group of ranks of one host: what they exchange goes through memory that all of them map.

Rank 0 makes the memory, without a name in any file system, and passes on where it is (`address`);
the others map it while rank 0 still holds it. Between steps a rank sleeps; within one it waits a
few microseconds for the others. See `kernels.host_exchange`.
"""

import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.host_exchange import BROKEN, DONE, EVERYBODY, LINE, HostExchange
from model.comm import Ints

SLOT_BYTES = 1 << 20  # what one rank shows in a round; more takes more rounds
NOTHING = torch.empty(0, dtype=torch.uint8)
PATIENCE_US = 500_000  # of one call into C, so that Python's signals are not kept waiting


class GroupBroken(RuntimeError):
    """A rank is gone or silent: nothing can be exchanged in this group any more."""


class HostComm:
    """One rank's end. Not for several threads at once.

    A broken group, or a rank that stays away for `timeout_s`, makes calls raise GroupBroken. For a
    plan a rank waits without end: nobody may have asked for anything.
    """

    queued = False

    def __init__(
        self, exchange: HostExchange, memory: mmap.mmap, rank: int, size: int, timeout_s: float
    ) -> None:
        assert size > 1, "a group of one exchanges nothing"
        self.rank = rank
        self.size = size
        self._exchange = exchange
        self._memory = memory  # mapped as long as this object lives
        self._bytes = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        self._region = self._bytes.data_ptr()
        self._timeout_s = timeout_s
        self._round = 0

    @staticmethod
    def make_memory(size: int) -> tuple[mmap.mmap, int]:
        """New memory for `size` ranks, and the file descriptor that holds it. Raises OSError."""
        descriptor = os.memfd_create("kvferry-ranks")
        num_bytes = memory_bytes(size)
        os.ftruncate(descriptor, num_bytes)
        return mmap.mmap(descriptor, num_bytes), descriptor

    @staticmethod
    def map_memory(pid: int, descriptor: int, size: int) -> mmap.mmap:
        """The memory that process `pid`, still alive, holds by `descriptor`. Raises OSError."""
        with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
            return mmap.mmap(file.fileno(), memory_bytes(size))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        flat = tensor.contiguous().view(-1)
        per_round = SLOT_BYTES // flat.element_size()
        for start in range(0, len(flat), per_round):
            self._sum(flat[start : start + per_round])
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
        return tensor

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        summed = self.all_reduce(tensor)
        return lambda: summed

    def gather_to_0(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        assert tensor.shape[-1] == widths[self.rank]
        dims = tensor.shape[:-1]
        parts = [tensor.new_empty(*dims, width) for width in widths] if self.rank == 0 else None
        own = tensor.contiguous()
        row_bytes = dims.numel() * tensor.element_size()
        for start in range(0, row_bytes * max(widths), SLOT_BYTES):
            self._put(own, start if self.rank else own.nbytes)
            if parts is None:
                continue
            self._await(EVERYBODY)
            for rank, part in enumerate(parts[1:], 1):
                self._copy_from(rank, part, start)
        if parts is not None:
            parts[0] = tensor
        return parts

    def broadcast_ints(self, ints: Ints | None) -> Ints:
        if self.rank == 0:
            assert ints is not None
            framed = np.concatenate(([len(ints)], ints)).astype(np.int64)  # the length comes first
            frame = torch.from_numpy(framed)
            for start in range(0, frame.nbytes, SLOT_BYTES):
                self._put(frame, start)
            return ints
        self._put(NOTHING)
        self._await(0, for_ever=True)
        length = torch.empty(1, dtype=torch.int64)
        self._copy_from(0, length, 0)
        frame = torch.empty(1 + int(length), dtype=torch.int64)
        self._copy_from(0, frame, 0)
        for start in range(SLOT_BYTES, frame.nbytes, SLOT_BYTES):
            self._put(NOTHING)
            self._await(0)
            self._copy_from(0, frame, start)
        return frame[1:].numpy()

    def abort(self) -> None:
        """Break the group: every call on any rank, waiting or to come, raises. From any thread."""
        self._exchange.break_up(self._region, self.size)

    def _sum(self, flat: Tensor) -> None:
        self._put(flat)
        if flat.dtype == torch.float32:
            total, count = flat.data_ptr(), len(flat)
            self._until_done(
                lambda: self._exchange.sum_floats(
                    self._region,
                    self.size,
                    self._round,
                    self._slot(0),
                    SLOT_BYTES,
                    total,
                    count,
                    PATIENCE_US,
                )
            )
            return
        self._await(EVERYBODY)
        parts = [self._shown(rank, flat.nbytes).view(flat.dtype) for rank in range(self.size)]
        torch.add(parts[0], parts[1], out=flat)
        for part in parts[2:]:
            flat += part

    def _put(self, data: Tensor, start: int = 0) -> None:
        """Begin the next round, showing up to a slot's worth of `data` from byte `start` on."""
        self._round = (self._round + 1) % (1 << 32)
        num_bytes = min(data.nbytes - start, SLOT_BYTES)
        source = data.data_ptr() + start
        self._until_done(
            lambda: self._exchange.put(
                self._region,
                self.size,
                self.rank,
                self._round,
                self._slot(self.rank),
                source,
                max(0, num_bytes),
                PATIENCE_US,
            )
        )

    def _await(self, who: int, *, for_ever: bool = False) -> None:
        self._until_done(
            lambda: self._exchange.await_ranks(
                self._region, self.size, who, self._round, PATIENCE_US
            ),
            for_ever=for_ever,
        )

    def _until_done(self, call: Callable[[], int], *, for_ever: bool = False) -> None:
        waited_us = 0
        while (how := call()) != DONE:
            if how == BROKEN:
                raise GroupBroken(f"rank {self.rank}: the group is broken")
            waited_us += PATIENCE_US
            if not for_ever and waited_us >= self._timeout_s * 1e6:
                reason = f"another rank stayed away for {self._timeout_s:g} s"
                raise GroupBroken(f"rank {self.rank}, round {self._round}: {reason}")

    def _slot(self, rank: int) -> int:
        """The address of what `rank` shows in this round."""
        return self._region + self._offset(rank)

    def _offset(self, rank: int) -> int:
        return _slots_at(self.size) + (self._round % 2 * self.size + rank) * SLOT_BYTES

    def _shown(self, rank: int, num_bytes: int) -> Tensor:
        offset = self._offset(rank)
        return self._bytes[offset : offset + num_bytes]

    def _copy_from(self, rank: int, whole: Tensor, start: int) -> None:
        """What `rank` shows in this round, into `whole` from byte `start` on."""
        part_B = whole.view(-1).view(torch.uint8)[start : start + SLOT_BYTES]
        part_B.copy_(self._shown(rank, len(part_B)))


def memory_bytes(size: int) -> int:
    return _slots_at(size) + 2 * size * SLOT_BYTES


def _slots_at(size: int) -> int:
    return LINE * (1 + size)
