"""One transfer at one rank, replayed row by row: its cells, its threads, its states."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcache.ledger_row import Account, Origin, Reason, TransferKey
from kvferry.audit.report import Rule

Say = Callable[..., None]
A, R = Account, Reason

MOVES = {  # what each reason takes cells from, and where they go; None: they stay
    R.RESIDENT: ((A.OWED,), A.RESIDENT),
    R.SENT: ((A.OWED,), A.SENT),
    R.RESENT: ((A.SENT, A.ACKED, A.COMMITTED), None),
    R.NACKED: ((A.SENT,), None),
    R.ACKED: ((A.SENT,), A.ACKED),
    R.ARRIVED: ((A.EXPECTED,), A.STAGED),
    R.VERIFIED: ((A.STAGED,), A.WRITTEN),
    R.DAMAGED: ((A.STAGED,), A.EXPECTED),
    R.GIVEN_UP: ((A.STAGED,), A.DROPPED),
}
REFUSED = {R.DUPLICATE, R.BAD, R.STRAY, R.LATE}
STATES = {
    "prefill": {
        (A.OUTSIDE, A.OPEN),
        (A.OPEN, A.SEALED),
        (A.SEALED, A.RELEASED),
        (A.OPEN, A.ABORTING),
        (A.SEALED, A.ABORTING),
        (A.ABORTING, A.DRAINED),
    },
    "decode": {
        (A.OUTSIDE, A.RESERVED),
        (A.RESERVED, A.WHOLE),
        (A.WHOLE, A.COMMITTED),
        (A.COMMITTED, A.ADOPTED),
        (A.RESERVED, A.ABORTING),
        (A.WHOLE, A.ABORTING),
        (A.ABORTING, A.FREED),
    },
    "fetch": {(A.OUTSIDE, A.RESERVED), (A.RESERVED, A.COMMITTED), (A.COMMITTED, A.ADOPTED)},
}
ENDED = {A.RELEASED, A.DRAINED, A.COMMITTED, A.ADOPTED, A.FREED}
Chunk = tuple[int, int, int, int, int, int]  # layer, first, count, head, heads, bytes


@dataclass(frozen=True, slots=True)
class Loan:
    """Cells that were handed out by a call."""

    layer: int
    first: int
    count: int
    head: int
    num_heads: int
    peer: int  # the rank that asked; of what was borrowed, the rank that lent
    life: int = 0  # of the lender, as rows of ORDERED name it
    seq: int = 0

    def cells(self) -> set[tuple[int, int, int]]:
        """By layer, block and head."""
        heads = range(self.head, self.head + self.num_heads)
        blocks = range(self.first, self.first + self.count)
        return {(self.layer, block, head) for block in blocks for head in heads}


@dataclass(slots=True)
class Pair:
    """What one end has with one rank of the other end."""

    first: int = 0  # block; those before it are resident on decode
    num_blocks: int = 0
    num_layers: int = 0
    block_bytes: int = 0  # of one head, in all layers
    heads: set[int] = field(default_factory=set)
    credited: bool = False
    sent: dict[int, list[Chunk]] = field(default_factory=dict)
    num_sends: Counter[int] = field(default_factory=Counter)
    acked: set[int] = field(default_factory=set)
    nacked: set[int] = field(default_factory=set)
    arrived: dict[int, list[Chunk]] = field(default_factory=dict)
    num_arrivals: Counter[int] = field(default_factory=Counter)
    written: dict[int, list[Chunk]] = field(default_factory=dict)
    resent: dict[int, list[Chunk]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    committed: bool = False


class End:
    """A transfer at `origin`. Cells are kept by (peer, head) as [layer, block] of accounts."""

    def __init__(self, origin: Origin, key: TransferKey, say: Say) -> None:
        self.origin = origin
        self.key = key
        self.state: int = A.OUTSIDE
        self.was_sealed = False
        self.end_seq = 0
        self.common_seq = 1 << 63
        self.peer_life = 0
        self.pairs: dict[int, Pair] = {}
        self.dropped = 0
        self.confirmed: dict[int, int] = {}  # by rank of the own group, the row that says so
        self.borrowed: list[Loan] = []
        self.written_bytes = 0
        self.num_whole = 0  # blocks of a fetch, from the first on, that this rank says are whole
        self.num_kept = 0  # of them, as rank 0 says
        self._states = STATES["fetch" if key.is_fetch else origin.role]
        self._cells: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self._jobs: Counter[tuple[int, int]] = Counter()
        self._say = say

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def group_ended(self) -> bool:
        """Ended on every rank of the group, as far as rank 0 is to know. What is committed at
        decode is the request's, on each rank by itself.
        """
        others = range(1, self.origin.tp) if self.origin.rank == 0 else ()
        committed = self.state in (A.COMMITTED, A.ADOPTED) and not self.key.is_fetch
        return self.ended and (committed or all(rank in self.confirmed for rank in others))

    @property
    def sent_bytes(self) -> int:
        sent = (rows for pair in self.pairs.values() for rows in pair.sent.values())
        return sum(num_bytes for chunk in sent for *_, num_bytes in chunk)

    @property
    def num_cells(self) -> int:
        """Sent, or written."""
        done = (A.SENT, A.ACKED, A.COMMITTED, A.WRITTEN)
        return sum(int(np.isin(cells, done).sum()) for cells in self._cells.values())

    def order(self, peer: int, row: Chunk, life: int, prefill: bool) -> None:
        num_layers, first, count, head, num_heads, block_bytes = row
        pair = self.pairs.setdefault(peer, Pair())
        pair.num_layers, pair.block_bytes = num_layers, block_bytes
        pair.first, pair.num_blocks = first, first + count
        self.peer_life = life
        for each in range(head, head + num_heads):
            for other, theirs in self.pairs.items():
                if each in theirs.heads and (other == peer or not prefill):
                    what = f"head {each} comes from ranks {other} and {peer}"
                    self._say(Rule.HEAD_TWICE, what, transfer=self.key)
            pair.heads.add(each)
            cells = np.full((num_layers, first + count), A.OWED if prefill else A.EXPECTED, "u1")
            cells[:, :first] = A.RESIDENT
            self._cells[peer, each] = cells

    def cells(self, peer: int, reason: int, chunk: int, row: Chunk) -> None:
        """One row of the cell book."""
        pair = self.pairs.get(peer)
        if reason in REFUSED:
            self.dropped += 1
            if pair is not None:
                pair.num_arrivals[chunk] += 1
                if reason == R.BAD:
                    pair.asked.add(chunk)
            return
        if pair is None:
            what = f"{R(reason).name} with rank {peer}, which has no part in it"
            self._say(Rule.PLAN_DIFFERS, what, transfer=self.key)
            return
        if reason == R.LOST:
            pair.asked.add(chunk)
            return
        if reason == R.COMMITTED:
            self._commit(peer, pair)
            return
        if self.ended or (reason == R.ARRIVED and self.state == A.ABORTING):
            rule = Rule.MOVED_AFTER_END if self.ended else Rule.TAKEN_AFTER_FAILURE
            what = f"{R(reason).name} in state {A(self.state).name}"
            self._say(rule, what, transfer=self.key, layer=row[0], block=row[1])
        self._note(pair, reason, chunk, row)
        self._shift(peer, pair, reason, row)

    def job(self, peer: int, chunk: int, target: int) -> None:
        self._jobs[peer, chunk] += 1 if target == A.READING else -1
        if self._jobs[peer, chunk] < 0:
            self._jobs[peer, chunk] = 0
            self._say(Rule.WRONG_ACCOUNT, f"chunk {chunk} was not being read", transfer=self.key)
        if self.ended and target == A.READING:
            what = f"chunk {chunk} is read in state {A(self.state).name}"
            self._say(Rule.MOVED_AFTER_END, what, transfer=self.key)

    def move(self, source: int, target: int, seq: int, count: int = 0) -> None:
        """One row of the transfer book. `count` is of blocks of a fetch."""
        idle = (source, target) == (A.OPEN, A.RELEASED) and not self.pairs  # it owes nobody
        if source != self.state or ((source, target) not in self._states and not idle):
            names = f"from {A(source).name} to {A(target).name} in state {A(self.state).name}"
            self._say(Rule.WRONG_STATE, names, transfer=self.key)
        self.state = target
        self.was_sealed |= target == A.SEALED
        if self.ended and target != A.ADOPTED:
            self.end_seq = seq
            self._check_fence()
        if target == A.WHOLE:
            self._check_all((A.WRITTEN, A.RESIDENT))
            self._check_bytes()
        if target == A.RELEASED:
            self._check_all((A.COMMITTED, A.RESIDENT))
        if self.key.is_fetch and target == A.COMMITTED:
            self.num_whole = count
            self._check_all((A.WRITTEN,), count)
        elif self.key.is_fetch and target == A.ADOPTED:
            self.num_kept = count

    def _note(self, pair: Pair, reason: int, chunk: int, row: Chunk) -> None:
        if reason in (R.SENT, R.RESENT):
            pair.num_sends[chunk] += 1
            rows = pair.sent if reason == R.SENT else pair.resent
            rows.setdefault(chunk, []).append(row)
        elif reason == R.ACKED:
            pair.acked.add(chunk)
        elif reason == R.NACKED:
            pair.nacked.add(chunk)
        elif reason == R.RESIDENT:
            pair.first, pair.credited = row[2], True
        elif reason == R.ARRIVED:
            pair.num_arrivals[chunk] += 1
        elif reason == R.DAMAGED:
            pair.asked.add(chunk)
        elif reason == R.VERIFIED:
            pair.written.setdefault(chunk, []).append(row)
            self.written_bytes += row[5]

    def _shift(self, peer: int, pair: Pair, reason: int, row: Chunk) -> None:
        sources, target = MOVES[R(reason)]
        layer, first, count, head, num_heads, _ = row
        layers = slice(None) if layer < 0 else slice(layer, layer + 1)
        for each in range(head, head + num_heads):
            cells = self._cells.get((peer, each))
            if cells is None or layer >= pair.num_layers or first + count > pair.num_blocks:
                what = f"{R(reason).name}: head {each} or these blocks are not of rank {peer}"
                self._say(Rule.PLAN_DIFFERS, what, transfer=self.key, layer=layer, block=first)
                return
            part = cells[layers, first : first + count]
            wrong = np.argwhere(~np.isin(part, sources))
            if len(wrong):
                at = A(int(part[tuple(wrong[0])])).name
                what = f"{R(reason).name}: head {each} is {at} with rank {peer}"
                at_layer, at_block = max(layer, 0) + int(wrong[0][0]), first + int(wrong[0][1])
                where = {"layer": at_layer, "block": at_block}
                self._say(Rule.WRONG_ACCOUNT, what, transfer=self.key, **where)
            if target is not None:
                part[...] = target

    def _commit(self, peer: int, pair: Pair) -> None:
        pair.committed = True
        for head in pair.heads:
            cells = self._cells[peer, head]
            missing = np.argwhere(~np.isin(cells, (A.SENT, A.ACKED, A.RESIDENT)))
            if len(missing):
                layer, block = (int(i) for i in missing[0])
                what = f"rank {peer} committed head {head}, which was not sent"
                self._say(Rule.INCOMPLETE, what, transfer=self.key, layer=layer, block=block)
            cells[np.isin(cells, (A.SENT, A.ACKED))] = A.COMMITTED

    def _check_fence(self) -> None:
        for peer, head in self._cells:
            staged = np.argwhere(self._cells[peer, head] == A.STAGED)
            if len(staged):
                layer, block = (int(i) for i in staged[0])
                what = f"head {head} from rank {peer} may still be written"
                self._say(Rule.FENCE_SKIPPED, what, transfer=self.key, layer=layer, block=block)
                return
        for (peer, chunk), count in self._jobs.items():
            if count > 0:
                what = f"chunk {chunk} for rank {peer} is still read"
                self._say(Rule.FENCE_SKIPPED, what, transfer=self.key)

    def _check_all(self, wanted: tuple[Account, ...], num_blocks: int | None = None) -> None:
        for (peer, head), cells in self._cells.items():
            wrong = np.argwhere(~np.isin(cells[:, :num_blocks], wanted))
            if len(wrong):
                layer, block = (int(i) for i in wrong[0])
                what = f"head {head} with rank {peer} is {A(int(cells[layer, block])).name}"
                self._say(Rule.INCOMPLETE, what, transfer=self.key, layer=layer, block=block)
                return

    def _check_bytes(self) -> None:
        want = sum(
            (pair.num_blocks - pair.first) * len(pair.heads) * pair.block_bytes
            for pair in self.pairs.values()
        )
        if self.written_bytes != want:
            what = f"{self.written_bytes} bytes were written, the plan says {want}"
            self._say(Rule.BYTES_DIFFER, what, transfer=self.key)
