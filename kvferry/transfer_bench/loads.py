"""What is pushed over a wire by its own calls: messages as many, and as large, as our chunks."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache import host_memory
from kvferry.transfer_bench.case import Case

Memory = NDArray[np.uint8]


class Load(Protocol):
    """One end of it, numbered from 0. A message's memory is its own until another one of as many
    more as may be in flight is asked for.
    """

    @property
    def num_messages(self) -> int: ...

    def leaving(self, i: int) -> Memory | bytes: ...

    def room(self, i: int) -> Memory:
        """Where it is to arrive."""

    def came(self, i: int, message: Memory | bytes) -> None:
        """It lies in its room, or in `bytes` of the wire's own. Raises ValueError when it is not
        what was to come.
        """


class Hot:
    """One payload again and again, into one room; over gloo one for each message in flight."""

    def __init__(self, case: Case) -> None:
        self.num_messages = case.total_bytes // case.message_bytes
        few = np.random.default_rng(1).integers(0, 256, 64 << 10, dtype=np.uint8)
        num_rooms = case.in_flight if case.wire in ("gloo", "nccl") else 1
        self._rooms = [np.resize(few, case.message_bytes) for _ in range(num_rooms)]
        self._raw = self._rooms[0].tobytes() if case.wire == "grpc" else None  # takes no other

    def leaving(self, i: int) -> Memory | bytes:
        return self._raw or self.room(i)

    def room(self, i: int) -> Memory:
        return self._rooms[i % len(self._rooms)]

    def came(self, i: int, message: Memory | bytes) -> None:
        pass


class Cold:
    """Each from memory of its own, and into memory of its own."""

    def __init__(self, case: Case, memory: Memory) -> None:
        self.num_messages = case.total_bytes // case.message_bytes
        self._size = case.message_bytes
        self._memory = memory

    def leaving(self, i: int) -> Memory | bytes:
        return self.room(i)

    def room(self, i: int) -> Memory:
        return self._memory[i * self._size : (i + 1) * self._size]

    def came(self, i: int, message: Memory | bytes) -> None:
        if isinstance(message, bytes):
            self.room(i).data[:] = message


def cold_memory(case: Case) -> Memory:
    """For all bytes of a case, every page looked at; to be used again and again."""
    memory = host_memory.buffer(case.total_bytes)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, dtype=np.uint8)
    return memory
