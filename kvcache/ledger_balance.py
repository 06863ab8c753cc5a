"""What a page of a ledger brings forward to the next one."""

import numpy as np
from numpy.typing import NDArray

from kvcache.ledger_row import ROW, Account, Book, Reason, Rows

_LAST = np.array(  # a transfer in one of these has ended, and nothing of it moves any more
    [Account.RELEASED, Account.DRAINED, Account.COMMITTED, Account.ADOPTED, Account.FREED], "u1"
)


def brought_forward(rows: Rows) -> Rows:
    """The balance of the pool after a page, and the rows of its transfers that are still open."""
    balance = _balance(rows[rows["book"] == Book.BLOCKS])
    return np.concatenate([balance, _promised(rows[rows["book"] == Book.PROMISES]), _open(rows)])


def _promised(rows: Rows) -> Rows:
    """One row for what is still promised."""
    signs = np.where(rows["target"] == Account.PROMISED, 1, -1)
    count = int((signs * rows["count"].astype(np.int64)).sum())
    if count <= 0:
        return np.zeros(0, ROW)
    made = rows[-1:].copy()
    made["source"], made["target"] = Account.OUTSIDE, Account.PROMISED
    made["reason"], made["count"] = Reason.FORWARD, count
    return made


def _open(rows: Rows) -> Rows:
    """Rows of transfers without an end, as they were written. Who lends never hears of the end."""
    rows = rows[~np.isin(rows["book"], (Book.BLOCKS, Book.PROMISES))]
    rows = rows[~np.isin(rows["reason"], (Reason.LENT, Reason.PINNED, Reason.UNPINNED))]
    keys = _keys(rows)
    ends = (rows["book"] == Book.TRANSFERS) & np.isin(rows["target"], _LAST)
    return rows[~np.isin(keys, keys[ends])]


def _keys(rows: Rows) -> NDArray[np.intp]:
    """A number for each row's transfer. What is fetched for one differs in its epoch alone."""
    names = ["transfer_hi", "transfer_lo", "decode_epoch", "attempt"]
    packed = np.empty(len(rows), dtype=[(name, ROW[name]) for name in names])
    for name in names:
        packed[name] = rows[name]
    _, identity = np.unique(packed, return_inverse=True)
    return identity.reshape(-1)


def _balance(moves: Rows) -> Rows:
    """One row of FORWARD for each run of blocks in the same account with as many owners."""
    moves = moves[~np.isin(moves["reason"], (Reason.COUNTED, Reason.ROTTEN))]
    if not len(moves):
        return np.zeros(0, ROW)
    size = int((moves["first"].astype(np.int64) + moves["count"]).max())
    accounts = np.zeros(size, dtype=np.int64)
    owners = np.zeros(size, dtype=np.int64)
    counts = moves["count"].astype(np.int64)
    ends = np.cumsum(counts)
    places = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    blocks = places + np.repeat(moves["first"].astype(np.int64), counts)
    accounts[blocks] = np.repeat(moves["target"], counts)  # of several the last one stays
    np.add.at(owners, blocks, np.repeat(_changes(moves), counts))
    edges = np.flatnonzero(np.diff(accounts) | np.diff(owners)) + 1
    starts = np.concatenate([[0], edges])
    rows = np.zeros(len(starts), ROW)
    rows["book"], rows["reason"] = Book.BLOCKS, Reason.FORWARD
    rows["source"], rows["target"] = Account.OUTSIDE, accounts[starts]
    rows["first"], rows["count"] = starts, np.diff(np.concatenate([starts, [size]]))
    rows["layer"], rows["detail"] = -1, owners[starts]
    rows["seq"] = moves["seq"][-1]
    return rows


def _changes(moves: Rows) -> NDArray[np.int64]:
    """By how much each row changes the number of owners of its blocks."""
    change = np.zeros(len(moves), dtype=np.int64)
    reason = moves["reason"]
    more = (Reason.TAKEN, Reason.REVIVED, Reason.SHARED, Reason.FORKED)
    less = (Reason.LET_GO, Reason.RELEASED, Reason.KEPT)
    change[np.isin(reason, more)] = 1
    change[np.isin(reason, less)] = -1
    forward = reason == Reason.FORWARD
    change[forward] = moves["detail"][forward]
    return change
