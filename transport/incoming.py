"""What one decode rank still lacks of one transfer: pure, no clock, no wire, no bytes.

Chunks are placed by layer, block and head, so they may come in any order and more than once. A cell
is claimed when a chunk that holds it is taken for verification, and counts when it is scattered;
no cell is claimed twice, so every cell is written exactly once. The good cells of a damaged chunk
stay, its bad ones go to `repairs`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from protos.transfer_pb2 import CellRun, Chunk, Open
from transport.cell_runs import Cell, cells_of, layers_of
from transport.orders import Code, FirstToken, TransferFailed
from transport.repairs import Repairs
from transport.shipment import RECEIVING, Receiving, Shape, moved


class Verdict(Enum):
    TAKE = "take"  # stage, verify, scatter; then `landed`
    KNOWN = "known"  # has landed before: acknowledge it again
    BUSY = "busy"  # being verified: its acknowledgement will come
    BAD = "bad"  # none of the cells that are still to come: drop it, and report it `damaged`
    STRAY = "stray"  # at the wrong time: drop it


class Remedy(Enum):
    ASK = "ask"  # for the chunk, again
    LET_GO = "let_go"  # it has been asked for often enough: acknowledge it, its cells are fetched
    NONE = "none"


@dataclass(slots=True)
class IncomingPair:
    """The share of one prefill rank."""

    heads: tuple[int, ...]
    columns: slice  # of these heads in the bitmap
    opened: bool = False
    heard_at: float = 0.0
    num_chunks: int | None = None  # once sealed
    gone: str = ""  # why it cannot be asked for anything any more
    landed: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)
    asked_again: set[int] = field(default_factory=set)
    damages: dict[int, int] = field(default_factory=dict)  # by chunk that was dropped whole
    num_damaged: int = 0  # chunks with anything wrong
    let_go: bool = False  # some chunk: what it would have brought is fetched cell by cell

    @property
    def arrived(self) -> bool:
        """All has come; some of it may still be verified."""
        return self.num_chunks == len(self.landed) + len(self.busy)

    @property
    def whole(self) -> bool:
        return self.num_chunks == len(self.landed)


class Incoming:
    """One transfer on one decode rank, with a pair for each prefill rank that feeds it."""

    def __init__(
        self,
        shape: Shape,
        num_tokens: int,
        first_block: int,
        sources: Mapping[int, tuple[int, ...]],
        max_resends: int,
    ) -> None:
        self.shape = shape
        self.num_tokens = num_tokens
        self.first_block = first_block
        self.state = Receiving.RESERVED
        self.failure: TransferFailed | None = None
        self.first_tokens: tuple[FirstToken, ...] = ()
        self.bytes_landed = 0
        self.repairs = Repairs()
        self._max_resends = max_resends
        self._heads = [head for _, heads in sorted(sources.items()) for head in heads]
        self.pairs: dict[int, IncomingPair] = {}
        column = 0
        for rank, heads in sorted(sources.items()):
            self.pairs[rank] = IncomingPair(heads, slice(column, column + len(heads)))
            column += len(heads)
        num_blocks = shape.num_blocks - first_block
        self._claimed_LBH = np.zeros((shape.num_layers, num_blocks, column), dtype=np.bool_)
        self._landed_LBH = np.zeros_like(self._claimed_LBH)
        self._num_missing = self._claimed_LBH.size

    @property
    def num_chunks(self) -> int:
        return sum(len(pair.landed) for pair in self.pairs.values())

    @property
    def over(self) -> bool:
        """Nothing will be taken any more."""
        return self.failure is not None or self.state is Receiving.COMMITTED

    @property
    def whole(self) -> bool:
        return self.state in (Receiving.WHOLE, Receiving.COMMITTED)

    @property
    def filled(self) -> bool:
        """Every cell of this rank is in its block."""
        return not self._num_missing

    @property
    def num_whole_blocks(self) -> int:
        """How many of our own blocks, from the prompt's first on, hold all this rank's cells."""
        whole_B = self._landed_LBH.all(axis=(0, 2))
        num_sent = self.first_block + int(np.cumprod(whole_B).sum())
        ends = num_sent == self.shape.num_blocks  # with a block that need not be full
        return -(-num_sent // self.shape.parts) if ends else num_sent // self.shape.parts

    def open(self, rank: int, open_: Open) -> bool:
        """A prefill rank calls. Returns whether it is to be given credit, now or again.

        Raises TransferFailed when it means another transfer than we do.
        """
        pair = self.pairs.get(rank)
        if self.over or self.whole:
            return False
        ours = (self.num_tokens, self.shape.num_layers, pair.heads if pair else None)
        theirs = (open_.num_tokens, open_.num_layers, tuple(open_.heads))
        if pair is None or ours != theirs:
            raise TransferFailed(
                Code.FAILED_PRECONDITION,
                f"prefill rank {rank} offers (tokens, layers, heads) {theirs}, we expect {ours}",
            )
        if open_.block_size not in (0, self.shape.block_size):
            raise TransferFailed(
                Code.FAILED_PRECONDITION,
                f"prefill rank {rank} offers blocks of {open_.block_size} tokens, "
                f"we expect {self.shape.block_size}",
            )
        pair.opened = True
        if self.state is Receiving.RESERVED:
            self._move(Receiving.OPEN)
        return True

    def offer(self, rank: int, chunk: Chunk) -> Verdict:
        """Whether to take a chunk; TAKE claims its cells."""
        pair = self.pairs[rank]
        if chunk.seq in pair.landed:
            return Verdict.KNOWN
        if chunk.seq in pair.busy:
            return Verdict.BUSY
        late = pair.num_chunks is not None and chunk.seq >= pair.num_chunks
        if self.over or not pair.opened or late:
            return Verdict.STRAY
        if not self._fits(chunk):
            return Verdict.BAD
        cells = self._claimed_LBH[self._places(pair, chunk)]
        if not cells.size or cells.any():
            return Verdict.BAD
        cells[...] = True
        pair.busy.add(chunk.seq)
        if self.state is Receiving.OPEN:
            self._move(Receiving.RECEIVING)
        return Verdict.TAKE

    def landed(self, rank: int, chunk: Chunk, bad: Mapping[Cell, str] | None = None) -> None:
        """A taken chunk is verified, and in its blocks but for the `bad` cells, each with why."""
        pair, bad = self.pairs[rank], bad or {}
        pair.busy.remove(chunk.seq)
        pair.landed.add(chunk.seq)
        pair.asked_again.discard(chunk.seq)
        places = self._places(pair, chunk)
        self._landed_LBH[places] = True
        for cell, reason in bad.items():
            self._landed_LBH[self._place(rank, cell)] = False
            self.repairs.add(rank, [cell], reason)
        self._num_missing -= self._landed_LBH[places].size - len(bad)
        self.bytes_landed += chunk.payload_bytes
        self._advance()

    def dropped(self, rank: int, chunk: Chunk) -> None:
        """A taken chunk was not written, or not all of it: the transfer was given up, or the chunk,
        or its link went. What was written of it counts for nothing.
        """
        pair = self.pairs[rank]
        pair.busy.remove(chunk.seq)
        self._claimed_LBH[self._places(pair, chunk)] = False
        if pair.gone:
            self.lose(rank, pair.gone)

    def offer_again(self, rank: int, run: CellRun) -> list[Cell]:
        """The cells of `run` when all of them are wanted now, and claimed; else none."""
        pair = self.pairs[rank]
        few = 0 < run.num_blocks <= self.shape.num_blocks and len(run.heads) <= len(pair.heads)
        known = few and list(run.heads) == sorted(set(run.heads) & set(pair.heads))
        cells = list(cells_of(run)) if known and not self.over else []
        return cells if self.repairs.claim(cells) else []

    def landed_again(
        self, rank: int, cells: Sequence[Cell], bad: Mapping[Cell, str], num_bytes: int
    ) -> None:
        """What was claimed is verified, and in its blocks but for the `bad` cells."""
        for cell in cells:
            self._landed_LBH[self._place(rank, cell)] = cell not in bad
        self._num_missing -= self.repairs.settle(cells, bad)
        self.bytes_landed += num_bytes
        self._advance()

    def damaged(self, rank: int, chunk: Chunk, reason: str) -> Remedy:
        """A chunk was dropped whole, since it does not even say what it carries.

        With nobody left to ask, the transfer fails.
        """
        pair = self.pairs[rank]
        pair.num_damaged += 1
        if self.over or chunk.seq in pair.landed or chunk.seq in pair.busy:
            return Remedy.NONE
        if pair.gone:
            self.fail(Code.UNAVAILABLE, f"{reason}; cannot ask again: {pair.gone}")
            return Remedy.NONE
        if chunk.seq >= (self._most_chunks(pair) if pair.num_chunks is None else pair.num_chunks):
            return Remedy.NONE  # not even its number is right: it is missed when all is sealed
        times = pair.damages[chunk.seq] = pair.damages.get(chunk.seq, 0) + 1
        if times > self._max_resends:
            pair.let_go = True
            pair.landed.add(chunk.seq)
            pair.asked_again.discard(chunk.seq)
            self._advance()
            return Remedy.LET_GO
        pair.asked_again.add(chunk.seq)
        self._advance()
        return Remedy.ASK

    def seal(
        self, rank: int, num_chunks: int, first_tokens: tuple[FirstToken, ...] = ()
    ) -> list[int]:
        """A prefill rank says it has sent all. Returns the chunks that never came, to ask for."""
        pair = self.pairs[rank]
        if self.over or not pair.opened or self.whole:
            return []
        if pair.num_chunks is None:
            most = self._most_chunks(pair)
            if num_chunks > most or max(pair.landed, default=-1) >= num_chunks:
                self.fail(
                    Code.DATA_LOSS,
                    f"prefill rank {rank} sealed {num_chunks} chunks after {len(pair.landed)} "
                    f"of at most {most}",
                )
                return []
            pair.num_chunks = num_chunks
            pair.asked_again = {seq for seq in pair.asked_again if seq < num_chunks}
            self.first_tokens += first_tokens
        lost = set(range(pair.num_chunks)) - pair.landed - pair.busy - pair.asked_again
        pair.asked_again |= lost
        self._advance()
        return sorted(lost)

    def lose(self, rank: int, reason: str) -> None:
        """The link to a prefill rank is gone: fails the transfer unless all of it has come."""
        pair = self.pairs[rank]
        pair.gone = reason
        if not pair.arrived and not self.whole:
            self.fail(Code.UNAVAILABLE, f"{reason}, before {self.where(rank)}")

    def commit(self) -> None:
        """Every rank of the group is whole. Raises TransferFailed when this one is not."""
        if self.failure is not None:
            raise self.failure
        if self.state is not Receiving.WHOLE:
            raise TransferFailed(
                Code.FAILED_PRECONDITION,
                f"cannot commit in state {self.state.value}: {self.where()} is missing",
            )
        self._move(Receiving.COMMITTED)

    def fail(self, code: Code, reason: str) -> bool:
        """Give up; the first reason stands. Returns whether this was it."""
        if self.over:
            return False
        self.failure = TransferFailed(code, reason)
        self._move(Receiving.ABORTING)
        return True

    def settle(self, num_scattering: int) -> None:
        """After a failure: free the blocks, unless a scatter still writes to them."""
        if self.failure is None or self.state is Receiving.FREED:
            return
        if not num_scattering:
            self._move(Receiving.FREED)
        elif self.state is Receiving.ABORTING:
            self._move(Receiving.QUARANTINE)

    def where(self, rank: int | None = None) -> str:
        """The first cell that nobody has sent yet, for error messages."""
        columns = self.pairs[rank].columns if rank is not None else slice(None)
        missing = np.argwhere(~self._claimed_LBH[:, :, columns])
        if not len(missing):
            return str(self.repairs.first) if len(self.repairs) else "the end"
        layer, block, column = (int(i) for i in missing[0])
        head = self._heads[column + (columns.start or 0)]
        return f"layer {layer}, block {block + self.first_block}, head {head}"

    def check(self) -> None:
        """Raise unless the bitmap, the counts and the state tell the same story."""
        busy = any(pair.busy for pair in self.pairs.values())
        free = int((~self._claimed_LBH).sum())
        landed = int(self._landed_LBH.sum())
        assert landed == self._claimed_LBH.size - self._num_missing, f"{landed} cells landed"
        assert not (self._landed_LBH & ~self._claimed_LBH).any(), "landed without being claimed"
        assert free <= self._num_missing, f"{free} cells free, {self._num_missing} missing"
        lost = self._num_missing - free - len(self.repairs)
        assert lost >= 0 if busy else lost == 0, f"{lost} cells lost"
        assert not (self.whole and self._num_missing), f"whole without {self._num_missing} cells"
        for pair in self.pairs.values():
            assert not pair.landed & pair.busy
            assert not pair.landed & pair.asked_again

    def _most_chunks(self, pair: IncomingPair) -> int:
        """Each has all the pair's heads of one block in one layer at least."""
        num_layers, num_blocks, _ = self._claimed_LBH.shape
        return num_layers * num_blocks * bool(pair.heads)

    def _fits(self, chunk: Chunk) -> bool:
        """Whether it is of blocks that are to come, in layers that are, and are alike."""
        layers, first = layers_of(chunk), chunk.first_block - self.first_block
        num_layers, num_blocks, _ = self._claimed_LBH.shape
        if layers.stop > num_layers or not 0 <= first < first + chunk.num_blocks <= num_blocks:
            return False
        return len(set(self.shape.layers[layers.start : layers.stop])) == 1

    def _places(self, pair: IncomingPair, chunk: Chunk) -> tuple[slice, slice, slice]:
        """Of a chunk that fits, in the bitmaps."""
        layers, first = layers_of(chunk), chunk.first_block - self.first_block
        blocks = slice(first, first + chunk.num_blocks)
        return slice(layers.start, layers.stop), blocks, pair.columns

    def _place(self, rank: int, cell: Cell) -> tuple[int, int, int]:
        """Of one cell in the bitmaps."""
        pair = self.pairs[rank]
        column = pair.columns.start + pair.heads.index(cell.head)
        return cell.layer, cell.block - self.first_block, column

    def _advance(self) -> None:
        if self.over or self.whole or self.state is Receiving.RESERVED:
            return
        pairs = self.pairs.values()
        if any(pair.asked_again for pair in pairs) or len(self.repairs):
            if self.state in (Receiving.RECEIVING, Receiving.VERIFYING):
                self._move(Receiving.REPAIRING)
            return
        if all(pair.num_chunks is not None for pair in pairs):
            if self.state is not Receiving.VERIFYING:
                self._move(Receiving.VERIFYING)
            self._finish()
        elif self.state is Receiving.REPAIRING:
            self._move(Receiving.RECEIVING)

    def _finish(self) -> None:
        if not all(pair.whole for pair in self.pairs.values()):
            return
        if not self._num_missing:
            self._move(Receiving.WHOLE)
            return
        for rank, pair in self.pairs.items():
            if pair.let_go:
                self._want_missing(rank, pair)
        if len(self.repairs):
            self._move(Receiving.REPAIRING)
        else:
            self.fail(Code.DATA_LOSS, f"everything arrived, but {self.where()} was in no chunk")

    def _want_missing(self, rank: int, pair: IncomingPair) -> None:
        """Every cell of the pair that nobody has sent is to be fetched."""
        free_LBH = self._claimed_LBH[:, :, pair.columns]
        cells = [
            Cell(int(layer), int(block) + self.first_block, pair.heads[column])
            for layer, block, column in np.argwhere(~free_LBH)
        ]
        free_LBH[...] = True
        self.repairs.add(rank, cells, "it never came whole")

    def _move(self, state: Receiving) -> None:
        self.state = moved(RECEIVING, self.state, state)
