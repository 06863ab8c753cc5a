"""The ledger of one process: every row in one order, and always on.

Rows fill a page, then a new one opens with everything that is brought forward: the balance of the
pool, and all rows of transfers that are still open. So the newest pages can be audited without the
older ones, which are dropped beyond `PageConfig.num_kept`.
"""

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from kvcache.ledger_balance import brought_forward
from kvcache.ledger_pages import Page, PageConfig
from kvcache.ledger_row import (
    NO_TRANSFER,
    PACK,
    ROW,
    ROW_BYTES,
    Account,
    Book,
    Extract,
    Origin,
    Reason,
    Rows,
    TransferKey,
    runs,
)

FULL = (errno.ENOSPC, errno.EDQUOT)


class Ledger:
    """Thread-safe. `post` costs about a microsecond and never waits for I/O."""

    def __init__(
        self,
        origin: Origin,
        config: PageConfig | None = None,
        not_kept: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        """`not_kept` hears of a page that lies in memory because its folder takes no more.

        Raises OSError when the folder takes not even the first one, and not because it is full.
        """
        self._not_kept = not_kept
        self.origin = origin
        self._config = config or PageConfig()
        self._lock = threading.Lock()
        self._seq = 0
        self._page = self._opened(0, np.zeros(0, ROW))
        self._older: deque[Page] = deque()

    @property
    def num_rows(self) -> int:
        """Written since the start."""
        return self._seq

    def post(
        self,
        book: Book,
        source: Account,
        target: Account,
        reason: Reason,
        *,
        key: TransferKey = NO_TRANSFER,
        peer: int = 0,
        layer: int = -1,
        num_layers: int = 1,
        head: int = 0,
        num_heads: int = 0,
        first: int = 0,
        count: int = 0,
        detail: int = 0,
        num_bytes: int = 0,
    ) -> None:
        """Write one row; of cells that move alike in `num_layers`, from `layer` on, one of each."""
        with self._lock:
            for each in range(layer, layer + num_layers):
                page = self._page
                if page.used == page.size:
                    page = self._turn()
                self._seq = seq = self._seq + 1
                PACK.pack_into(
                    page.memory,
                    page.used,
                    key.hi,
                    key.lo,
                    key.prefill_epoch,
                    key.decode_epoch,
                    key.attempt,
                    peer,
                    book,
                    source,
                    target,
                    reason,
                    each,
                    head,
                    num_heads,
                    0,
                    first,
                    count,
                    detail,
                    num_bytes,
                    seq,
                )
                page.used += ROW_BYTES

    def post_bindings(
        self, reason: Reason, key: TransferKey, first: int, bound: Sequence[tuple[int, int]]
    ) -> None:
        """One row for each run (first block of the pool, count), as `post` would write them one by
        one: a prompt that lies scattered has as many as blocks.
        """
        rows = np.zeros(len(bound), ROW)
        rows["transfer_hi"], rows["transfer_lo"] = key.hi, key.lo
        rows["prefill_epoch"], rows["decode_epoch"] = key.prefill_epoch, key.decode_epoch
        rows["attempt"], rows["first"], rows["layer"] = key.attempt, first, -1
        rows["book"], rows["reason"] = Book.BINDINGS, reason
        rows["source"] = rows["target"] = Account.OUTSIDE
        rows["detail"], rows["count"] = np.array(bound, np.int64).reshape(-1, 2).T
        with self._lock:
            rows["seq"] = np.arange(self._seq + 1, self._seq + 1 + len(rows))
            while len(rows):
                page = self._page
                if page.used == page.size:
                    page = self._turn()
                now = rows[: (page.size - page.used) // ROW_BYTES]
                page.memory[page.used : page.used + now.nbytes] = now.tobytes()
                page.used += now.nbytes
                self._seq += len(now)
                rows = rows[len(now) :]

    def post_blocks(
        self, source: Account, target: Account, reason: Reason, block_ids: Iterable[int]
    ) -> None:
        """One row for each run of blocks of the pool that move alike."""
        for first, count in runs(block_ids):
            self.post(Book.BLOCKS, source, target, reason, first=first, count=count)

    def extract(self, since: int = 0) -> Extract:
        """Copy what is there; with `since`, only rows with a greater `seq`."""
        with self._lock:
            pages = [*self._older, self._page]
            parts = [pages[0].rows(), *(page.rows(own=True) for page in pages[1:])]
        rows = np.concatenate(parts)
        if since >= pages[0].first_seq:
            rows = rows[rows["seq"] > since]
        return Extract(self.origin, rows, pages[0].first_seq)

    def close(self) -> None:
        """Flush to disk what lies in files; they stay."""
        with self._lock:
            for page in (*self._older, self._page):
                page.flush()

    def _turn(self) -> "Page":
        old = self._page
        old.flush()
        self._older.append(old)
        while len(self._older) >= self._config.num_kept:
            self._older.popleft().discard()
        forward = brought_forward(old.rows())
        page = self._page = self._opened(old.number + 1, forward)
        return page

    def _opened(self, number: int, forward: Rows) -> Page:
        """A page in the folder; in memory when the folder is full, or fails while we serve."""
        place = (number, self._seq + 1, forward)
        try:
            return Page.open(self.origin, self._config, *place)
        except OSError as error:
            if number == 0 and error.errno not in FULL:
                raise
            self._not_kept(error)
            return Page.open(self.origin, replace(self._config, folder=None), *place)
