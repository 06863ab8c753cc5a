"""A row of a ledger: what moved, from which account to which, and why.

Double entry: a row takes something out of one account and puts it into another, so that what there
is can be added up at any time and must equal what there was. Rows are written where things move,
by whoever moves them, in one order per process; only `kvferry.audit` reads them, and it knows
nothing but the rows. Nothing here is ever used to decide anything.

Blocks of a pool, on rank 0. `n` owners; SHARED, FORKED and LET_GO change only their number:

    OUTSIDE --OPENED--> FREE --TAKEN--> IN_USE(n) --RELEASED--> FREE
                          ^               |   ^ SHARED, FORKED: n+1, LET_GO: n-1
                          |              KEPT REVIVED
                          +--EVICTED--- CACHED     (FLUSHED and DISOWNED, too)

ROTTEN says of a block that it stays where it is, and is not what it was when it was named.

Promises are numbers of blocks, from PROMISED to TAKEN_UP.

Bindings, on every rank: which block of the pool a transfer reads (prefill) or writes (decode). They
end with the transfer; until then the block must stay IN_USE.

Cells of a transfer, (layer, block, head) each, with the rank at the other end:

    prefill   OUTSIDE --ORDERED--> OWED --SENT--> SENT --ACKED--> ACKED --COMMITTED--> COMMITTED
                                    |              ^ NACKED, RESENT: once more
                                    +--RESIDENT--> RESIDENT: decode has them already
    decode    OUTSIDE --ORDERED--> EXPECTED --ARRIVED--> STAGED --VERIFIED--> WRITTEN
                                       ^ LOST: asked for  | |
                                       +-----DAMAGED------+ +--GIVEN_UP--> DROPPED
              OUTSIDE --DUPLICATE, BAD, STRAY, LATE--> DROPPED: came, but was not taken

Jobs, on prefill: a gather that reads blocks, from GATHERING to GATHERED. On decode a cell is in
STAGED for as long as a thread may still write it.

Transfers, on each rank of each side:

    prefill   OUTSIDE --ORDERED--> OPEN --FINISHED--> SEALED --COMPLETED--> RELEASED
              OPEN, SEALED --why--> ABORTING --FENCED--> DRAINED
    decode    OUTSIDE --ORDERED--> RESERVED --WHOLE--> WHOLE --COMPLETED--> COMMITTED --> ADOPTED
              RESERVED, WHOLE --why--> ABORTING --FENCED--> FREED

CONFIRMED, on rank 0: another rank of the group says that it has come to its end of the transfer,
so that no thread of that rank reads or writes for it. Only then may rank 0 let the blocks go.

Loans: cells that were handed out by a call of their own, LENT there and BORROWED here once they are
verified. They are copies, and change no account. Blocks that are asked for by name must stay IN_USE
at their holder from PINNED to UNPINNED.

Fetches, blocks of a prompt that a prefill worker takes from a holder by name, have a key of the
prefill worker's own, with no decode epoch. Their cells go the way of cells at decode, into blocks
that are bound like decode's, and each rank says with its end how many blocks have come whole, from
the first on. Rank 0 says what of them is KEPT, and only that may go from IN_USE to CACHED:

    fetch     OUTSIDE --ORDERED--> RESERVED --COMPLETED--> COMMITTED --ADOPTED--> ADOPTED
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Book(IntEnum):
    BLOCKS = 1  # where each block of the pool is
    BINDINGS = 2  # which block of the pool a transfer reads or writes
    CELLS = 3  # where each cell of a transfer is, as this end sees it
    JOBS = 4  # threads that read blocks
    TRANSFERS = 5  # how far a transfer is, at this end
    PROMISES = 6  # how many blocks of the pool are spoken for, without saying which
    LOANS = 7  # which cells came by a call of their own


class Account(IntEnum):
    OUTSIDE = 0
    # blocks
    FREE = 1
    CACHED = 2
    IN_USE = 3
    PROMISED = 4
    # cells at prefill
    OWED = 10
    RESIDENT = 11
    SENT = 12
    ACKED = 13
    # cells at decode
    EXPECTED = 20
    STAGED = 21
    WRITTEN = 22
    DROPPED = 23
    # jobs
    READING = 30
    # transfers at prefill
    OPEN = 40
    SEALED = 41
    RELEASED = 42
    DRAINED = 43
    # transfers at decode
    RESERVED = 50
    WHOLE = 51
    COMMITTED = 52  # and cells at prefill
    ADOPTED = 53
    FREED = 54
    # transfers at either
    ABORTING = 60


class Reason(IntEnum):
    # blocks
    OPENED = 1
    TAKEN = 2
    REVIVED = 3
    SHARED = 4
    FORKED = 5
    LET_GO = 6
    RELEASED = 7
    KEPT = 8
    EVICTED = 9
    FLUSHED = 10
    COUNTED = 11  # what the pool itself says it has in an account, for comparison
    FORWARD = 12  # the balance at the head of a page
    PROMISED = 13
    TAKEN_UP = 14  # or given up: the promise is over
    ROTTEN = 15  # its cells are not those that its digests were made of
    DISOWNED = 16  # it hangs under such a block, or is one
    # bindings
    READ = 20
    WRITE = 21
    # cells
    ORDERED = 30
    RESIDENT = 31
    SENT = 32
    RESENT = 33
    ACKED = 34
    NACKED = 35
    COMMITTED = 37
    ARRIVED = 40
    VERIFIED = 41
    DAMAGED = 42
    LOST = 43
    GIVEN_UP = 44
    DUPLICATE = 45
    BAD = 46
    STRAY = 47
    LATE = 48
    # jobs
    GATHERING = 50
    GATHERED = 51
    # transfers
    FINISHED = 60
    WHOLE = 61
    COMPLETED = 62
    FENCED = 63
    ADOPTED = 64
    EXPIRED = 65
    UNAVAILABLE = 66
    DATA_LOSS = 67
    FAILED_PRECONDITION = 68
    DEADLINE_EXCEEDED = 69
    CANCELLED = 70
    INTERNAL = 71
    CONFIRMED = 72
    # loans
    LENT = 80
    BORROWED = 81
    PINNED = 82  # a block that is lent from, by name
    UNPINNED = 83


FIELDS = [
    ("transfer_hi", "<u8"),
    ("transfer_lo", "<u8"),
    ("prefill_epoch", "<u4"),
    ("decode_epoch", "<u4"),
    ("attempt", "<u2"),
    ("peer", "<u2"),  # the rank at the other end; of CONFIRMED, in the own group
    ("book", "u1"),
    ("source", "u1"),
    ("target", "u1"),
    ("reason", "u1"),
    ("layer", "<i2"),  # in rows of ORDERED: how many
    ("head", "<u2"),  # the first of a run of heads
    ("num_heads", "<u2"),
    ("spare", "<u2"),
    ("first", "<u4"),  # block of the prompt; in BLOCKS, of the pool
    ("count", "<u4"),  # of blocks that follow each other
    # chunk; in BINDINGS, and of PINNED, the block of the pool; in FORWARD the owners; of BORROWED
    # the lender's life
    ("detail", "<u4"),
    ("num_bytes", "<u4"),  # of a chunk; in rows of ORDERED: of one block and head, all layers
    ("seq", "<u8"),  # from 1; written last, so that a torn row does not count
]
ROW = np.dtype(FIELDS)
PACK = struct.Struct("<QQIIHHBBBBhHHHIIIIQ")
ROW_BYTES = PACK.size
assert ROW.itemsize == ROW_BYTES == 64

Rows = NDArray[np.void]  # of dtype ROW


@dataclass(frozen=True, slots=True)
class TransferKey:
    """A shipment's key as rows carry it."""

    hi: int
    lo: int
    attempt: int
    prefill_epoch: int
    decode_epoch: int

    @classmethod
    def of(
        cls, transfer_id: bytes, attempt: int, prefill_epoch: int, decode_epoch: int
    ) -> "TransferKey":
        padded = transfer_id[:16].rjust(16, b"\0")
        hi, lo = int.from_bytes(padded[:8], "big"), int.from_bytes(padded[8:], "big")
        epochs = (prefill_epoch & 0xFFFF_FFFF, decode_epoch & 0xFFFF_FFFF)
        return cls(hi, lo, attempt & 0xFFFF, *epochs)

    @property
    def is_fetch(self) -> bool:
        """No decode worker has a part in it; its epochs count from 1."""
        return self.decode_epoch == 0

    def __str__(self) -> str:
        return f"{self.hi:016x}{self.lo:016x}/{self.attempt}"


NO_TRANSFER = TransferKey(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose ledger it is."""

    worker: str
    instance: str
    epoch: int
    role: str  # "prefill" or "decode"
    rank: int
    tp: int

    def __str__(self) -> str:
        return f"{self.worker} rank {self.rank} (epoch {self.epoch})"


@dataclass(frozen=True, slots=True)
class Extract:
    """What one process has written, as far as it is still there.

    Rows of a `seq` below `first_seq` are brought forward from pages that are gone.
    """

    origin: Origin
    rows: Rows
    first_seq: int = 1
    common_seq: int = 1 << 63  # what ended with a row up to it had ended before any other extract

    @property
    def last_seq(self) -> int:
        return int(self.rows["seq"][-1]) if len(self.rows) else 0


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs (first, count) of numbers that follow each other, all upwards or all downwards."""
    first = last = count = step = 0
    for number in numbers:
        if count and number - last in (1, -1) and (count == 1 or number - last == step):
            step = number - last
            count += 1
        else:
            if count:
                yield min(first, last), count
            first, count, step = number, 1, 0
        last = number
    if count:
        yield min(first, last), count
