"""Which accounts a row of each reason moves between: one that says otherwise was not posted so."""

from kvcache.ledger_row import Account as A
from kvcache.ledger_row import Book
from kvcache.ledger_row import Reason as R

_ENTRIES: dict[Book, dict[R, tuple[tuple[A, A], ...]]] = {
    Book.BLOCKS: {
        R.OPENED: ((A.OUTSIDE, A.FREE),),
        R.TAKEN: ((A.FREE, A.IN_USE),),
        R.REVIVED: ((A.CACHED, A.IN_USE),),
        R.SHARED: ((A.IN_USE, A.IN_USE),),
        R.FORKED: ((A.IN_USE, A.IN_USE),),
        R.LET_GO: ((A.IN_USE, A.IN_USE),),
        R.RELEASED: ((A.IN_USE, A.FREE),),
        R.KEPT: ((A.IN_USE, A.CACHED),),
        R.EVICTED: ((A.CACHED, A.FREE),),
        R.FLUSHED: ((A.CACHED, A.FREE),),
        R.ROTTEN: ((A.CACHED, A.CACHED), (A.IN_USE, A.IN_USE)),
        R.DISOWNED: ((A.CACHED, A.FREE),),
        R.COUNTED: ((A.FREE, A.FREE), (A.CACHED, A.CACHED), (A.IN_USE, A.IN_USE)),
        R.FORWARD: ((A.OUTSIDE, A.FREE), (A.OUTSIDE, A.CACHED), (A.OUTSIDE, A.IN_USE)),
    },
    Book.PROMISES: {
        R.PROMISED: ((A.OUTSIDE, A.PROMISED),),
        R.TAKEN_UP: ((A.PROMISED, A.OUTSIDE),),
        R.FORWARD: ((A.OUTSIDE, A.PROMISED),),
    },
    Book.BINDINGS: {
        R.READ: ((A.OUTSIDE, A.OUTSIDE),),
        R.WRITE: ((A.OUTSIDE, A.OUTSIDE),),
        R.KEPT: ((A.OUTSIDE, A.OUTSIDE),),
    },
    Book.CELLS: {
        R.ORDERED: ((A.OUTSIDE, A.OWED), (A.OUTSIDE, A.EXPECTED)),
        R.RESIDENT: ((A.OWED, A.RESIDENT),),
        R.SENT: ((A.OWED, A.SENT),),
        R.RESENT: ((A.SENT, A.SENT),),
        R.NACKED: ((A.SENT, A.SENT),),
        R.ACKED: ((A.SENT, A.ACKED),),
        R.COMMITTED: ((A.SENT, A.COMMITTED),),
        R.ARRIVED: ((A.EXPECTED, A.STAGED),),
        R.VERIFIED: ((A.STAGED, A.WRITTEN),),
        R.DAMAGED: ((A.STAGED, A.EXPECTED),),
        R.LOST: ((A.EXPECTED, A.EXPECTED),),
        R.GIVEN_UP: ((A.STAGED, A.DROPPED),),
        R.DUPLICATE: ((A.OUTSIDE, A.DROPPED),),
        R.BAD: ((A.OUTSIDE, A.DROPPED),),
        R.STRAY: ((A.OUTSIDE, A.DROPPED),),
        R.LATE: ((A.OUTSIDE, A.DROPPED),),
    },
    Book.LOANS: {
        R.LENT: ((A.OUTSIDE, A.OUTSIDE),),
        R.BORROWED: ((A.OUTSIDE, A.OUTSIDE),),
        R.PINNED: ((A.OUTSIDE, A.OUTSIDE),),
        R.UNPINNED: ((A.OUTSIDE, A.OUTSIDE),),
    },
    Book.JOBS: {
        R.GATHERING: ((A.OUTSIDE, A.READING),),
        R.GATHERED: ((A.READING, A.OUTSIDE),),
    },
}


def misentered(book: int, source: int, target: int, reason: int) -> str:
    """What is wrong with a row's accounts, if anything is. Those of transfers are its states."""
    if book == Book.TRANSFERS:
        return ""
    try:
        allowed = _ENTRIES[Book(book)][R(reason)]
        if (source, target) in allowed:
            return ""
        return f"{R(reason).name} from {A(source).name} to {A(target).name}"
    except (ValueError, KeyError):
        return f"book {book}, reason {reason}, from {source} to {target}"
