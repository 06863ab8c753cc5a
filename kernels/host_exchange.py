"""Ranks of one host show one another what they computed, without a system call when all are there.

    region     one line for the group, one seat a rank, then two slots a rank; all in one memory
               that every rank maps
    round      counts up; every rank takes part in each, in the same order
    put        this rank's bytes go into its slot, and it has come to the round
    await      until the others have come, too

The reference is `model.comm.GroupComm`: the same calls over a torch process group.
"""

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

from kernels.compiled import loaded

SOURCE = Path(__file__).with_name("host_exchange.c")
LINE = 64  # bytes: what one core writes lies on a line of its own
EVERYBODY = -1
DONE, LATE, BROKEN = range(3)


class HostExchange(NamedTuple):
    """The compiled functions; see host_exchange.c. Those that return an int return how it went."""

    library: ctypes.CDLL

    def put(
        self, region: int, size: int, rank: int, number: int, slot: int, data: int, num_bytes: int,
        timeout_us: int,
    ) -> int:  # fmt: skip
        result: int = self.library.put(
            region, size, rank, number, slot, data, num_bytes, timeout_us
        )
        return result

    def sum_floats(
        self, region: int, size: int, number: int, slots: int, slot_bytes: int, total: int,
        count: int, timeout_us: int,
    ) -> int:  # fmt: skip
        result: int = self.library.sum_floats(
            region, size, number, slots, slot_bytes, total, count, timeout_us
        )
        return result

    def await_ranks(self, region: int, size: int, who: int, number: int, timeout_us: int) -> int:
        result: int = self.library.await_ranks(region, size, who, number, timeout_us)
        return result

    def break_up(self, region: int, size: int) -> None:
        self.library.break_up(region, size)


@functools.cache
def load() -> HostExchange | None:
    """The compiled functions, or None where they cannot be had: no Linux, or no compiler."""
    address, count, number, rank = (
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_int,
    )  # fmt: skip
    return loaded(
        SOURCE,
        signatures={
            "put": (rank, [address, rank, rank, number, address, address, count, count]),
            "sum_floats": (rank, [address, rank, number, address, count, address, count, count]),
            "await_ranks": (rank, [address, rank, rank, number, count]),
            "break_up": (None, [address, rank]),
        },
        make=HostExchange,
        otherwise="ranks exchange what they compute over gloo, slower",
        needs_linux=True,
    )
