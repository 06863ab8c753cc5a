"""One process's ledger, replayed: its pool, and its end of every transfer."""

from typing import Any

from kvcache.ledger_row import Account, Book, Extract, Reason, TransferKey
from kvferry.audit.blocks import BlockBook
from kvferry.audit.ends import End, Loan
from kvferry.audit.entries import misentered
from kvferry.audit.report import Broken, Line, Rule


class Process:
    def __init__(self, extract: Extract) -> None:
        self.origin = extract.origin
        self.complete = extract.first_seq == 1
        self.common_seq = extract.common_seq
        self.broken: list[Broken] = []
        self.ends: dict[TransferKey, End] = {}
        self.lent: dict[TransferKey, list[Loan]] = {}
        self.blocks = BlockBook(self._say)
        self._seq = 0
        self._num_rows = len(extract.rows)
        self._replay(extract)

    def line(self) -> Line:
        counts = self.blocks.counts()
        fetches = [end for end in self.ends.values() if end.key.is_fetch]
        ends = [end for end in self.ends.values() if not end.key.is_fetch]
        done = (Account.RELEASED, Account.COMMITTED, Account.ADOPTED)
        completed = sum(end.state in done for end in ends)
        ended = sum(end.ended for end in ends)
        return Line(
            self.origin,
            num_rows=self._num_rows,
            num_blocks=self.blocks.num_blocks,
            blocks_in_use=counts[Account.IN_USE],
            transfers=len(ends),
            completed=completed,
            failed=ended - completed,
            still_open=len(ends) - ended,
            fetches=len(fetches),
            cells=sum(end.num_cells for end in [*ends, *fetches]),
            num_bytes=sum(end.sent_bytes + end.written_bytes for end in [*ends, *fetches]),
            repaired=sum(len(p.nacked | p.asked) for e in ends for p in e.pairs.values()),
            dropped=sum(end.dropped for end in ends),
            rotten=self.blocks.num_rotten,
        )

    def at_rest(self) -> None:
        """Nothing may be under way, and nobody may own a block."""
        self._seq = 0
        for key, end in self.ends.items():
            if not end.ended:
                what = f"it is {Account(end.state).name}"
                self._say(Rule.OPEN_AT_REST, what, transfer=key)
        in_use = self.blocks.counts()[Account.IN_USE]
        if in_use:
            self._say(Rule.HELD_AT_REST, f"{in_use} blocks are in use")
        if self.blocks.num_promised:
            self._say(Rule.HELD_AT_REST, f"{self.blocks.num_promised} blocks are promised")

    def _say(self, rule: Rule, what: str, **where: Any) -> None:
        self.broken.append(Broken(rule, self.origin, self._seq, what, **where))

    def _replay(self, extract: Extract) -> None:
        expected = extract.first_seq
        for row in extract.rows.tolist():
            self._seq = seq = row[18]
            if seq >= extract.first_seq:
                if seq != expected:
                    self._say(Rule.ROWS_MISSING, f"row {seq} follows row {expected - 1}")
                expected = seq + 1
            self._row(row)

    def _row(self, row: tuple[int, ...]) -> None:
        hi, lo, prefill, decode, attempt, peer, book, source, target, reason = row[:10]
        layer, head, num_heads, _, first, count, detail, num_bytes, seq = row[10:]
        key = TransferKey(hi, lo, attempt, prefill, decode)
        wrong = misentered(book, source, target, reason)
        if wrong:
            self._say(Rule.MISENTERED, wrong, transfer=key if hi or lo else None)
            return
        if book == Book.BLOCKS:
            self.blocks.move(source, target, reason, first, count, detail)
            return
        if book == Book.PROMISES:
            self.blocks.promise(target, count)
            return
        if book == Book.BINDINGS:
            if reason == Reason.KEPT:
                self.blocks.keep(detail, count)
            else:
                self.blocks.bind(key, reason, detail, count)
            return
        if reason in (Reason.PINNED, Reason.UNPINNED):
            self.blocks.pin(reason, detail, count)
            return
        if reason == Reason.LENT:
            loan = Loan(layer, first, count, head, num_heads, peer)
            self.lent.setdefault(key, []).append(loan)
            return
        end = self.ends.get(key)
        if end is None:
            if reason in (Reason.LATE, Reason.ADOPTED, Reason.CONFIRMED, Reason.BORROWED):
                return  # of a transfer that ended before the first page that is left
            end = self.ends[key] = End(self.origin, key, self._say)
            end.common_seq = self.common_seq
            self._check_epoch(key)
        if book == Book.TRANSFERS:
            if reason == Reason.CONFIRMED:
                end.confirmed[peer] = seq
            else:
                end.move(source, target, seq, count)
            if end.group_ended:
                self.blocks.unbind(key)
            elif end.ended:
                self.blocks.await_ranks(key)
        elif book == Book.LOANS:
            loan = Loan(layer, first, count, head, num_heads, peer, life=detail, seq=seq)
            end.borrowed.append(loan)
        elif book == Book.JOBS:
            end.job(peer, detail, target)
        elif reason == Reason.ORDERED:
            sends = self.origin.role == "prefill" and not key.is_fetch
            if (target == Account.OWED) != sends:
                what = f"{Account(target).name} at {self.origin.role}"
                self._say(Rule.MISENTERED, what, transfer=key)
            shape = (layer, first, count, head, num_heads, num_bytes)
            end.order(peer, shape, detail, target == Account.OWED)
        else:
            end.cells(peer, reason, detail, (layer, first, count, head, num_heads, num_bytes))

    def _check_epoch(self, key: TransferKey) -> None:
        theirs = key.prefill_epoch if self.origin.role == "prefill" else key.decode_epoch
        if theirs != self.origin.epoch & 0xFFFF_FFFF:
            what = f"it is of epoch {theirs}, this is epoch {self.origin.epoch}"
            self._say(Rule.FOREIGN_EPOCH, what, transfer=key)
