"""What one prefill rank still owes to all decode ranks of one transfer: pure, no clock, no wire."""

from collections.abc import Mapping

from transport.orders import Code, TransferFailed
from transport.outgoing_pair import OutgoingPair
from transport.sealed_runs import Run
from transport.shipment import SENDING, Sending, moved


class Places:
    """Where the blocks of a prompt lie, layer by layer, as far as they are sealed."""

    def __init__(self) -> None:
        self._runs: dict[int, list[Run]] = {}

    def add(self, run: Run) -> None:
        self._runs.setdefault(run.layer, []).append(run)

    def find(self, layer: int, first_block: int, num_blocks: int) -> Run | None:
        """These blocks, if all of them are sealed."""
        stop = first_block + num_blocks
        ids: dict[int, int] = {}
        tail_tokens = None
        for run in self._runs.get(layer, []):
            start = max(0, first_block - run.first_block)
            part = run.part(start, max(start, stop - run.first_block))
            ids |= {part.first_block + i: block_id for i, block_id in enumerate(part.block_ids)}
            if part.block_ids and part.tail_tokens is not None:
                tail_tokens = part.tail_tokens
        if len(ids) < num_blocks:
            return None
        return Run(layer, first_block, tuple(ids[i] for i in sorted(ids)), tail_tokens)


class Outgoing:
    """One transfer on one prefill rank, with a pair for each decode rank it feeds."""

    def __init__(self, pairs: Mapping[int, OutgoingPair]) -> None:
        self.pairs = dict(pairs)
        self.state = Sending.NEW
        self.places = Places()
        self.finished = False
        self.failure: TransferFailed | None = None

    @property
    def over(self) -> bool:
        """Nothing will be sent any more."""
        return self.failure is not None or self.state is Sending.RELEASED

    def seal(self, run: Run) -> None:
        assert not self.finished, f"{run} sealed after the last"
        self.places.add(run)
        for pair in self.pairs.values():
            pair.seal(run)

    def finish(self) -> None:
        """The engine seals no more."""
        self.finished = True
        self.advance()

    def seal_due(self, rank: int) -> bool:
        """Whether SealAll is to be sent to `rank` now."""
        pair = self.pairs[rank]
        due = self.finished and not pair.seal_sent and pair.first_block is not None
        return due and pair.all_sent and not self.over

    def advance(self) -> None:
        """Move on as far as what has happened allows."""
        if self.over:
            return
        pairs = self.pairs.values()
        if not pairs:
            self._move(Sending.RELEASED)
            return
        if self.state is Sending.NEW and any(pair.first_block is not None for pair in pairs):
            self._move(Sending.ADMITTED)
        if self.state is Sending.ADMITTED and any(pair.num_chunks for pair in pairs):
            self._move(Sending.STREAMING)
        if self.state in (Sending.ADMITTED, Sending.STREAMING) and self.finished:
            self._move(Sending.SEALED)
        committed = all(pair.committed for pair in pairs)
        done = all(pair.seal_sent and (pair.idle or pair.committed) for pair in pairs)
        if self.state is Sending.SEALED and done:
            self._move(Sending.AWAIT_COMMIT)
        if self.state is Sending.AWAIT_COMMIT and committed:
            self._move(Sending.RELEASED)

    def commit(self, rank: int) -> bool:
        """Decode holds every cell of this pair. Returns whether that was news, and possible."""
        pair = self.pairs[rank]
        if self.over or pair.committed or not pair.seal_sent:
            return False
        pair.committed = True
        self.advance()
        return True

    def fail(self, code: Code, reason: str, *, expired: bool = False) -> bool:
        """Give up; the first reason stands. Returns whether this was it."""
        if self.over:
            return False
        self.failure = TransferFailed(code, reason)
        self._move(Sending.EXPIRED if expired else Sending.ABORTING)
        return True

    def drained(self) -> None:
        """Nothing reads the blocks any more."""
        if self.failure is not None and self.state is not Sending.DRAINED:
            self._move(Sending.DRAINED)

    def _move(self, state: Sending) -> None:
        self.state = moved(SENDING, self.state, state)
